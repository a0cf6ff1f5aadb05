"""Mixtures of experts of ``transformers`` on meshes: what one device gives, without gathering tokens or experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.torch_compat.strategies.small import trainer
from torch_compat import LightningModule
from torch_compat.strategies import MeshStrategy

ROWS, BATCH, LENGTH = 32, 16, 8


def mixtral() -> torch.nn.Module:
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=16, output_router_logits=True,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def qwen() -> torch.nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_experts=8, num_experts_per_tok=3, max_position_embeddings=16, head_dim=8,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


class Training(LightningModule):
    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make().double()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trained(model: Training, axes: dict[str, int] | None) -> Training:
    ids = torch.randint(1, 32, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    strategy = "auto" if axes is None else MeshStrategy(axes, min_size=1)
    parts = 1 if axes is None else axes.get("data", 1) * axes.get("fsdp", 1) * axes.get("expert", 1)
    run = trainer(devices=1 if axes is None else 8, strategy=strategy, max_epochs=2, precision="64-true")
    run.fit(model, DataLoader(TensorDataset(ids), batch_size=BATCH // parts))
    return model


@pytest.fixture
def compiled_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fallback."""
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_float64")
@pytest.mark.parametrize(
    ("make", "axes"),
    [
        (mixtral, {"fsdp": 2, "expert": 2, "tensor": 2}),
        (mixtral, {"data": 2, "fsdp": 2, "expert": 2}),
        (qwen, {"data": 2, "expert": 4}),
    ],
    ids=["mixtral", "mixtral-data", "qwen"],
)
def test_a_mesh_gives_what_one_device_gives(make: Any, axes: dict[str, int]) -> None:
    """Tolerances are those of the float32 in which the models take their softmax."""
    expected, found = trained(Training(make), None), trained(Training(make), axes)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("compiled_float64")
def test_experts_that_the_axis_does_not_divide_are_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"'expert' of size 8 does not divide the 4 experts of 'model.model.layers.0.mlp.experts'"
    ):
        trained(Training(mixtral), {"expert": 8})
