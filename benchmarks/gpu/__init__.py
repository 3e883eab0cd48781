"""Decoding on a GPU: our ops in CUDA graphs with a cold L2 cache, against a copy, torch and others."""
