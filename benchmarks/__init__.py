"""Benchmarks: our ops and training step compared with their peers, in one run on one GPU."""
