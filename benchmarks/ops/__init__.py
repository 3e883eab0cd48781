"""Benchmarks of the single ops: `python -m benchmarks.ops`."""
