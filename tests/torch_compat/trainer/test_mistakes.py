"""Steps of users that a compiled step cannot follow: the error has file, line and source, the reason, and what to do."""

from __future__ import annotations

import math
import random
import re
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from torch_compat import LightningModule, Trainer
from xlatrain.bridge.errors import BridgeError


class Model(LightningModule):
    """A layer, and things to go wrong with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.mean = MeanMetric()
        self.counts = [0] * 32
        self.names = ["a", "b", "c"]
        self.generator = torch.Generator()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layer(batch[0]) - batch[1]).pow(2).mean()
        return MISTAKES[self.mistake][0](self, loss, batch[0] + 0 * loss.detach())  # not of the batch alone

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)

    mistake = ""


def branch(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    return loss * 2 if loss.detach().numpy() > 1 else loss


def branch_on_item(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    return loss * 2 if math.floor(loss.item() * 10) > 1 else loss


def number(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    return loss * int(loss.detach())


def loop_over_values(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    return loss * sum(1 for value in x[:, 0].tolist() if value > 0)


def unique(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    return loss + torch.unique(x.round()).sum()


def numpy_function(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    return loss * np.asarray(x.detach()).mean()


def epoch_s_value_as_loss(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    model.mean.update(loss)
    return model.mean.compute()


def branch_on_metric(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    return loss if model.mean(loss) < 3 else loss / 2


def state_of_a_metric(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    model.mean.update(loss)
    return loss + model.mean.mean_value


def count_in_a_long_list(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    model.counts[20] += 1
    return loss * model.counts[20]


def clock(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    return loss * (1 + time.perf_counter_ns() % 1000)


def random_choice(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    return loss * len(random.choice(model.names))


def random_index(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    return loss * len(model.names[random.randint(0, 2)])


def random_order(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    names = list(model.names)
    random.shuffle(names)
    return loss * len(names[0])


def own_generator(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    return loss + torch.rand(3, generator=model.generator).sum()


def missing_op(model: Model, loss: Tensor, x: Tensor) -> Tensor:
    return loss + torch.linalg.ldl_factor(x[:4] @ x[:4].T).LD.sum()


MISTAKES: dict[str, Any] = {
    "branch on an array": (branch, r"return loss \* 2 if loss\.detach", r"a Python branch", "torch.where"),
    "floor() of .item()": (branch_on_item, r"if math\.floor\(loss\.item\(\) \* 10\)", r"needs the value", "torch.where"),
    "int()": (
        number,
        r"loss \* int\(loss\.detach\(\)\)",
        r"reads the value of a tensor",
        "keep the value a tensor",
    ),
    "loop over values": (loop_over_values, r"for value in x\[:, 0\]\.tolist\(\)", r"a Python branch", "torch.where"),
    "unique": (unique, r"torch\.unique", r"output shape depends on the values", "mask of fixed shape"),
    "numpy function": (numpy_function, r"np\.asarray\(x\.detach\(\)\)", r"is converted to numpy", "torch ops"),
    "a metric's value of the epoch as loss": (
        epoch_s_value_as_loss,
        r"return model\.mean\.compute\(\)",
        r"the loss depends on this value",
        "in a hook",
    ),
    "branch on a metric": (
        branch_on_metric,
        r"model\.mean\(loss\) < 3",
        r"a Python branch .* a torchmetrics result",
        "in a hook",
    ),
    "state of a metric": (state_of_a_metric, r"model\.mean\.mean_value", r"'mean_value', a state of a MeanMetric", "compute"),
    "count in a long list": (
        count_in_a_long_list,
        r"at first `.*mul.*, 1\).*`, now `.*mul.*, 2\)",
        r"does not do the same for every batch",
        "register_buffer",
    ),
    "clock": (clock, r"at first `.*`, now `.*`", r"does not do the same for every batch", "time"),
    "random choice": (random_choice, r"random\.choice\(model\.names\)", r"random\.choice\(\) gives str", "in a hook"),
    "random index": (random_index, r"names\[random\.randint\(0, 2\)\]", r"drawn at random, is used as an index", "torch"),
    "random order": (random_order, r"random\.shuffle\(names\)", r"shuffle\(\) gives list", r"torch\.randperm"),
    "own generator": (own_generator, r"generator=model\.generator", r"[Gg]enerator", ""),
    "missing op": (missing_op, r"torch\.linalg\.ldl_factor", r"aten\.linalg_ldl_factor_ex\.default", ""),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_the_error_names_line_reason_and_fix(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    function, source, reason, fix = MISTAKES[mistake]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    model = Model()
    model.mistake = mistake
    data = TensorDataset(torch.randn(32, 4), torch.ones(32, 1))
    with pytest.raises(BridgeError) as caught:
        Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet).fit(model, DataLoader(data, batch_size=8))
    text = str(caught.value)
    for expected in (source, reason, fix):
        assert re.search(expected, text, re.DOTALL), text
    if mistake not in ("count in a long list", "clock"):  # these are found by comparing batches: no line
        name, line = Path(__file__).name, function.__code__.co_firstlineno
        lines = range(line, line + 4)
        assert any(f"{name}:{n}" in text or f'{name}", line {n}' in text for n in lines), text
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_an_op_that_refuses_its_arguments_is_said_once_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    data = TensorDataset(torch.randn(32, 5), torch.ones(32, 1))  # the layer takes four features
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as caught:
        Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet).fit(Model(), DataLoader(data, batch_size=8))
    line = Model.training_step.__code__.co_firstlineno + 1
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.lineno for frame in frames if frame.name == "training_step"] == [line]
    [note] = caught.value.__notes__
    assert note.endswith("XLATRAIN_VERBOSE=1 shows them.")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
