"""Optimization of a run, batch by batch, compiled: automatic or manual."""
