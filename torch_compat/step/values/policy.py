"""The policy of what is looked at: how far values of the host are walked, and packages that are looked after elsewhere.

Beyond these limits a value is data: it is compared now and then, by its length, or by which object it is.
"""

from __future__ import annotations

DEPTH = 8
"""Objects inside one another that are compared with a copy, or described."""
DEPTH_OF_STATE = 6
"""The same of objects whose contents are places of their own, or whose changes are recorded."""
DEPTH_OF_SETTINGS = 4
"""The same of what selects a program by its contents: containers and plain objects in attributes."""
DEPTH_OF_ITERATORS = 3
"""The same where an iterator or a mock is looked for."""
OBJECTS = 2_000
"""Objects below one that is described, or whose contents are places one by one."""
FEW = 64
"""Entries of a container that is looked into for what the step may depend on beside the container itself."""
ENTRIES = 1_000
"""Entries of a container that is compared at each step; one with more is compared now and then."""
ENTRIES_OF_LISTS = 10 * ENTRIES
"""The same of a list in an attribute."""
MOST = 100_000
"""Entries below a container that are compared at one look, and entries of a collection whose changes are recorded."""
BYTES = 1 << 22
"""Bytes of an array, or of a tensor that shares its memory, that are compared one by one."""
BYTES_OF_STATE = 1 << 20
"""Bytes of an array in an attribute whose changes are recorded."""

LIBRARIES = frozenset(
    {"torch_compat", "xlatrain", "torch", "jax", "jaxlib", "numpy", "torchmetrics", "lightning_utilities", "optax", "flax"}
)
"""Packages whose objects and functions are looked after elsewhere, or hold nothing that a step may depend on."""
NO_NOTES = LIBRARIES | {"torchgen", "functorch", "sympy", "mpmath", "triton", "numba", "pytest", "_pytest", "typing_extensions"}
"""Packages whose source is not rewritten, besides Python's own."""
CONSTANTS = frozenset({"pandas.core.indexes.base.Index", "pandas.Index"})
"""Classes of packages whose objects never change. An index makes tables of its labels when it is first asked."""
KEPT_IN_C = frozenset({"pandas.core.frame.DataFrame", "pandas.core.series.Series", "pandas.DataFrame", "pandas.Series"})
"""Classes of packages whose objects keep what they hold in objects of C, of which a capture cannot take back what it changes."""
INFRASTRUCTURE = frozenset({"torch", "torch_compat", "xlatrain", "torchmetrics", "lightning", "pytorch_lightning", "__main__"})
"""Packages of modules whose other objects are no state of a step, or are followed by their own means."""
