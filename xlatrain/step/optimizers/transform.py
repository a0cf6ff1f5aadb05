"""An update rule as an ``optax.GradientTransformation``."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from xlatrain.step.optimizers.rule import State, UpdateRule, apply_rule


class RuleState(NamedTuple):
    """State of :func:`gradient_transformation`: one dict of arrays per parameter, in the parameters' flatten order."""

    leaves: tuple[State, ...]


def gradient_transformation(kind: type[UpdateRule], **options: Any) -> optax.GradientTransformation:
    """The update of a ``torch.optim`` class as an optax transformation, to be used like any other.

    Args:
        kind: from :data:`xlatrain.step.optimizers.RULES`, e.g. ``RULES["RAdam"]``.
        **options: the options of the torch class that its rule reads (:attr:`UpdateRule.OPTIONS`): each number (``lr``,
            ``betas``, ``eps``, …), and the flags that are to be on. They are fixed here; ``optax.inject_hyperparams`` does not
            apply, since values are derived from them in double.

    Raises:
        ValueError: an option that the rule does not know, or one that it needs and that is missing.
    """
    unknown = set(options) - set(kind.OPTIONS)
    if unknown:
        raise ValueError(f"{kind.__name__} has no options {sorted(unknown)}; it has {', '.join(kind.OPTIONS)}")
    try:
        rule = kind.from_options(options)
        numbers = rule.numbers(options)
    except KeyError as error:
        raise ValueError(f"{kind.__name__} needs the option {error.args[0]!r}; got {sorted(options)}") from None

    def init(params: optax.Params) -> RuleState:
        return RuleState(tuple(rule.init(jnp.asarray(leaf), options) for leaf in jax.tree.leaves(params)))

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None) -> tuple[Any, RuleState]:
        if params is None:
            raise ValueError(f"{kind.__name__}: update(grads, state, params) needs the parameters")
        assert isinstance(state, RuleState)
        leaves, treedef = jax.tree.flatten(params)
        found = [
            apply_rule(rule, grad, leaf_state, leaf, numbers)
            for grad, leaf_state, leaf in zip(treedef.flatten_up_to(updates), state.leaves, leaves, strict=True)
        ]
        differences = [new - old for (new, _), old in zip(found, leaves, strict=True)]
        return treedef.unflatten(differences), RuleState(tuple(leaf_state for _, leaf_state in found))

    return optax.GradientTransformation(init, update)
