"""Update rules of the optimizers of ``torch.optim``, without torch: pure functions of one parameter.

:data:`RULES` maps the name of a ``torch.optim`` class to its rule; :func:`gradient_transformation` makes an
``optax.GradientTransformation`` of one.
"""

from __future__ import annotations

from xlatrain.optimizers.adadelta import Adadelta
from xlatrain.optimizers.adafactor import Adafactor
from xlatrain.optimizers.adagrad import Adagrad
from xlatrain.optimizers.adam import Adam
from xlatrain.optimizers.adamax import Adamax
from xlatrain.optimizers.asgd import ASGD
from xlatrain.optimizers.muon import Muon
from xlatrain.optimizers.nadam import NAdam
from xlatrain.optimizers.radam import RAdam
from xlatrain.optimizers.rmsprop import RMSprop
from xlatrain.optimizers.rprop import Rprop
from xlatrain.optimizers.rule import UpdateRule, apply_rule
from xlatrain.optimizers.sgd import SGD
from xlatrain.optimizers.transform import gradient_transformation

__all__ = ["RULES", "UpdateRule", "apply_rule", "gradient_transformation"]

RULES: dict[str, type[UpdateRule]] = {
    "ASGD": ASGD,
    "Adadelta": Adadelta,
    "Adafactor": Adafactor,
    "Adagrad": Adagrad,
    "Adam": Adam,
    "AdamW": Adam,
    "Adamax": Adamax,
    "Muon": Muon,
    "NAdam": NAdam,
    "RAdam": RAdam,
    "RMSprop": RMSprop,
    "Rprop": Rprop,
    "SGD": SGD,
}
"""Name of a class of ``torch.optim`` → its update rule."""
