"""Pytree paths as flat names: ``{"params": {"fc.weight": w}}`` is stored as ``params/fc.weight``."""

from __future__ import annotations

from typing import Any

import jax

SEPARATOR = "/"


def flatten_names(tree: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of a pytree by name, in flattening order, and the tree's structure.

    ``None`` is an empty node, as everywhere in JAX: it has no name and is not stored.

    Raises:
        ValueError: two leaves get the same name (``{"a/b": x, "a": {"b": y}}``), or a leaf is the root and has none.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    named: dict[str, Any] = {}
    for key_path, leaf in leaves:
        name = jax.tree_util.keystr(key_path, simple=True, separator=SEPARATOR)
        if not name:
            raise ValueError("arrays is a single array or has an empty key; give a pytree with names, e.g. {'weight': array}")
        if name in named:
            raise ValueError(f"two arrays have the same name {name!r} (keys are joined by {SEPARATOR!r}); rename one of the keys")
        named[name] = leaf
    return named, structure
