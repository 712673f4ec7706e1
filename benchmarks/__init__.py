"""Scripts that measure what the README claims; each writes `benchmarks/results/NAME.json` (form: `results.py`)."""
