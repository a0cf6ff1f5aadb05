"""Examples in the docstrings of public names run as they are written."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax.sharding import PartitionSpec

import torch_compat as pl
import xlatrain
from torch_compat import callbacks, strategies
from torch_compat.demos.boring_classes import BoringModel
from torch_compat.fabric import Fabric
from torch_compat.loggers import CSVLogger
from torch_compat.tuner import Tuner
from xlatrain.mesh import make_mesh


class Module(BoringModel):
    """Has a rate that a finder can set."""

    lr = 0.1


class Classifier(xlatrain.JaxModule):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(4, 2, rngs=rngs)

    def training_step(self, batch: Any) -> jax.Array:
        loss = optax.softmax_cross_entropy_with_integer_labels(self.layer(batch[0]), batch[1]).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def names() -> dict[str, Any]:
    """The names that examples use."""
    module = Module()
    return {
        "pl": pl,
        "torch": torch,
        "xlatrain": xlatrain,
        "optax": optax,
        "nnx": nnx,
        "PartitionSpec": PartitionSpec,
        **{name: getattr(callbacks, name) for name in callbacks.__all__},
        "MeshStrategy": strategies.MeshStrategy,
        "Tuner": Tuner,
        "Fabric": Fabric,
        "CSVLogger": CSVLogger,
        "make_mesh": make_mesh,
        "Classifier": Classifier,
        "module": module,
        "net": torch.nn.Linear(32, 2),
        "loader": torch.utils.data.DataLoader(torch.randn(16, 32), 2),
        "trainer": pl.Trainer(max_epochs=4, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False),
        "batches": [(np.ones((8, 4), np.float32), np.zeros(8, np.int32))],
    }


PUBLIC = [
    *(pl.Trainer, Fabric, xlatrain.fit, xlatrain.JaxModule, strategies.MeshStrategy, Tuner, make_mesh),
    *(callbacks.ModelCheckpoint, callbacks.EarlyStopping, callbacks.LearningRateMonitor, callbacks.NonFiniteGuard),
]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_the_example_runs(public: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"::\n\n((?:(?: {4}.*)?\n)+)", f"{inspect.getdoc(public)}\n")
    assert examples
    for example in examples:
        exec(compile(textwrap.dedent(example), public.__name__, "exec"), names())
