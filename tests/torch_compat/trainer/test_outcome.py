"""Outputs of a compiled step for hooks: its return value, with real values in the places of what was traced."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from torch_compat import LightningModule, Trainer
from torch_compat.callbacks import Callback


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        out = self.layer(batch["x"])
        loss = F.mse_loss(out, batch["x"].sum(1, keepdim=True))
        return {"loss": loss, "out": out, "again": [loss, (batch_idx + 1) * 10], "names": batch["names"], "text": "fixed"}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Outcomes(Callback):
    """Keeps outputs as they come, with what torch itself computes from the weights of that moment."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []
        self.expected: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        weight, bias = pl_module.layer.weight.detach().clone(), pl_module.layer.bias.detach().clone()
        out = F.linear(batch["x"], weight, bias)
        self.expected.append((F.mse_loss(out, batch["x"].sum(1, keepdim=True)), out))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)


@pytest.fixture(scope="module", params=[1, 8])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    torch.manual_seed(0)
    sizes = [8, 8, 5]
    batches = [{"x": torch.randn(n, 3), "names": [f"{n}-{i}" for i in range(n)]} for n in sizes]
    seen = Outcomes()
    trainer = Trainer(
        accelerator="cpu",
        devices=request.param,
        max_epochs=1,
        accumulate_grad_batches=2,
        callbacks=[seen],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=tmp_path_factory.mktemp("run"),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Some donated buffers")  # JAX's, which says nothing to a user
        trainer.fit(Net(), DataLoader(batches, batch_size=None))  # pyright: ignore[reportArgumentType]  a list is a dataset
    return seen


def test_the_loss_is_that_of_its_step_divided_by_the_accumulated_batches(outcomes: Outcomes) -> None:
    for output, (loss, _) in zip(outcomes.outputs, outcomes.expected, strict=True):
        assert (output["loss"].shape, output["loss"].dtype) == ((), torch.float32)
        torch.testing.assert_close(output["loss"], loss / 2)
        torch.testing.assert_close(output["again"][0], loss)


def test_tensors_have_the_rows_of_the_batch(outcomes: Outcomes) -> None:
    for output, (_, out) in zip(outcomes.outputs, outcomes.expected, strict=True):
        assert output["out"].shape == out.shape  # known before the values are fetched
        torch.testing.assert_close(output["out"], out)


def test_counters_and_what_is_no_tensor_are_those_of_the_step(outcomes: Outcomes) -> None:
    assert [output["again"][1] for output in outcomes.outputs] == [10, 20, 30]
    assert [output["names"][-1] for output in outcomes.outputs] == ["8-7", "8-7", "5-4"]
    assert {output["text"] for output in outcomes.outputs} == {"fixed"}


def test_outputs_of_different_steps_are_different_tensors(outcomes: Outcomes) -> None:
    first, second = (outcomes.outputs[step]["out"] for step in (0, 1))
    values = first.clone()
    first.mul_(0)
    try:
        assert second.abs().sum() > 0
    finally:
        first.copy_(values)  # other tests look at the same run


def test_all_steps_have_ended_when_training_ends() -> None:
    """Programs run asynchronously: what fails in the last one would come after ``fit`` has said that all is well."""

    class Slow(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)])

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def on_train_end(self) -> None:
            self.ended = [array.is_ready() for array in self.trainer.strategy.placed.state.params.values()]

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4096, 1024)), batch_size=1024)
    module = Slow()
    Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(module, loader)
    assert module.ended
    assert all(module.ended)
