"""Random Lightning scripts: a base program and features, each of which adds to some of its parts."""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.fuzz.features import FEATURES
from tests.fuzz.states import STATES, State

_IMPORTS = """
import array, collections, contextvars, ctypes, dataclasses, decimal, enum, functools
import io, itertools, logging, math, operator, os, pathlib, queue, random, sys, threading, types, weakref
import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
"""

_INSTALLED = """
import importlib.util
folder{number} = pathlib.Path("site-packages")
folder{number}.mkdir(exist_ok=True)
(folder{number} / (__name__ + "_library{number}.py")).write_text({source!r})
library{number} = importlib.util.spec_from_file_location(
    __name__ + "_library{number}", (folder{number} / (__name__ + "_library{number}.py")).resolve())
library{number} = importlib.util.module_from_spec(library{number})
sys.modules[library{number}.__name__] = library{number}
library{number}.__spec__.loader.exec_module(library{number})
"""

WRITTEN = (
    "on_train_batch_start:3",
    "on_train_batch_end:2",
    "on_train_epoch_start:1",
    "on_validation_end:1",
    "callback on_train_batch_end:4",
    "callback on_train_epoch_end:0",
)
"""Where a state is changed: a hook, and the number of its batch, or call."""


@dataclass
class Parts:
    """What a program is put together from: lines of code, by where they go."""

    module: list[str] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    init: list[str] = field(default_factory=list)
    step: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)
    hooks: dict[str, list[str]] = field(default_factory=dict)
    callback: dict[str, list[str]] = field(default_factory=dict)
    methods: list[str] = field(default_factory=list)
    trainer: dict[str, str] = field(default_factory=dict)
    record: list[str] = field(default_factory=list)
    undo: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)

    def hook(self, name: str, lines: str, *, callback: bool = False) -> None:
        (self.callback if callback else self.hooks).setdefault(name, []).append(lines)


_SIGNATURES = {
    "on_train_batch_start": "batch, batch_idx",
    "on_train_batch_end": "outputs, batch, batch_idx",
    "on_validation_batch_start": "batch, batch_idx, dataloader_idx=0",
    "on_validation_batch_end": "outputs, batch, batch_idx, dataloader_idx=0",
    "on_before_optimizer_step": "optimizer",
    "on_before_zero_grad": "optimizer",
    "on_before_backward": "loss",
    "on_after_backward": "",
    "on_train_epoch_start": "",
    "on_train_epoch_end": "",
    "on_validation_epoch_start": "",
    "on_validation_epoch_end": "",
    "on_validation_start": "",
    "on_validation_end": "",
    "on_train_start": "",
    "on_fit_start": "",
    "on_train_end": "",
}


def state_feature(state: State, number: int, where: str, written: str) -> Parts:
    """A state that the step ``where`` reads, and that another place changes."""

    def own(text: str) -> str:
        return _numbered(text, number)

    library = [_INSTALLED.format(number=number, source=own(state.library))] if state.library else []
    parts = Parts(module=[*library, own(state.module)], init=[own(line) for line in [state.init] if line])
    if state.undo == "MixinN":
        parts.bases.append(f"Mixin{number}")
    elif state.undo:
        parts.undo.append(own(state.undo))
    if where == "training":
        parts.step.append(f"scale = scale * (0.5 + 0.25 * {own(state.read)})")
    else:
        parts.validation.append(f"self.log('val_{number}', 0.5 + 0.25 * {own(state.read)} + 0 * loss.detach())")
    place, _, at = written.partition(":")
    callback = place.startswith("callback ")
    name = place.removeprefix("callback ")
    condition = f"batch_idx == {at}" if "batch" in _SIGNATURES[name] else f"trainer.current_epoch == {at}"
    write = own(state.write)
    lines = f"if {condition} and not trainer.sanity_checking:\n" + textwrap.indent(write.replace("; ", "\n"), "    ")
    parts.hook(name, lines, callback=callback)
    return parts


