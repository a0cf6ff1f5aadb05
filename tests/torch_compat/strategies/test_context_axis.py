"""A mesh that splits sequences: unchanged models with the losses and weights of one device, and meshes that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.torch_compat.strategies.test_mesh_axes import TOKENS, Llama, assert_same, compile_step, trained, trainer
from torch_compat.strategies import MeshStrategy
from xlatrain.preflight.hlo import Hlo

pytestmark = pytest.mark.usefixtures("compiled_as_for_users")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")  # a fallback would be an error


@pytest.fixture(scope="module")
def on_one_device() -> Llama:
    return trained(1, "auto", 8)


@pytest.mark.parametrize(
    ("axes", "rows"),
    [
        pytest.param({"fsdp": 2, "context": 4}, 4, id="fsdp-context"),
        pytest.param({"data": 2, "context": 2, "tensor": 2}, 4, id="data-context-tensor", marks=pytest.mark.slow),
        pytest.param({"context": 8}, 8, id="context", marks=pytest.mark.slow),
    ],
)
def test_losses_and_weights_of_one_device(axes: dict[str, int], rows: int, on_one_device: Llama) -> None:
    """Tolerance: 2e-6 of a loss, 2e-6 of a weight."""
    assert_same(trained(8, MeshStrategy(axes, min_size=1), rows), on_one_device)


def test_activations_are_split_along_the_sequence() -> None:
    strategy = MeshStrategy({"fsdp": 2, "context": 4}, min_size=1)
    text = compile_step(strategy, 1).as_text()
    length, hidden, feed = 16, 32, 64
    assert f"f32[1,{length // 4},{hidden}]" in text
    assert f"f32[1,{length},{hidden}]" not in text and f"f32[1,{length},{feed}]" not in text
    gathered = [one for one in Hlo(text, strategy.mesh).collectives() if one.axes == ("context",) and one.kind == "all-gather"]
    assert gathered  # keys and values


@pytest.mark.parametrize(
    ("axes", "length", "said"),
    [
        ({"fsdp": 2, "context": 4}, 14, "a sequence of 14 does not divide by mesh axis 'context' of size 4"),
        ({"fsdp": 2, "stage": 4}, 16, "none run on stages: it has no 4 or more equal layers"),
    ],
)
def test_meshes_that_cannot_be(axes: dict[str, int], length: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        one: Any = trainer(8, MeshStrategy(axes))
        rows: Any = torch.clone(TOKENS[:, :length])
        one.fit(Llama(), DataLoader(rows, 4))
