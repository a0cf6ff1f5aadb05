"""Modules, right and wrong: their members and exports, what a run says of mistakes in them; data modules."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from answering import ask, ask_each, attempt
from lightning.pytorch.demos.boring_classes import RandomDataset
from models import MODULE_MEMBERS, Net, data, seeded, trainer


class NoLoss(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return {"losses": self(batch).sum()}


class NoTrain(pl.LightningModule):
    configure_optimizers = Net.configure_optimizers


class NoOptimizer(pl.LightningModule):
    training_step = Net.training_step


class NoneOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


class TextOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return "adam"


class BadScheduler(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [{"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1)}]


class BadInterval(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "week"}]


class NoMonitor(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}


class WrongMonitor(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "no"},
        }


class LogsTwice(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self(batch).sum()
        self.log("a", loss, on_step=True)
        self.log("a", loss, on_step=False, on_epoch=True)
        return loss


class LogsText(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("a", "text")
        return self(batch).sum()


class LogsVector(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("a", self(batch))
        return self(batch).sum()


class LogsNested(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("a", {"b": 1})
        return self(batch).sum()


class LogsBadName(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("a/dataloader_idx_0", 1.0)
        return self(batch).sum()


class LogsReduced(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("a", 1.0, on_epoch=True, reduce_fx="median")
        return self(batch).sum()


class LogsInWrongHook(Net):
    def on_fit_start(self) -> None:
        self.log("a", 1.0)


class LogsStepInEpochHook(Net):
    def on_train_epoch_end(self) -> None:
        self.log("a", 1.0, on_step=True)


class OldHook(Net):
    def training_epoch_end(self, outputs: Any) -> None: ...


class OldStep(Net):
    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any: ...


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.2)]


WRONG_MODULES = (
    *(NoLoss, NoTrain, NoOptimizer, NoneOptimizer, TextOptimizer, BadScheduler, BadInterval, NoMonitor, WrongMonitor, LogsTwice),
    *(
        LogsText,
        LogsVector,
        LogsNested,
        LogsBadName,
        LogsReduced,
        LogsInWrongHook,
        LogsStepInEpochHook,
        OldHook,
        OldStep,
        TwoOptimizers,
    ),
)
ask_each(
    **{
        f"module_{kind.__name__}": lambda kind=kind: trainer(max_epochs=1, limit_train_batches=1).fit(kind(), data(2))
        for kind in WRONG_MODULES
    }
)


ask_each(
    loads_missing=lambda: Net.load_from_checkpoint("no.ckpt"),
    loads_on_instance=lambda: Net().load_from_checkpoint("no.ckpt"),
    module_without_trainer=lambda: Net().trainer,
    logs_without_trainer=lambda: Net().log("a", 1.0),
    module_steps=lambda: [
        attempt(lambda: pl.LightningModule().training_step()),
        attempt(lambda: pl.LightningModule().forward()),
        attempt(lambda: pl.LightningModule().configure_optimizers()),
        attempt(lambda: pl.LightningModule().train_dataloader()),
        attempt(lambda: pl.LightningModule().optimizers()),
        attempt(lambda: pl.LightningModule().lr_schedulers()),
    ],
    module_alone=lambda: {name: attempt(lambda name=name: getattr(Net(), name)) for name in MODULE_MEMBERS},
    module_prints=lambda: Net().print("hello"),
    module_freezes=lambda: (
        lambda m: [m.freeze(), m.training, m.layer.weight.requires_grad, m.unfreeze(), m.training, m.layer.weight.requires_grad]
    )(Net()),
    module_strict=lambda: (lambda m: [m.strict_loading, setattr(m, "strict_loading", False), m.strict_loading])(Net()),
    module_exports=lambda: [
        attempt(lambda: type(Net().to_torchscript())),
        attempt(lambda: type(Net().to_torchscript(method="trace", example_inputs=torch.ones(1, 4)))),
        attempt(lambda: Net().to_torchscript(method="other")),
        attempt(lambda: Net().to_torchscript(method="trace")),
    ],
    module_torchscript_runs=lambda: seeded().to_torchscript()(torch.ones(1, 4)),
    module_onnx=lambda: Net().to_onnx("a.onnx"),
    module_onnx_sample=lambda: Net().to_onnx("a.onnx", torch.ones(1, 4)),
    module_tensorrt=lambda: Net().to_tensorrt("a"),
)


class Data(pl.LightningDataModule):
    def __init__(self, size: int = 3, name: str = "x") -> None:
        super().__init__()
        self.save_hyperparameters()


def _loader_facts(loader: Any) -> Any:
    if isinstance(loader, list):
        return [_loader_facts(one) for one in loader]
    return [loader.batch_size, loader.num_workers, loader.pin_memory, type(loader.sampler).__name__]


@ask
def data_modules() -> Any:
    sets = [RandomDataset(2, 4), RandomDataset(2, 6)]
    made = pl.LightningDataModule.from_datasets(sets[0], sets, sets[1], None, batch_size=3, num_workers=0)
    again = Data.from_datasets(sets[0], batch_size=2, size=9)
    return [
        *(_loader_facts(getattr(made, f"{stage}_dataloader")()) for stage in ("train", "val", "test")),
        attempt(made.predict_dataloader),
        again.hparams,
        [Data(4).hparams, str(Data(4)), str(made), Data().trainer, Data(4).name, Data.__name__],
        attempt(lambda: Data.load_from_checkpoint("no.ckpt")),
        attempt(lambda: Data().load_from_checkpoint("no.ckpt")),
        attempt(Data().train_dataloader),
        [
            Data().state_dict(),
            attempt(Data().prepare_data),
            attempt(lambda: Data().setup("fit")),
            attempt(lambda: Data().teardown("fit")),
        ],
        [
            Data().prepare_data_per_node,
            Data().allow_zero_length_dataloader_with_multiple_devices,
            attempt(lambda: Data().transfer_batch_to_device([torch.ones(1)], torch.device("cpu"), 0)),
        ],
    ]
