"""Optimization in a compiled run: automatic, manual, by several optimizers, and the hooks around the update."""
