"""Benchmarks: ``python -m benchmarks`` prints one table; see ``benchmarks/README.md``."""
