"""Which parameters' gradients were not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from xlatrain.step.finite import FiniteGuard


def test_programs_of_other_parameters_name_their_own() -> None:
    guard = FiniteGuard(skip=False)
    check = jax.jit(guard.check)
    bad, good = jnp.array([1.0, jnp.nan]), jnp.ones(2)
    trained = [{"a": bad, "b": good}, {"b": bad, "c": good, "a": None}, {"c": bad, "a": good}]
    found = [np.asarray(check(grads)) for grads in (*trained, trained[0])]  # the last runs the first one's program
    assert [guard.not_finite(flags) for flags in found] == [["a"], ["b"], ["c"], ["a"]]
    assert not any(flags.all() for flags in found)


def test_no_gradients() -> None:
    guard = FiniteGuard(skip=True)
    flags = np.asarray(guard.check({"a": None}))
    assert flags.all()
    assert guard.not_finite(flags) == []
