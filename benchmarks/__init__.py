"""Benchmarks: our ops and training step beside their peers, in one run on one GPU."""
