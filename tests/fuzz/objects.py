"""Programs of objects that are written in C, which steps and hooks change and read: counts of what was done must be stock's."""

from __future__ import annotations

import importlib.util
import random
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

_MOST = 3
"""Uses of objects in a program."""


@dataclass(frozen=True)
class Kind:
    """One kind of object; in the texts ``o`` is it.

    Attributes:
        make: an expression.
        change: a statement that changes it.
        read: an expression that shows what has been changed, and changes nothing.
        needs: an installed package.
    """

    make: str
    change: str
    read: str
    needs: str = "sys"


KINDS = {
    name: kind
    for name, texts in tomllib.loads(Path(__file__).with_name("objects.toml").read_text()).items()
    if importlib.util.find_spec((kind := Kind(**texts)).needs.partition(".")[0])
}
PLACES = (
    "self.o{n}",
    "self.held{n}[0]",
    "self.table{n}['o']",
    "O{n}[0]",
    "GLOBAL{n}",
    "self.plain{n}.o",
    "self.trainer.callbacks[0].o{n}",
)
"""Where it is, in the code of a step."""
HOOKS = ("training_step", "training_step", "training_step", "validation_step", "on_train_batch_end", "on_train_batch_start")
USES = (
    "{change}",
    "{change}; SEEN.append({read})",
    "SEEN.append({read}); {change}",
    "{change}; self.log('l{n}', float(len(str({read}))))",
    "if batch_idx % 2: {change}",
    "SEEN.append({read})",
    "{change}; self.kept{n} = {read}",
    "loss = loss * (1 + 0.01 * len(str({read})))",
    "{change}; loss = loss * (1 + 0.01 * len(str({read})))",
    "change{n}({place}); SEEN.append(read{n}({place}))",
)
"""What a step does with it."""
OF_HOOKS = USES[:3] + USES[4:6]
"""What others do with it."""

_HEAD = """
import array, collections, copy, csv, ctypes, decimal, fractions, functools, hashlib, heapq, hmac, importlib, io, itertools
import json, mmap, os, operator, pickle, queue, random, re, sqlite3, struct, sys, tempfile, threading, types, weakref, zlib
import bz2, codecs
import logging, xml.etree.ElementTree as ET, string, uuid, datetime, contextvars, selectors, socket
import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

SEEN, KEPT, FILES, KEY = [], [], {}, type("Key", (), {})()

class Plain:
    pass
"""

_MODEL = """
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        {init}
    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        {training_step}
        return loss
    def validation_step(self, batch, batch_idx):
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        {validation_step}
        self.log("val", loss)
    def on_train_batch_start(self, batch, batch_idx):
        {on_train_batch_start}
    def on_train_batch_end(self, outputs, batch, batch_idx):
        {on_train_batch_end}
        {notes}
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

def main(devices):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, generator=generator)
    data = TensorDataset(x, x[:, :2] * 0.7 + 0.3)
    callback = pl.Callback()
    model = Model()
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    options |= dict(accelerator="cpu", devices=devices, num_sanity_val_steps=1)
    trainer = pl.Trainer(max_epochs=2, callbacks=[callback], **options)
    {late}
    trainer.fit(model, DataLoader(data, 4), DataLoader(data, 8))
    found = {{"seen": list(map(repr, SEEN)), "weights": model.layer.weight.tolist(), "last": [{last}]}}
    found |= {{"metrics": sorted((key, float(one)) for key, one in trainer.callback_metrics.items())}}
    return found, trainer
"""


@dataclass(frozen=True)
class Objects:
    """A program of numbered uses of objects: ``kind | place | hook | use``, where a number has one kind and place."""

    features: tuple[tuple[int, str], ...]

    @classmethod
    def random(cls, seed: int) -> Self:
        rng = random.Random(seed)
        found: list[str] = []
        for n in range(rng.randint(1, _MOST)):
            kind, place = rng.choice(list(KINDS)), rng.choice(PLACES).format(n=n)
            for hook in rng.sample(HOOKS, rng.choice((1, 1, 2))):
                uses = USES if hook.endswith("_step") else OF_HOOKS
                found.append(f"{n} | {kind} | {place} | {hook} | {rng.choice(uses)}")
        return cls(tuple(enumerate(found)))

    @classmethod
    def one(cls, kind: str, place: str, hook: str, use: str) -> Self:
        return cls(((0, f"0 | {kind} | {place.format(n=0)} | {hook} | {use}"),))

    def without(self, number: int) -> Self:
        return replace(self, features=tuple(one for one in self.features if one[0] != number))

    def source(self) -> str:
        top, init, late, notes, last = "", [], [], [], []
        lines: dict[str, list[str]] = {hook: [] for hook in HOOKS}
        made: set[str] = set()
        for _, text in self.features:
            n, name, place, hook, use = text.split(" | ")
            kind = KINDS[name]
            if n not in made:
                made.add(n)
                made_by = kind.make.strip() if "return o" in kind.make else f"return {kind.make}"
                top += f"\ndef make{n}():\n    {made_by}"
                top += f"\n\ndef change{n}(o):\n    {kind.change}\n\ndef read{n}(o):\n    return {kind.read}\n"
                if place.startswith(("O", "GLOBAL")):
                    top += f"\nO{n} = [make{n}()]\nGLOBAL{n} = make{n}()\n"
                elif place.startswith("self.trainer"):
                    late.append(f"callback.o{n} = make{n}()")
                else:
                    init += [f"self.held{n}, self.table{n}, self.plain{n} = [None], {{}}, Plain()", f"{place} = make{n}()"]
                notes.append(f"SEEN.append(read{n}({place}))")
                last.append(f"read{n}({place.replace('self.trainer', 'trainer').replace('self.', 'model.')})")
            statement = use.replace("{change}", kind.change).replace("{read}", f"({kind.read})")
            statement = statement.replace("{n}", n).replace("{place}", place)
            lines[hook] += [f"o = {place}", *statement.splitlines()]
        text = {hook: "\n        ".join(found or ["pass"]) for hook, found in lines.items()}
        text |= {"init": "\n        ".join(init or ["pass"]), "notes": "\n        ".join(notes)}
        return (
            _HEAD
            + top
            + _MODEL.format(**text, late="\n    ".join(late or ["pass"]), last=", ".join(f"repr({one})" for one in last))
        )


def each() -> dict[str, Objects]:
    """A program for each kind of object, in a place of its own, and each use of it in steps."""
    found = {}
    for index, kind in enumerate(KINDS):
        for offset, use in enumerate((USES[0], USES[3], USES[4], USES[9])):
            place, hook = PLACES[(index + offset) % len(PLACES)], ("training_step", "validation_step")[offset % 2]
            found[f"{kind}_{offset}"] = Objects.one(kind, place, hook, use)
    return found
