"""The engine: composes the model states by the stage's row of `states.STAGES`, and drives them through a step."""