def _numbered(text: str, number: int) -> str:
    """``N`` at the end of a name, or before a dot in a file's name, stands for the number of the feature."""
    return re.sub(r"(?<=[a-z_A-Z])N\b", str(number), text)


@dataclass(frozen=True)
class Program:
    """A script: what it is made of.

    Attributes:
        features: names, of :data:`FEATURES` or ``state:NAME:where:written``, each with its number.
    """

    features: tuple[tuple[int, str], ...]

    @classmethod
    def joined(cls, programs: Iterable[Program]) -> Program:
        """One program with all features of these."""
        names = [name for program in programs for _, name in program.features]
        return cls(tuple(enumerate(names)))

    @classmethod
    def random(cls, seed: int) -> Program:
        """The program of a seed: three to eight features."""
        draw = random.Random(seed)
        chosen: list[str] = []
        for _ in range(draw.randint(3, 8)):
            if draw.random() < 0.5:
                state = draw.choice(STATES)
                where = draw.choice(("training", "training", "validation"))
                chosen.append(f"state:{state.name}:{where}:{draw.choice(WRITTEN)}")
            else:
                chosen.append(draw.choice(sorted(FEATURES)))
        kept = list(dict.fromkeys(chosen))
        return cls(tuple(enumerate(kept)))

    def without(self, number: int) -> Program:
        """The same without one of its features."""
        return Program(tuple(one for one in self.features if one[0] != number))

    def source(self) -> str:
        """The script."""
        merged = Parts()
        for number, name in self.features:
            _merge(merged, _parts(name, number))
        return _render(merged)


def probe(state: State, where: str, written: str) -> Program:
    """The program of one kind of host state alone; ``where`` is ``training`` or ``validation``."""
    return Program(((0, f"state:{state.name}:{where}:{written}"),))


def _parts(name: str, number: int) -> Parts:
    if name.startswith("state:"):
        _, kind, where, written = name.split(":", 3)
        return state_feature(next(one for one in STATES if one.name == kind), number, where, written)
    parts = Parts()
    FEATURES[name](parts, number)
    return parts


def _merge(into: Parts, one: Parts) -> None:
    for name in ("module", "bases", "init", "step", "after", "validation", "methods", "record", "undo"):
        getattr(into, name).extend(getattr(one, name))
    for name in ("hooks", "callback"):
        for hook, lines in getattr(one, name).items():
            getattr(into, name).setdefault(hook, []).extend(lines)
    into.trainer.update(one.trainer)
    into.settings.update(one.settings)


def _block(lines: Iterable[str], indent: int) -> str:
    return textwrap.indent("\n".join(lines) or "pass", " " * indent)


def _hooks(hooks: dict[str, list[str]], *, callback: bool) -> str:
    made = []
    for name, lines in hooks.items():
        signature = _SIGNATURES[name]
        arguments = ", ".join(["self", *(["trainer", "pl_module"] if callback else []), *([signature] if signature else [])])
        names = "module = pl_module" if callback else "module, trainer = self, self.trainer"
        body = "\n".join(_global_first(lines))
        made.append(f"    def {name}({arguments}):\n{_block([*_globals(lines), names, body], 8)}\n")
    return "\n".join(made)


def _globals(lines: list[str]) -> list[str]:
    found = [line.strip() for one in lines for line in one.splitlines() if line.strip().startswith("global ")]
    return list(dict.fromkeys(found))


def _global_first(lines: list[str]) -> list[str]:
    return ["\n".join(line for line in one.splitlines() if not line.strip().startswith("global ")) for one in lines]


_DEFAULT_STEP_END = """self.log("loss", loss)
return loss"""

_MANUAL_STEP_END = """optimizer = self.optimizers()
optimizer.zero_grad()
self.manual_backward(loss)
optimizer.step()
self.log("loss", loss)"""


