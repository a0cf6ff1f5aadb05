"""Lowerings of ATen ops to JAX, one file per op family; importing this package registers them all."""
