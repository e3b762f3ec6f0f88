"""The residual states: what a step needs in passing."""
