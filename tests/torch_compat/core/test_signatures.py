"""Public members of the core classes against those of the installed Lightning, which runs in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest

from tests import warm

# Prints {class: {member: [kind, parameters]}}; run under stock Lightning and, through the aliases, under torch_compat.
PROGRAM = """
import inspect, json, sys
if sys.argv[1] == "ours":
    import torch_compat
    torch_compat.install()
import lightning.pytorch as pl
import torch
from lightning.pytorch.core import hooks
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos import boring_classes
from lightning.pytorch.utilities import CombinedLoader, grad_norm, measure_flops, move_data_to_device
from lightning.pytorch.utilities.model_summary import ModelSummary
from lightning.pytorch.utilities.seed import isolate_rng

def default(value):
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__

def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [[p.name, str(p.kind), "<none>" if p.default is p.empty else default(p.default)] for p in found]

def describe(owner, name):
    value = inspect.getattr_static(owner, name)
    if isinstance(value, property):
        return ["property", value.fset is not None]
    if inspect.isfunction(value):
        return ["method", parameters(value)]
    if callable(getattr(owner, name, None)):
        return ["class method", parameters(getattr(owner, name))]
    return ["value", default(value)]

def public(owner):
    inherited = set(dir(torch.nn.Module)) | set(dir(object))
    own = {n for cls in owner.__mro__ if cls.__module__.partition(".")[0] in ("lightning", "torch_compat") for n in vars(cls)}
    return sorted(n for n in set(dir(owner)) - (inherited - own) if not n.startswith("_"))

classes = [pl.LightningModule, pl.LightningDataModule, hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks,
           CombinedLoader, LightningOptimizer, ModelSummary, boring_classes.BoringModel, boring_classes.DemoModel]
table = {cls.__name__: {name: describe(cls, name) for name in public(cls)} for cls in classes}
functions = [pl.seed_everything, grad_norm, measure_flops, move_data_to_device, isolate_rng]
table["functions"] = {f.__name__: parameters(f) for f in functions}
table["constructors"] = {cls.__name__: parameters(cls) for cls in classes}
print(json.dumps(table))
"""


def table(which: str) -> dict[str, dict[str, list[object]]]:
    preloaded = warm.OURS if which == "ours" else warm.STOCK
    result = warm.run(preloaded, ["-c", PROGRAM, which], env=os.environ, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs the real package")
def test_public_members_have_lightnings_signatures() -> None:
    ours, stock = table("ours"), table("stock")
    assert len(stock["LightningModule"]) > 100
    differences = [
        f"{owner}.{name}: expected {expected}, found {ours[owner].get(name)}"
        for owner, members in stock.items()
        for name, expected in members.items()
        if ours[owner].get(name) != expected
    ]
    assert not differences, "\n".join(differences)
