"""Programs whose source is not there, as those of ``python -c``: what they change is right, or a reason to run eagerly."""

from __future__ import annotations

import cProfile
import types
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import Trainer
from torch_compat.step.eager.eager import EagerSteps
from torch_compat.step.guards.unseen_changes import change_of

PROGRAM = """
import torch
from torch_compat import LightningModule

class Kept:
    rows = []

def keep(): ...
keep.rows = []

ROWS = []
REACHED = {"of a class": lambda: Kept.rows, "of a function": lambda: keep.rows, "of a module": lambda: ROWS}

def put(rows, value):
    rows.append(value)

class Net(LightningModule):
    def __init__(self, where):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.where, self.seen = where, []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).pow(2).mean()
        said = {}
        said["loss"] = loss
        self.seen.append(batch_idx)
        if self.where:
            put(REACHED[self.where](), loss.item())
        self.log_dict(said)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.where:
            assert REACHED[self.where]()[-1] == outputs["loss"].item()
"""


def fitted(where: str) -> tuple[Any, Trainer]:
    program = types.ModuleType("__main__")
    exec(compile(PROGRAM, "<string>", "exec"), vars(program))
    torch.manual_seed(0)
    trainer = Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, devices=1
    )
    trainer.fit(net := program.Net(where), DataLoader(TensorDataset(torch.randn(12, 4)), 4))
    assert net.seen == [0, 1, 2]
    return program, trainer


def test_a_step_that_changes_only_its_own_is_compiled() -> None:
    _, trainer = fitted("")
    assert not isinstance(trainer.executor.steps, EagerSteps)


@pytest.mark.parametrize("where", ["of a class", "of a function", "of a module"])
def test_a_step_that_changes_more_is_eager(where: str) -> None:
    with pytest.warns(UserWarning, match=r"__main__\.put has no source that could be read, and changes something"):
        program, _ = fitted(where)
    rows = program.REACHED[where]()
    assert len(rows) == 3 and len(set(rows)) == 3


def test_a_profiler_stays() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    with pytest.warns(UserWarning, match="has no source that could be read"):
        program, _ = fitted("of a class")
    profiler.disable()
    assert len(program.Kept.rows) == 3
    assert any(one.code.co_name == "fitted" for one in profiler.getstats() if isinstance(one.code, types.CodeType))


SOURCES = {
    "x.append(1)": "def f(x): x.append(1)",
    "x[…] =": "def f(x): x['a'] = 1",
    "x[…] +=": "def f(x): x[0] += 1",
    "x.a =": "def f(x): x.a = 1",
    "x.a +=": "def f(x): x.a += 1",
    "self.a.b =": "def f(self): self.a.b = 1",
    "x += […]": "def f(x): x += [1]",
    "del x[…]": "def f(x): del x[0]",
    "setattr": "def f(x): setattr(x, 'a', 1)",
    "global": "def f():\n global G\n G = 1",
    "inside": "def f(x): return [ROWS.append(one) for one in x]",
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_changes_are_read_off_instructions(source: str) -> None:
    names: dict[str, Any] = {}
    exec(source, names)
    assert change_of(names["f"].__code__) is not None


def test_what_a_function_makes_may_be_changed() -> None:
    names: dict[str, Any] = {}
    exec(
        "def f(self, x):\n self.a = 1\n self.n += 1\n self.d['k'] += x\n self.l.append(x)\n r = [x]\n r += [x]\n r.append(x)",
        names,
    )
    assert change_of(names["f"].__code__) is None
