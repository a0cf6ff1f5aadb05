"""Update rules of the optimizers of ``torch.optim``, without torch: pure functions of one parameter.

:data:`RULES` maps the name of a ``torch.optim`` class to its rule; :func:`gradient_transformation` makes an
``optax.GradientTransformation`` of one.
"""

from __future__ import annotations

from xlatrain.optimizers.adam import Adam
from xlatrain.optimizers.rule import UpdateRule, apply_rule
from xlatrain.optimizers.sgd import SGD

__all__ = ["RULES", "UpdateRule", "apply_rule"]

RULES: dict[str, type[UpdateRule]] = {
    "Adam": Adam,
    "AdamW": Adam,
    "SGD": SGD,
}
"""Name of a class of ``torch.optim`` → its update rule."""
