"""A mesh with stages: unchanged models with the losses and weights of one device, and meshes that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.torch_compat.strategies.small import drawing_in_programs, trainer
from torch_compat import LightningModule
from torch_compat.strategies import MeshStrategy

TOKENS: Any = torch.randint(0, 32, (40, 9), generator=torch.Generator().manual_seed(0))
WIDTH = 16
PLAN = {"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise"}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")  # a fallback would be an error


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + F.dropout(self.out(found), 0.1, self.training)


class GPT(LightningModule):
    """Keeps its losses."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.losses: list[float] = []

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def trained(axes: dict[str, int] | None, rows: int, ckpt: Path | None = None, **arguments: Any) -> tuple[GPT, Any]:
    """After a batch of 32 rows and one of 8."""
    plan = PLAN if axes and "tensor" in axes else None
    strategy: Any = "auto" if axes is None else MeshStrategy(axes, min_size=1, tensor_parallel_plan=plan, **arguments)
    run, module = trainer(devices=8 if axes else 1, strategy=strategy, max_epochs=1 if ckpt is None else 2), GPT()
    run.fit(module, DataLoader(TOKENS, rows), DataLoader(TOKENS[:32], rows), ckpt_path=ckpt and str(ckpt))
    return module, run


@pytest.fixture(scope="module")
def on_one_device() -> tuple[GPT, Any]:
    with drawing_in_programs():
        return trained(None, 32)


def assert_same(found: tuple[GPT, Any], expected: tuple[GPT, Any]) -> None:
    assert found[0].losses == pytest.approx(expected[0].losses, abs=2e-6)
    assert float(found[1].callback_metrics["val"]) == pytest.approx(float(expected[1].callback_metrics["val"]), abs=2e-6)
    torch.testing.assert_close(found[0].state_dict(), expected[0].state_dict(), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        pytest.param({"stage": 2, "data": 2, "fsdp": 2}, {}, id="data-fsdp"),
        pytest.param({"stage": 2, "data": 4}, {"rounds": 2, "microbatches": 4}, id="rounds", marks=pytest.mark.slow),
        pytest.param({"stage": 4, "tensor": 2}, {}, id="tensor", marks=pytest.mark.slow),
    ],
)
def test_losses_and_weights_of_one_device(axes: dict[str, int], options: Any, on_one_device: tuple[GPT, Any]) -> None:
    parts = 8 // axes.get("tensor", 1)
    assert_same(trained(axes, 32 // parts, **options), on_one_device)


@pytest.mark.slow
def test_checkpoints_go_from_mesh_to_mesh(tmp_path: Path) -> None:
    """From stages to another number of them, and to none: as if one device had gone on."""
    _, first = trained({"stage": 4, "data": 2}, 4)
    first.save_checkpoint(tmp_path / "one.ckpt")
    stages, none = (trained(axes, 4, tmp_path / "one.ckpt") for axes in ({"stage": 2, "fsdp": 4}, {"fsdp": 8}))
    assert_same(stages, none)


@pytest.mark.slow
def test_batches_of_many_lengths_each_run_on_stages() -> None:
    """Without a program for several lengths, whose layers would be no loop."""
    module, batches = GPT(2), [TOKENS[:4, :length] for length in (9, 7, 5)]
    trainer(devices=2, strategy=MeshStrategy({"stage": 2})).fit(module, DataLoader(batches, batch_size=None))  # pyright: ignore[reportArgumentType]
    assert len(module.losses) == len(batches)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"axes": {"stage": 4, "data": 2}, "microbatches": 2},
            "microbatches=2 for 4 stages: fewer than stages leave some without work",
        ),
        ({"axes": {"data": 8}, "rounds": 2}, "rounds=2 is of a pipeline, but the mesh has no stages"),
        ({"axes": {"stage": 2, "data": 4}, "rounds": 0}, "rounds=0; expected how often a microbatch comes to each stage"),
    ],
)
def test_arguments_that_cannot_be(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MeshStrategy(**options)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (6, "'stage' of size 4 splits repeated layers, .* of GPT none run on stages: 6 layers do not divide into 4 stages"),
        (0, "none run on stages: it has no 4 or more equal layers"),
    ],
)
def test_modules_that_have_no_stages(layers: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trainer(strategy=MeshStrategy({"stage": 4, "data": 2})).fit(GPT(layers), DataLoader(TOKENS, 4))
