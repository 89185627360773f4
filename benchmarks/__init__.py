"""Benchmarks: each prints its figures as one JSON line with `--json`."""
