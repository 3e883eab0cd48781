"""Benchmarks of the library; run from a checkout, never installed."""
