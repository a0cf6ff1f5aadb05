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


class Stack(Layers):
    """Four equal layers between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(4))
        self.first, self.last = torch.nn.Linear(32, 256, bias=False), torch.nn.Linear(256, 16, bias=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = self.first(batch)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.last(x).square().mean()


def examine(axes: dict[str, int], module: LightningModule | None = None) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    run = Trainer(accelerator="cpu", strategy=MeshStrategy(axes), max_steps=1, **quiet)  # pyright: ignore[reportArgumentType]
    return run.preflight(module or Layers(), DataLoader(torch.zeros(64, 32), 8), topology="v5e:2x2", num_slices=2)


@pytest.mark.slow
def test_only_sums_of_gradient_shards_go_between_slices() -> None:
    report = examine({"data": 2, "fsdp": 4})
    assert (report.fits, report.chips, report.mesh) == (True, 8, {"data": 2, "fsdp": 4})
    gathered = report.collectives["fsdp"]["all-gather"]
    assert gathered["bytes"] >= report.parameters * 4 // 4  # inside of a slice
    assert set(report.collectives) == {"fsdp", "dcn"}
    shard = report.parameters * 4 // 4  # bytes of a device's part of the gradients, float32
    assert set(report.collectives["dcn"]) == {"all-reduce"}
    assert 0 < report.collectives["dcn"]["all-reduce"]["bytes"] <= 2.25 * shard  # small arrays are padded to tiles


@pytest.mark.slow
def test_stages_on_two_slices_send_each_other_activations() -> None:
    report = examine({"stage": 2, "fsdp": 4}, Stack())
    assert (report.fits, report.mesh) == (True, {"stage": 2, "fsdp": 4})
    assert [one.partition(", ")[2] for one in report.loops] == ["on 2 stages: 16 microbatches, 5.9% of the time waiting"] * 2
    moves = 2 * 2 * 17  # in each tick, forward and backward: on to the next stage, and dealt out
    row = 256 * 4  # bytes; a device has one of a microbatch of four
    others = (32 + 16) * 256 * 4 // 4  # bytes of a device's part of the gradients outside of the layers
    assert set(report.collectives) == {"fsdp", "dcn"}
    sent = report.collectives["dcn"]
    assert set(sent) == {"collective-permute", "all-gather", "all-reduce"}  # stages split what lies outside of the layers, too
    assert (sent["collective-permute"]["count"], sent["collective-permute"]["bytes"]) == (moves, moves * row)
    assert 0 < sent["all-gather"]["bytes"] <= others and 0 < sent["all-reduce"]["bytes"] <= 2.25 * others


@pytest.mark.slow
def test_stages_gather_weights_layer_by_layer() -> None:
    """Products that the partitioner would compute wrongly take gathered weights: inside of a stage, not all layers before."""
    module, axes = Stack(), {"stage": 2, "data": 2, "fsdp": 2, "tensor": 2}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = MeshStrategy(axes, tensor_parallel_plan={"layers.*": "colwise"})
    run = Trainer(accelerator="cpu", strategy=strategy, max_steps=1, **quiet)  # pyright: ignore[reportArgumentType]
    report = run.preflight(module, DataLoader(torch.zeros(64, 32), 8), topology="v5e:4x4")
    assert [one.partition(", ")[2] for one in report.loops] == ["on 2 stages: 16 microbatches, 5.9% of the time waiting"] * 2
    between = [kinds for axis, kinds in report.collectives.items() if "stage" in axis and "all-gather" in kinds]
    assert sum(kinds["all-gather"]["bytes"] for kinds in between) < 4 * 256 * 256 * 4 // 2  # the layers' weights over tensor


def test_gathers_between_slices_are_warned_of() -> None:
    devices = Topology.parse("v5e:2x2", 2).devices()
    weights = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}

    def warnings(axes: dict[str, int]) -> tuple[str, ...]:
        return ShardingTable.from_rules(ShardingRules(), make_mesh(axes, devices), weights).warnings

    assert not warnings({"data": 2, "fsdp": 4})
    (said,) = warnings({"data": 1, "fsdp": 8})
    assert "'fsdp' of size 8 goes over several TPU slices" in said and "{'data': 2, 'fsdp': -1}" in said
