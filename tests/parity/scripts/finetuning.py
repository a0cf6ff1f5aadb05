"""Callbacks that freeze and unfreeze layers, measure, or stop on a jump of the loss."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from basics import Regression, regression_data
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, SpikeDetection, ThroughputMonitor
from recording import Run, case, main
from torch import Tensor, nn


class Transfer(Regression):
    """A backbone with batch normalisation, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.backbone(x))

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return [adam], [torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)]


class Thaw(BaseFinetuning):
    """Unfreezes a layer in each epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.get_submodule("backbone"), train_bn=False)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        layers = {1: "backbone.3", 2: "backbone.1", 3: "backbone.0"}
        if epoch in layers:
            self.unfreeze_and_add_param_group(pl_module.get_submodule(layers[epoch]), optimizer)


def note_groups(run: Run, trainer: pl.Trainer, callback: BaseFinetuning) -> None:
    groups = trainer.optimizers[0].param_groups
    run.note("groups", [[len(group["params"]), group["lr"], group["weight_decay"]] for group in groups])
    state = callback.state_dict()
    run.note("named", [group["params"] for group in state["internal_optimizer_metadata"][0]])
    run.note("previous", state.get("previous_backbone_lr"))


@case
def layers_thaw_one_by_one(run: Run) -> None:
    callback = Thaw()
    trainer = run.trainer(callbacks=[callback], max_epochs=5)
    run.fit(Transfer(), trainer, run.loader(*regression_data()), run.loader(*regression_data(32, 1)))
    note_groups(run, trainer, callback)


@case
def backbone_follows(run: Run) -> None:
    callback = BackboneFinetuning(1, lambda_func=lambda epoch: 3.0, backbone_initial_ratio_lr=0.2)
    trainer = run.trainer(callbacks=[callback], max_epochs=4)
    run.fit(Transfer(), trainer, run.loader(*regression_data()))
    note_groups(run, trainer, callback)


@case
def backbone_resumed(run: Run) -> None:
    path, data = run.root / "saved.ckpt", run.loader(*regression_data())
    trainer = run.trainer(callbacks=[BackboneFinetuning(1, backbone_initial_lr=0.001, should_align=False)], max_epochs=3)
    run.fit(Transfer(), trainer, data)
    trainer.save_checkpoint(path)
    model, callback = Transfer(), BackboneFinetuning(1, backbone_initial_lr=0.001, should_align=False)
    trainer = run.trainer(callbacks=[callback], max_epochs=5)
    trainer.fit(model, data, ckpt_path=path)
    run.finish(model, trainer)
    note_groups(run, trainer, callback)


@case
def no_backbone(run: Run) -> None:
    run.fit(Regression(), run.trainer(callbacks=[BackboneFinetuning()], max_epochs=1), run.loader(*regression_data()))


@case
def spike_of_the_loss(run: Run) -> None:
    class Spiking(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) * (1 + 50 * (batch_idx == 5))

    callback = SpikeDetection(exclude_batches_path=run.root)
    trainer = run.trainer(callbacks=[callback], max_epochs=2)
    try:
        run.fit(Spiking(), trainer, run.loader(*regression_data(128)))
    finally:
        state = callback.state_dict()
        run.note("spike", {key: state[key] for key in ("last_val", "bad_batches", "mode", "rtol")})
        run.note("file", (run.root / "skip_batches.json").read_text())


@case
def throughput_is_logged_at_the_same_steps(run: Run) -> None:
    class Counted(Regression):
        flops_per_batch = 1000

    monitor = ThroughputMonitor(lambda batch: len(batch[0]), length_fn=lambda batch: batch[0].numel(), window_size=3)
    trainer = run.trainer(callbacks=[monitor], max_epochs=2, accumulate_grad_batches=2)
    data, val = run.loader(*regression_data(128)), run.loader(*regression_data(64, 1))
    run.fit(Counted(), trainer, data, val)
    # Of a mesh, rates of all devices are logged too; times differ from run to run.
    for entry in run.record["logged"]:
        measured = {key: value for key, value in entry[1].items() if "/" in key}
        for key in measured:
            del entry[1][key]
        entry[1]["measured"] = sorted(
            key for key in measured if "device/" in key or (key.count("/") == 1 and "_per_sec" not in key)
        )
        entry[1]["batches"] = measured.get("train/batches", measured.get("validate/batches"))


if __name__ == "__main__":
    main()
