"""Benchmarks, run by `python -m tests.bench.run`: no tests."""
