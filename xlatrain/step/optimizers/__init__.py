"""Update rules of the optimizers of ``torch.optim``, without torch: pure functions of one parameter.

:data:`RULES` maps the name of a ``torch.optim`` class to its rule.
"""

from __future__ import annotations

from xlatrain.step.optimizers.adadelta import Adadelta
from xlatrain.step.optimizers.adafactor import Adafactor
from xlatrain.step.optimizers.adagrad import Adagrad
from xlatrain.step.optimizers.adam import Adam
from xlatrain.step.optimizers.adamax import Adamax
from xlatrain.step.optimizers.asgd import ASGD
from xlatrain.step.optimizers.muon import Muon
from xlatrain.step.optimizers.nadam import NAdam
from xlatrain.step.optimizers.radam import RAdam
from xlatrain.step.optimizers.rmsprop import RMSprop
from xlatrain.step.optimizers.rprop import Rprop
from xlatrain.step.optimizers.rule import UpdateRule, apply_rule
from xlatrain.step.optimizers.sgd import SGD

__all__ = ["RULES", "UpdateRule", "apply_rule"]

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
