"""Steps, loaders and modules that cannot be trained: the message, and that nothing of the module is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.callbacks import EarlyStopping
from torch_compat.utilities.combined_loader import CombinedLoader
from torch_compat.utilities.exceptions import MisconfigurationException


class Linear(LightningModule):
    """A layer; ``step`` is what its training step returns of loss and prediction."""

    def __init__(self, step: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self.layer(batch[0].float())
        loss = (prediction - batch[1]).pow(2).mean()
        self.log("loss", loss)
        return loss if self.step is None else self.step(loss, prediction)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(x: Tensor | None = None) -> DataLoader:
    x = torch.randn(32, 4) if x is None else x
    return DataLoader(TensorDataset(x, torch.ones(len(x), 1)), batch_size=16)


def trainer(**options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    return Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **options})


def fails(model: LightningModule, expected: str, data: Any = None, **options: Any) -> None:
    """Fit must fail with a message; afterwards the module's tensors are ordinary ones with finite values."""
    with pytest.raises(Exception, match=expected):
        trainer(**options).fit(model, loader() if data is None else data)
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert torch.isfinite(parameter).all()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda loss, prediction: "text", "must return a Tensor, a dict, or None.*it returned str"),
        (lambda loss, prediction: {"l": loss}, r"the 'loss' key needs to be present; its keys: \['l'\]"),
        (lambda loss, prediction: prediction, r"shape \(16, 1\); expected a single number"),
        (lambda loss, prediction: loss.detach(), "does not depend on any parameter"),
        (lambda loss, prediction: loss + torch.randn(3, 5) @ torch.randn(4, 2), "reduction dim|cannot be multiplied"),
    ],
)
def test_a_wrong_result_is_described(step: Any, expected: str) -> None:
    fails(Linear(step), expected)


def test_an_error_of_the_user_comes_through() -> None:
    def step(loss: Tensor, prediction: Tensor) -> Tensor:
        raise KeyError("the user's own")

    fails(Linear(step), "the user's own")


def test_a_monitor_that_was_never_logged_is_named() -> None:
    fails(Linear(), r"conditioned on metric `nothing` which is not available.*\['loss'\]", callbacks=[EarlyStopping("nothing")])


def test_detected_anomaly_names_the_operation() -> None:
    fails(Linear(lambda loss, prediction: (loss * 0 - 1).sqrt()), "SqrtBackward0", detect_anomaly=True)


def test_detected_anomaly_of_compiled_steps_names_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    with pytest.raises(RuntimeError, match="batch 0 of epoch 0 is NaN"):
        trainer(detect_anomaly=True).fit(Linear(lambda loss, prediction: (loss * 0 - 1).sqrt()), loader())


def test_integers_beyond_int32_are_an_error() -> None:
    fails(Linear(), r"batch\[0\] is int64 with values .* do not fit int32", loader(torch.full((16, 4), 2**40)))


def test_uninitialised_parameters_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    model = Linear()
    model.layer = nn.LazyLinear(1)
    with pytest.raises(MisconfigurationException, match=r"self\.layer\.weight is made by the first batch"):
        trainer().fit(model, loader())


def test_loaders_one_after_another_are_refused_for_training() -> None:
    fails(Linear(), "sequential", CombinedLoader([loader(), loader()], "sequential"))


def test_no_batches_train_nothing() -> None:
    model = Linear()
    before = model.layer.weight.clone()
    run = trainer()
    run.fit(model, DataLoader(TensorDataset(torch.zeros(0, 4), torch.zeros(0, 1)), batch_size=16))
    assert run.global_step == 0
    assert torch.equal(model.layer.weight, before)


def test_a_module_wrapped_by_torch_compile_is_trained() -> None:
    model = Linear()
    before = model.layer.weight.clone()
    trainer().fit(torch.compile(model), loader())  # pyright: ignore[reportArgumentType]
    assert not torch.equal(model.layer.weight, before)


def test_compiled_only_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    fails(Linear(lambda loss, prediction: loss if loss.detach().numpy() > 0 else -loss), r"test_wrong_steps\.py")


class Unhashable:
    """A callable without a hash, as objects with an ``__eq__`` are."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, module: Linear) -> None:
        self.module = module

    def __call__(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.module.layer(batch[0].float()) - batch[1]).pow(2).mean()


def test_a_step_may_be_any_callable() -> None:
    module = Linear()
    object.__setattr__(module, "training_step", Unhashable(module))
    before = module.layer.weight.detach().clone()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    loader = DataLoader(TensorDataset(torch.ones(4, 4), torch.ones(4, 1)), batch_size=2)
    Trainer(accelerator="cpu", devices=1, max_steps=1, **options).fit(module, loader)
    assert not torch.equal(module.layer.weight, before)
