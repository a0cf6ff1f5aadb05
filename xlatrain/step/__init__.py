"""Compiled steps: their state, programs, optimizers, and the engine for ``flax.nnx`` modules."""
