"""Compiled steps: their state, programs, optimizers, and the engine for ``flax.nnx`` modules."""

from xlatrain import moved

__getattr__ = moved.old_names(__name__, moved.NAMES[__name__])
