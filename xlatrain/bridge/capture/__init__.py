"""A PyTorch function → a pure graph of ATen ops."""

from xlatrain import moved

__getattr__ = moved.old_names(__name__, moved.NAMES[__name__])
