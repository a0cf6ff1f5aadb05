"""``precision="16-mixed"`` with loss scaling: against torch.amp.GradScaler on the same batches."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.callbacks import Callback
from torch_compat.plugins.precision import MixedPrecision
from torch_compat.step import mesh_state
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.step.loss_scale import LossScaler


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return ((self.net(batch[0]) - batch[1]) ** 2).mean()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class WatchScale(Callback):
    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self.scales.append(mesh_state.loss_scale_state(trainer)["scale"])


def loader() -> DataLoader:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, 20 * x.sum(1, keepdim=True)), 8)


def fit(module: LightningModule, devices: int, callbacks: list[Callback], scaler: LossScaler | torch.amp.GradScaler) -> Trainer:
    trainer = Trainer(
        accelerator="cpu", devices=devices, max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, plugins=[MixedPrecision("16-mixed", scaler=scaler)],
    )  # fmt: skip
    batches = loader()
    trainer.fit(module, DataLoader(batches.dataset, 8 // devices))
    return trainer


@pytest.mark.parametrize("devices", [1, 4])
def test_scales_and_skips_as_grad_scaler_does(devices: int) -> None:
    reference, scales = Regression(), []
    optimizer = reference.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=5)
    for _ in range(3):
        for batch in loader():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = reference.loss(batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert len(set(scales)) > 2, "the data should make the scale fall and rise"

    module, watch = Regression(), WatchScale()
    fit(module, devices, [watch], LossScaler(init_scale=2.0**17, growth_interval=5))
    # Later on, a gradient at the edge of float16's range may overflow or not: partial sums of devices round differently.
    compared = len(scales) if devices == 1 else 15
    assert watch.scales[:compared] == scales[:compared]
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        tolerance = 2e-3 if devices == 1 else 0.2  # one step more or less was skipped
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=tolerance)


def test_eager_steps_scale_and_skip_as_compiled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    modules, scales = [Regression(), Regression()], []
    for module, executor in zip(modules, ("compiled", "eager"), strict=True):
        monkeypatch.setenv("XLATRAIN_EXECUTOR", executor)
        watch = WatchScale()
        trainer = fit(module, 1, [watch], torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=5))
        assert trainer.scaler == LossScaler(init_scale=2.0**17, growth_interval=5)
        scales.append(watch.scales)
    assert scales[0] == scales[1] and len(set(scales[0])) > 2
    for ours, theirs in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


def test_who_would_see_scaled_gradients_or_cannot_be_skipped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(MixedPrecision):
        def post_backward(self, tensor: torch.Tensor, module: object) -> torch.Tensor:
            return tensor

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, plugins=[Own("16-mixed")], **quiet)
    with pytest.raises(MisconfigurationException, match=r"members of .*Own around backward, clipping.*bf16-mixed"):
        trainer.fit(Regression(), loader())

    class Custom(torch.optim.SGD):
        pass

    class Stepping(Regression):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Custom(self.parameters(), 1e-3)

    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    with pytest.raises(MisconfigurationException, match=r"Custom makes its state in its first step, which precision='16-mixed'"):
        fit(Stepping(), 1, [], LossScaler())
    with pytest.raises(ValueError, match="enabled=False"):
        MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", enabled=False))


def test_bfloat16_takes_no_scaler() -> None:
    with pytest.raises(MisconfigurationException, match="does not use a scaler"):
        MixedPrecision("bf16-mixed", scaler=LossScaler())