def _render(parts: Parts) -> str:
    settings = parts.settings
    manual = "manual" in settings
    end = settings.get("step_end") or (_MANUAL_STEP_END if manual else _DEFAULT_STEP_END)
    bases = "".join(f"{one}, " for one in parts.bases)
    configure = settings.get("configure", "return torch.optim.SGD(self.parameters(), lr=0.1)")
    trainer = {"max_epochs": "3", "limit_val_batches": "2", "num_sanity_val_steps": "1", **parts.trainer}
    validates = "validation_epoch" not in settings
    loaders = settings.get("loaders", "loader(TRAIN)")
    return f"""{_IMPORTS}
ON_TRAINER, ON_LOGGER, ON_STRATEGY, ON_OPTIMIZER, SEEN = [], [], [], [], []


class Data(torch.utils.data.Dataset):
    def __init__(self, count, offset):
        draw = torch.Generator().manual_seed(offset)
        self.x = torch.randn(count, 4, generator=draw)
        self.y = self.x.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=draw)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Rows(pl.loggers.logger.Logger):
    def __init__(self):
        super().__init__()
        self.rows = []
        self.logged = []

    name = "rows"
    version = 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step):
        self.logged.append([step, {{name: float(value) for name, value in metrics.items()}}])


DATASET = Data(20, 1)
SAMPLER = torch.utils.data.SequentialSampler(DATASET)
{chr(10).join(one for one in parts.module if one)}


class Net({bases}pl.LightningModule):
    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.layer = torch.nn.Linear(4, 1)
        self.layer.weight.data = torch.randn(1, 4, generator=draw) * 0.3
        self.layer.bias.data.zero_()
        self.automatic_optimization = {not manual}
{_block(parts.init, 8)}

    def training_step(self, batch, batch_idx):
        {settings.get("unpack", "x, y = batch")}
        scale = 1.0
{_block(parts.step, 8)}
        loss = F.mse_loss(self.layer(x), y) * scale
{_block(parts.after, 8)}
{_block([end], 8)}

    def {"validation_step" if validates else "unused"}(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.layer(x), y)
        self.log("val_loss", loss)
{_block(parts.validation, 8)}

    def configure_optimizers(self):
{_block([configure], 8)}

{chr(10).join(textwrap.indent(one, "    ") for one in parts.methods)}
{_hooks(parts.hooks, callback=False)}


class Watch(pl.Callback):
    def on_fit_start(self, trainer, pl_module):
        for name in ON_TRAINER:
            setattr(trainer, name, 1.0)
        for name in ON_LOGGER:
            setattr(trainer.logger, name, 1.0)
        for name in ON_STRATEGY:
            setattr(trainer.strategy, name, 1.0)

    def on_train_start(self, trainer, pl_module):
        for name in ON_OPTIMIZER:
            setattr(trainer.optimizers[0], name, 1.0)

{_hooks(parts.callback, callback=True)}


WATCH = Watch()


def main(devices):
    def loader(data, **options):
        return torch.utils.data.DataLoader(data, batch_size=4 // devices, **options)

    TRAIN = DATASET
    net = Net()
    logger = Rows()
    trainer = pl.Trainer(accelerator="cpu", devices=devices, callbacks=[WATCH], logger=logger, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        {", ".join(f"{name}={value}" for name, value in trainer.items())})
    record = {{}}
    try:
        trainer.fit(net, {loaders}, loader(Data(8, 2)))
    except Exception as error:
        record["error"] = type(error).__name__
        record["text"] = repr(error)[:2000]
    finally:
        found = {{name: value for name, value in net.state_dict().items()}}
{_block(parts.undo, 8)}
    record["weights"] = found
    record["logged"] = logger.logged
    record["metrics"] = dict(trainer.callback_metrics)
    record["counters"] = [trainer.global_step, trainer.current_epoch]
    record["seen"] = SEEN
{_block([f"record[{one!r}] = {one}" for one in parts.record], 4)}
    return record, trainer
"""
