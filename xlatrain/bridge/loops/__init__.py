"""Repeated layers of a captured graph, rolled up into loops."""

from xlatrain import moved

__getattr__ = moved.old_names(__name__, moved.NAMES[__name__])
