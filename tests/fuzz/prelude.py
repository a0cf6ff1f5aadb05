"""What programs of hooks begin with: classes and functions that containers are made of, and modules of one class."""

# ruff: noqa: F401

import array
import collections
import contextvars
import copy
import ctypes
import dataclasses
import decimal
import enum
import fractions
import functools
import heapq
import io
import itertools
import os
import pickle
import queue
import random
import sys
import threading
import traceback
import types
import weakref

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as prune
import torch.utils.checkpoint

SEEN, OWNER, KEY = [], [], object()


class Plain:
    def __init__(self):
        self.x = 1.0

    def raise_to(self, value):
        self.x = value

    def value(self):
        return self.x

    @property
    def prop(self):
        return self.x * 2

    @prop.setter
    def prop(self, value):
        self.x = value

    def __call__(self):
        return self.x + 1


class Doubled(Plain):
    def value(self):
        return self.x * 2


@dataclasses.dataclass
class Record:
    x: float = 1.0
    many: list = dataclasses.field(default_factory=lambda: [1.0])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: float = 1.0


Pair = collections.namedtuple("Pair", "x y")


class Slotted:
    __slots__ = ("x",)

    def __init__(self):
        self.x = 1.0


class SlottedBelow(Slotted):
    __slots__ = ("y",)

    def __init__(self):
        super().__init__()
        self.y = 0.5


class Kept:
    reads = 0

    def __get__(self, one, owner=None):
        if one is None:
            return self
        self.reads += 1
        return one.__dict__.get("_d", 1.0)

    def __set__(self, one, value):
        one.__dict__["_d"] = value


class KeptApart:
    def __init__(self):
        self.values = weakref.WeakKeyDictionary()

    def __get__(self, one, owner=None):
        return self.values.get(one, 1.0)

    def __set__(self, one, value):
        self.values[one] = value


class Described:
    d, w = Kept(), KeptApart()


class Through:
    def __init__(self, name):
        self.name = name

    def __get__(self, one, owner=None):
        return getattr(one, self.name)

    def __set__(self, one, value):
        setattr(one, self.name, value)


class Dynamic:
    def __init__(self):
        self.kept = {"x": 1.0, "y": 0.5}

    def __getattr__(self, name):
        kept = self.__dict__.get("kept", {})
        if name in kept:
            return kept[name]
        raise AttributeError(name)

    def __setattr__(self, name, value):
        if name == "kept":
            object.__setattr__(self, name, value)
        else:
            self.kept[name] = value


class Watched:
    def __init__(self):
        self.x = 1.0

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        return value + 0.25 if name == "x" else value


class Cached:
    x = 1.0

    @functools.cached_property
    def twice(self):
        return self.x * 2


class Indexed:
    def __init__(self):
        self.kept = {"a": 1.0}

    def __getitem__(self, name):
        return self.kept[name]

    def __setitem__(self, name, value):
        self.kept[name] = value

    def __len__(self):
        return len(self.kept)

    def __iter__(self):
        return iter(self.kept.values())

    def __contains__(self, name):
        return name in self.kept


class OwnList(list):
    x = 0.5


class OwnDict(dict):
    def __missing__(self, name):
        return len(self) / 2


class Mode(enum.Enum):
    LOW = 1.0
    HIGH = 2.5


class Weak:
    def __init__(self):
        self.other()

    def other(self):
        self.strong = Plain()
        self.strong.x = 1.5
        self.ref = weakref.ref(self.strong)
        self.by_name = weakref.WeakValueDictionary(a=self.strong)
        self.all = weakref.WeakSet([self.strong])


class Partly:
    x = 1.0

    def times(self, by):
        return self.x * by

    double = functools.partialmethod(times, 2.0)


class Stepping:
    at = 0.0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return self.at


class Entered:
    depth = 0.0

    def __enter__(self):
        self.depth += 1

    def __exit__(self, *_):
        self.depth -= 1

    def __bool__(self):
        return self.depth > 0


def again(one):
    return pickle.loads(pickle.dumps(one))


def fresh_class(below=False, meta=False):
    class Meta(type):
        m = 1.0

        @property
        def of_class(cls):
            return type(cls).m * 2

    class Base(metaclass=Meta if meta else type):
        x = 1.0

        @classmethod
        def twice(cls):
            return cls.x * 2

        @staticmethod
        def half():
            return 0.5

    return type("Below", (Base,), {}) if below else Base


def holds(one):
    box = types.SimpleNamespace(c=one)
    return lambda: box


def filled_queue():
    one = queue.Queue()
    one.put(1.0)
    return one


def proxy_of():
    kept = {"a": 1.0}
    return kept, types.MappingProxyType(kept)


def local_of():
    one = threading.local()
    one.x = 1.0
    return one


def made_cell():
    value = 1.0

    def get():
        return value

    def put(new):
        nonlocal value
        value = new

    return get, put


def made_deep():
    kept = [1.0]

    def outer():
        def inner():
            return kept[-1]

        return inner

    return outer(), kept.append, lambda: list(kept)


def with_default():
    def one(a=1.0, *, k=0.5):
        return a + k

    return one


def made_cached():
    kept = {"a": 1.0}

    @functools.cache
    def one():
        return kept["a"]

    one.kept = kept
    return one


def made_wrapped():
    def one():
        return one.x

    one.x = 1.0

    @functools.wraps(one)
    def other():
        return one() + other.x

    return other


def made_dispatch():
    @functools.singledispatch
    def one(value):
        return 0.5

    one.register(int, lambda value: 0.25)
    return one


def made_generator():
    value = 1.0
    while True:
        sent = yield value
        value = value * 0.9 if sent is None else sent


def scaled(value, factor):
    return value * factor


def times(one, by):
    return one.x * by


class Rows(pl.loggers.logger.Logger):
    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step):
        self.rows.append([step, {name: float(value) for name, value in metrics.items()}])


def made_linear(inputs, outputs):
    one = torch.nn.Linear(inputs, outputs)
    with torch.no_grad():
        one.weight.copy_(torch.arange(inputs * outputs).reshape(outputs, inputs).sin() * 0.5)
        one.bias.zero_()
    return one


def wider(old):
    one = torch.nn.Sequential(made_linear(4, 5), torch.nn.Tanh(), made_linear(5, 4))
    with torch.no_grad():
        one[0].weight[:3] = old[0].weight
        one[2].weight[:, :3] = old[2].weight
    return one


class Part(torch.nn.Module):
    common = 1.0

    def __init__(self, number, inner=None):
        super().__init__()
        self.inside, self.inner = made_linear(4, 4), inner
        with torch.no_grad():
            self.inside.weight.add_(number * 0.05)
        self.scale, self.calls = 1.0 - number / 10, 0
        self.register_buffer("count", torch.zeros(()))

    def encoded(self, x):
        self.calls += 1
        return torch.tanh(self.inside(x)) * self.scale * self.common

    def forward(self, x):
        if self.training:
            self.count += 1
        x = self.encoded(x) + 0.01 * self.count
        return x if self.inner is None else self.inner(x)


class LightningPart(pl.LightningModule):
    common, encoded, forward = 1.0, Part.encoded, Part.forward

    def __init__(self, number):
        super().__init__()
        self.inside, self.inner = made_linear(4, 4), None
        self.scale, self.calls = 1.0 - number / 10, 0
        self.register_buffer("count", torch.zeros(()))


class ByNumber:
    def __init__(self, held):
        self.held = held

    def __getitem__(self, number):
        return self.held[str(number)]

    def __iter__(self):
        return iter(self.held.values())
