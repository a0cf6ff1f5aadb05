"""Modules whose parameters get their values later, each by a program of its own, directly on the shards.

Inside :func:`deferred_init` the user's own constructors run as they are; tensor ops are written on a tape instead of being
computed, so that no memory is spent. What has to be computed for one parameter is its slice of the tape.
"""

from xlatrain.bridge.lazy_init.block import deferred_init, draw_seed
from xlatrain.bridge.lazy_init.evaluate import Born, born
from xlatrain.bridge.lazy_init.initializers import SkippedInitializers
from xlatrain.bridge.lazy_init.slices import describe_recorded
from xlatrain.bridge.lazy_init.tape import operand_of
from xlatrain.bridge.lazy_init.tensors import is_deferred, settle, undefer

__all__ = [
    "Born",
    "SkippedInitializers",
    "born",
    "deferred_init",
    "describe_recorded",
    "draw_seed",
    "is_deferred",
    "operand_of",
    "settle",
    "undefer",
]
