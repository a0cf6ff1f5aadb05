"""Steps that were made for outcomes which only the step itself knows: where one comes out otherwise, the state stays as it was.

A program of such a step gives all outcomes, and takes nothing over where one of them is not the assumed one. The caller, who
reads them, puts the old state together again (:func:`before`) and runs another program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

UNDECIDED = -(2**31)
"""In the place of an outcome: the program cannot tell, and the step is not taken over."""

_Tree = TypeVar("_Tree")


class Outcomes(NamedTuple):
    """The outcomes of a step for which it was made.

    Attributes:
        found: int32[n], those of this step.
        held: bool scalar, whether all are as assumed.
    """

    found: jax.Array
    held: jax.Array


class Guarded(NamedTuple):
    """The outputs of a program of a step with assumed outcomes.

    Attributes:
        outputs: those that it would have else; of no meaning where an outcome is another one.
        found: int32[n], the outcomes.
        left: the leaves of the old state that have no successor in the new one.
    """

    outputs: Any
    found: jax.Array
    left: dict[str, jax.Array]


def outcomes(found: Sequence[jax.Array], assumed: Sequence[int], trusted: jax.Array) -> Outcomes:
    """Compare the outcomes of a step, int scalars, with those for which it was made.

    Args:
        trusted: int32 scalar: so many of the first ones the caller knows already. They hold, whatever this program finds: it may
            round otherwise than the one that found them.
    """
    values = jnp.stack([one.astype(jnp.int32).reshape(()) for one in found])
    right = values == jnp.asarray(np.asarray(assumed, np.int32))
    return Outcomes(values, (right | (jnp.arange(len(found)) < trusted)).all())


def keep(held: jax.Array, old: _Tree, new: _Tree) -> tuple[_Tree, dict[str, jax.Array]]:
    """``new`` where ``held`` (bool scalar), else ``old``, leaf by leaf; and the leaves of ``old`` that ``new`` does not have.

    A leaf that only ``new`` has is as it is: :func:`before` leaves it out.
    """
    known = _leaves(old)
    paths, structure = jax.tree_util.tree_flatten_with_path(new)
    leaves: list[Any] = []
    for path, leaf in paths:
        name = jax.tree_util.keystr(path)
        former = known.get(name)
        if former is None or former.shape != leaf.shape or former.dtype != leaf.dtype:
            leaves.append(leaf)
            continue
        del known[name]
        leaves.append(leaf if leaf is former else jnp.where(held, leaf, former))
    return jax.tree.unflatten(structure, leaves), known


def before(structure: Any, new: Any, left: Mapping[str, jax.Array]) -> Any:
    """The old state, which had this structure, from what a program that did not take over anything gave."""
    found = {**_leaves(new), **left}
    places, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))
    return jax.tree.unflatten(structure, [found[jax.tree_util.keystr(path)] for path, _ in places])


def _leaves(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
