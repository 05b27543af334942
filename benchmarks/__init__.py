"""What a measurement costs, as ratios: ``python -m benchmarks``."""
