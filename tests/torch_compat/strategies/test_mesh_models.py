"""Models of several kinds on a mesh of three axes, parameters split by rules that suit none of them: what one device gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import MixtralConfig, MixtralForCausalLM

from tests.torch_compat.strategies.small import drawing_in_programs, trainer
from torch_compat import LightningModule
from torch_compat.strategies import MeshStrategy

ROWS, BATCH = 32, 16
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 32, (ROWS, length), generator=torch.Generator().manual_seed(seed))


class Translator(nn.Module):
    """``nn.Transformer`` with dropout, which does not depend on the mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1, dtype=self.head.weight.dtype)
        seen = self.transformer(
            self.embedding(source), self.embedding(target[:, :-1]), tgt_mask=mask, src_key_padding_mask=source == 1
        )
        return F.cross_entropy(self.head(seen).flatten(0, 1), target[:, 1:].flatten())

    def data(self) -> tuple[torch.Tensor, ...]:
        return tokens(7), tokens(5, 1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, max_position_embeddings=16, output_router_logits=True,
        )  # fmt: skip
        self.model = MixtralForCausalLM(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss

    def data(self) -> tuple[torch.Tensor, ...]:
        return (tokens(8),)


class Images(nn.Module):
    """Grouped, depthwise, pointwise and transposed convolutions, and norms over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.GELU(),
            nn.Conv2d(8, 16, 1), nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, stride=2, groups=4), nn.BatchNorm2d(16),
            nn.ConvTranspose2d(16, 8, 2, stride=2, groups=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 8),
        )  # fmt: skip

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(images), labels)

    def data(self) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(ROWS, 4, 8, 8, generator=generator, dtype=torch.float64)
        return images, torch.randint(0, 8, (ROWS,), generator=generator)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.bag = nn.Embedding(32, 16), nn.EmbeddingBag(32, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(32, 16, batch_first=True)
        self.out = nn.Bilinear(16, 16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found, _ = self.gru(self.lstm(self.embedding(ids))[0])
        return self.out(found[:, -1], self.bag(ids)).square().mean()

    def data(self) -> tuple[torch.Tensor, ...]:
        return (tokens(6),)


class Training(LightningModule):
    def __init__(self, make: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make().double()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(*batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def alternating(module: nn.Module) -> dict[str, PartitionSpec]:
    """``tensor`` splits the first dim of a parameter and the last of the next, ``fsdp`` the largest that is left."""
    rules = {}
    for i, (name, param) in enumerate(module.named_parameters()):
        dims = range(param.ndim) if i % 2 else range(param.ndim - 1, -1, -1)
        split: dict[int, str] = {}
        for axis, order in (("tensor", dims), ("fsdp", sorted(dims, key=lambda dim: -param.shape[dim]))):
            free = [dim for dim in order if dim not in split and param.shape[dim] % 2 == 0]
            split |= dict.fromkeys(free[:1], axis)
        rules[name] = PartitionSpec(*(split.get(dim) for dim in range(param.ndim)))
    return rules


@pytest.fixture
def compiled_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fallback."""
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_float64")
@pytest.mark.parametrize("make", [Translator, Experts, Images, Sequences])
def test_losses_weights_and_buffers_of_one_device(make: type[nn.Module]) -> None:
    """In float64, after two updates clipped by norm. Tolerance 1e-12; 1e-7 where the model goes through float32 (Mixtral)."""
    trained = []
    for axes in (None, CUBE):
        module = Training(make)
        strategy: Any = "auto"
        if axes is not None:
            strategy = MeshStrategy(axes, rules=alternating(module), tensor_parallel_plan={})
        one = trainer(devices=8 if axes else 1, strategy=strategy, precision="64-true", gradient_clip_val=0.1)
        torch.manual_seed(7)
        with drawing_in_programs():
            one.fit(module, DataLoader(TensorDataset(*module.model.data()), BATCH // 4 if axes else BATCH))
        trained.append(module)
    on_one, on_cube = trained
    tolerance = 1e-7 if make is Experts else 1e-12
    assert len(on_one.losses) == 2
    assert on_cube.losses == pytest.approx(on_one.losses, rel=tolerance)
    torch.testing.assert_close(on_cube.state_dict(), on_one.state_dict(), rtol=0, atol=tolerance)
