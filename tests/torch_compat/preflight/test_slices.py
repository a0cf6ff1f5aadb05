"""Two slices of TPUs, joined by the data-center network. (Two processes stand for them in tests/multiprocess/test_layers.py.)"""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch
from torch.utils.data import DataLoader

from torch_compat import LightningModule, Trainer
from torch_compat.strategies import MeshStrategy
from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.sharding import ShardingRules, ShardingTable
from xlatrain.preflight import Topology


class Layers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(32, 256, bias=False), torch.nn.Tanh(), torch.nn.Linear(256, 16, bias=False)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def examine(axes: dict[str, int]) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    run = Trainer(accelerator="cpu", strategy=MeshStrategy(axes), max_steps=1, **quiet)  # pyright: ignore[reportArgumentType]
    return run.preflight(Layers(), DataLoader(torch.zeros(64, 32), 8), topology="v5e:2x2", num_slices=2)


@pytest.mark.slow
def test_only_sums_of_gradient_shards_go_between_slices() -> None:
    report = examine({"data": 2, "fsdp": 4})
    assert (report.fits, report.chips, report.mesh) == (True, 8, {"data": 2, "fsdp": 4})
    gathered = report.collectives["fsdp"]["all-gather"]
    assert gathered["bytes"] >= report.parameters * 4 // 4  # inside of a slice
    assert set(report.collectives) == {"fsdp", "dcn"}
    shard = report.parameters * 4 // 4  # bytes of a device's part of the gradients, float32
    sent = sum(kind["bytes"] for kind in report.collectives["dcn"].values())
    assert 0 < sent <= 2.25 * shard  # a sum takes two passes


def test_gathers_between_slices_are_warned_of() -> None:
    devices = Topology.parse("v5e:2x2", 2).devices()
    weights = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}

    def warnings(axes: dict[str, int]) -> tuple[str, ...]:
        return ShardingTable.from_rules(ShardingRules(), make_mesh(axes, devices), weights).warnings

    assert not warnings({"data": 2, "fsdp": 4})
    (said,) = warnings({"data": 1, "fsdp": 8})
    assert "'fsdp' of size 8 goes over several TPU slices" in said and "{'data': 2, 'fsdp': -1}" in said
