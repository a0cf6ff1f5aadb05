"""Names of 1.x that are not offered are refused with what to use instead."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.torch_compat.strategies.small import loader, trainer
from torch_compat import Trainer
from torch_compat.legacy.module import LightningModule
from torch_compat.utilities.exceptions import MisconfigurationException


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ({"gpus": 1}, r"'gpus', which Lightning 2.0 removed; use Trainer\(accelerator='gpu', devices=…\)"),
        ({"tpu_cores": 8}, "accelerator='tpu'"),
        ({"distributed_backend": "ddp"}, "strategy=…"),
        ({"resume_from_checkpoint": "x"}, r"trainer\.fit\(model, ckpt_path=…\)"),
        ({"truncated_bptt_steps": 2}, "manual optimization"),
    ],
)
def test_arguments_of_1_x(argument: dict[str, Any], instead: str) -> None:
    with pytest.raises(TypeError, match=instead):
        Trainer(**argument)
    assert next(iter(argument)) not in inspect.signature(Trainer).parameters


def test_arguments_that_nobody_knows() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nonsense'$"):
        Trainer(nonsense=1)  # pyright: ignore[reportCallIssue]


def test_where_models_were_sharded() -> None:
    run = trainer()
    with pytest.raises(AttributeError, match=r"'training_type_plugin': it is `trainer.strategy` since Lightning 1.6"):
        run.training_type_plugin  # noqa: B018  # pyright: ignore
    with (
        pytest.raises(RuntimeError, match=r"use trainer.strategy.model_sharded_context\(\)"),
        run.accelerator.model_sharded_context(),
    ):
        pass
    from torch_compat.strategies import DDPFullyShardedNativeStrategy  # pyright: ignore

    with pytest.raises(MisconfigurationException, match=r"1\.x's name: use FSDPStrategy"):
        DDPFullyShardedNativeStrategy()


def test_an_accelerator_that_became_a_strategy() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"accelerator='ddp' of 1\.x is a strategy since 1\.5: use strategy='ddp'"
    ):
        Trainer(accelerator="ddp")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ddp_sharded", "use 'fsdp'"),
        ("tpu_spawn", "accelerator='tpu'"),
        ("model_parallel", "ModelParallelStrategy"),
        ("dp", "'ddp'"),
    ],
)
def test_names_of_strategies(name: str, instead: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"strategy='{name}'`. It is not supported: .*{instead}"):
        trainer(strategy=name)


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Steps(Plain):
    truncated_bptt_steps = 2


class Splits(Plain):
    def tbptt_split_batch(self, batch: Any, split_size: int) -> list[Any]:
        return [batch]


@pytest.mark.parametrize("kind", [Steps, Splits])
def test_truncated_back_propagation(kind: type[Plain]) -> None:
    with pytest.raises(MisconfigurationException, match=rf"{kind.__name__}: truncated .*automatic_optimization = False.*detach"):
        trainer(devices=1).fit(kind(), loader())


NAMES = """
import pytorch_lightning as pl
from pytorch_lightning.utilities.types import EPOCH_OUTPUT, STEP_OUTPUT, LRSchedulerConfig

class Net(pl.LightningModule):
    pass

def said(ask):
    try:
        ask()
    except (AttributeError, ImportError, TypeError) as error:
        return f"{type(error).__name__}: {error}"

def old_import(text):
    return said(lambda: exec(text))

trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
print(old_import("from pytorch_lightning.metrics.functional import accuracy"))
print(old_import("from pytorch_lightning.callbacks import GPUStatsMonitor"))
print(old_import("from pytorch_lightning.loggers import TestTubeLogger"))
print(old_import("from pytorch_lightning.utilities import AMPType"))
print(said(lambda: pl.TrainResult(0)))
print(said(lambda: pl.callbacks.GPUStatsMonitor()))
print(said(lambda: pl.Trainer.add_argparse_args(None)))
print(said(lambda: trainer.tuner.lr_find(None)))
print(said(lambda: trainer.progress_bar_dict))
print(said(lambda: Net().grad_norm(2)))
print(said(lambda: Net().nothing))
print(said(lambda: pl.callbacks.ModelCheckpoint(period=1)))
print(said(lambda: trainer.fit(Net(), train_dataloader=[])))
print(said(lambda: trainer.test(Net(), test_dataloaders=[])))
print(said(lambda: pl.Trainer(max_epoch=1)))
print(hasattr(pl.Trainer, "from_argparse_args"), hasattr(pl.callbacks, "GPUStatsMonitor"), hasattr(trainer, "gpus"))
"""


def test_names_of_1_x_say_what_to_use(tmp_path: Path) -> None:
    (tmp_path / "names.py").write_text(NAMES)
    done = warm.run(warm.OURS, ["-m", "torch_compat", str(tmp_path / "names.py")], env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr
    removed = "was removed by a later release of Lightning; use"
    unknown = "got an unexpected keyword argument"
    assert done.stdout.splitlines() == [
        f"ModuleNotFoundError: `pytorch_lightning.metrics` {removed} torchmetrics: `from torchmetrics import Accuracy`",
        f"ModuleNotFoundError: `pytorch_lightning.callbacks.GPUStatsMonitor` {removed} DeviceStatsMonitor",
        f"ModuleNotFoundError: `pytorch_lightning.loggers.TestTubeLogger` {removed} TensorBoardLogger",
        f"ModuleNotFoundError: `pytorch_lightning.utilities.AMPType` {removed} the string trainer.precision",
        f"AttributeError: `pytorch_lightning.TrainResult` {removed} self.log(name, value) or self.log_dict({{…}}), and return the"
        " loss",
        f"AttributeError: `pytorch_lightning.callbacks.GPUStatsMonitor` {removed} DeviceStatsMonitor",
        "AttributeError: type object 'Trainer' has no attribute 'add_argparse_args': use lightning.pytorch.cli.LightningCLI, or"
        " an ArgumentParser of your own",
        "AttributeError: 'Trainer' object has no attribute 'tuner': use lightning.pytorch.tuner.Tuner(trainer)",
        "AttributeError: 'Trainer' object has no attribute 'progress_bar_dict': use trainer.progress_bar_metrics",
        "AttributeError: 'Net' object has no attribute 'grad_norm': use lightning.pytorch.utilities.grad_norm(self, norm_type)",
        "AttributeError: 'Net' object has no attribute 'nothing'",
        f"TypeError: ModelCheckpoint.__init__() {unknown} 'period', which Lightning 2.0 removed; use"
        " ModelCheckpoint(every_n_epochs=…)",
        f"TypeError: Trainer.fit() {unknown} 'train_dataloader', which Lightning 2.0 removed; use train_dataloaders=…",
        f"TypeError: Trainer.test() {unknown} 'test_dataloaders', which Lightning 2.0 removed; use dataloaders=…",
        f"TypeError: Trainer.__init__() {unknown} 'max_epoch'; did you mean 'max_epochs'?",
        "False False False",
    ]
