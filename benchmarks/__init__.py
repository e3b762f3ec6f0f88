"""The same training job on several systems, interleaved in one run: `python -m benchmarks --help`."""
