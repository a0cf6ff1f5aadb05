"""What 1.x had and is not offered is refused with what to use instead."""

from __future__ import annotations

import inspect
import os
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
    with pytest.raises(MisconfigurationException, match=rf"strategy='{name}' is not supported: .*{instead}"):
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


def test_doctor_prints_every_documented_member() -> None:
    done = warm.run(warm.OURS, ["-m", "xlatrain.cli", "doctor", "--api"], env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "148 of 148 documented members" in done.stdout.splitlines()
