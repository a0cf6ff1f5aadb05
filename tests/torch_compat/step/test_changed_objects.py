"""Each way to change each kind of object, wherever a step has it from: what is in it is what Python alone leaves there."""

from __future__ import annotations

import collections
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer

BATCHES = 4


class Own:
    def __init__(self, value: Any = 0) -> None:
        self.value = value


class OwnDict(dict[Any, Any]):
    """A dict that can have attributes."""

    held: Any


class OwnList(list[Any]):
    """A list that can have attributes."""


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any = 0) -> None:
        self.value = value


class Class:
    held: Any


class Kind(type):
    held: Any


class OfKind(metaclass=Kind):
    """Has what its class's class has."""


def append(x: Any, n: int) -> None:
    x.append(n)


def add_list(x: Any, n: int) -> None:
    x += [n]


def set_first(x: Any, n: int) -> None:
    x[0] = n


def count_first(x: Any, n: int) -> None:
    x[0] += n


def count_first_late(x: Any, n: int) -> None:
    x[0] += int(n > 1)


def rotate(x: Any, n: int) -> None:
    x.append(n)
    x.append(x.pop(0))


def set_slice(x: Any, n: int) -> None:
    x[0:1] = [n, n]


def set_entry(x: Any, n: int) -> None:
    x["k"] = n


def count_entry(x: Any, n: int) -> None:
    x["a"] += n


def count_entry_late(x: Any, n: int) -> None:
    x["a"] += int(n > 1)


def count_new_entry(x: Any, n: int) -> None:
    x["k"] = x.get("k", 0) + n


def unite(x: Any, n: int) -> None:
    x |= {"k": n}


def update(x: Any, n: int) -> None:
    x.update(k=n)


def set_default(x: Any, n: int) -> None:
    x.setdefault(n, []).append(n)


def other_entry(x: Any, n: int) -> None:
    x["b"] = x["a"] + n
    x["a"] = n


def move_entry(x: Any, n: int) -> None:
    x["k"] = n
    x["o"] = x.pop("q", 0)
    x["q"] = n


def lengthen_a_text(x: Any, n: int) -> None:
    x["t"] = x.get("t", "") + ("x" if n > 1 else "")


def add_to_set(x: Any, n: int) -> None:
    x.add(n)


def unite_sets(x: Any, n: int) -> None:
    x |= {n, -n}


def set_attribute(x: Any, n: int) -> None:
    x.value = n


def count_attribute(x: Any, n: int) -> None:
    x.value += n


def new_attribute(x: Any, n: int) -> None:
    x.other = x.other + n if hasattr(x, "other") else 0


LISTS = (append, add_list, set_first, count_first, count_first_late, rotate, set_slice)
DICTS = (
    *(set_entry, count_entry, count_entry_late, count_new_entry, unite, update),
    *(set_default, other_entry, move_entry, lengthen_a_text),
)
OBJECTS = (set_attribute, count_attribute, new_attribute)
WAYS: dict[str, tuple[Callable[[], Any], tuple[Callable[[Any, int], None], ...]]] = {
    "list": (lambda: [0], LISTS),
    "list of a class": (lambda: OwnList([0]), (*LISTS, new_attribute)),
    "deque": (lambda: collections.deque([0], 3), (append, add_list, set_first, count_first)),
    "UserList": (lambda: collections.UserList([0]), (append, add_list, set_first, count_first)),
    "dict": (lambda: {"a": 0}, DICTS),
    "dict of a class": (lambda: OwnDict(a=0), (*DICTS, new_attribute)),
    "OrderedDict": (lambda: collections.OrderedDict(a=0), DICTS),
    "UserDict": (lambda: collections.UserDict(a=0), DICTS),
    "Counter": (lambda: collections.Counter(a=1), (set_entry, count_entry, count_new_entry, update)),
    "set": (lambda: {0}, (add_to_set, unite_sets)),
    "object": (Own, OBJECTS),
    "namespace": (lambda: types.SimpleNamespace(value=0), OBJECTS),
    "object with slots": (Slotted, (set_attribute, count_attribute)),
}
HELD: Any = None
IN_A_DICT: dict[str, Any] = {}
IN_A_TUPLE: list[tuple[Any, ...]] = [()]
IN_AN_OBJECT, IN_A_DICT_OF_A_CLASS, IN_A_CHAIN = Own(), OwnDict(), collections.ChainMap[str, Any]({})


def _in_global(held: Any) -> None:
    global HELD
    HELD = held


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "a global": (_in_global, lambda: HELD),
    "an entry": (lambda held: IN_A_DICT.update(held=held), lambda: IN_A_DICT["held"]),
    "a tuple": (lambda held: IN_A_TUPLE.__setitem__(0, (1, (held,))), lambda: IN_A_TUPLE[0][1][0]),
    "an object": (lambda held: setattr(IN_AN_OBJECT, "value", held), lambda: IN_AN_OBJECT.value),
    "a class": (lambda held: setattr(Class, "held", held), lambda: Class.held),
    "a class of classes": (lambda held: setattr(Kind, "held", held), lambda: OfKind.held),
    "an attribute of a dict": (lambda held: setattr(IN_A_DICT_OF_A_CLASS, "held", held), lambda: IN_A_DICT_OF_A_CLASS.held),
    "a ChainMap": (lambda held: IN_A_CHAIN.update(held=held), lambda: IN_A_CHAIN["held"]),
}


class Changing(LightningModule):
    def __init__(self, change: Callable[[int], None]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.change = change

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.change(batch_idx)
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


CASES = [(kind, way) for kind, (_, ways) in WAYS.items() for way in ways]


def shown(one: Any) -> Any:
    contents = list(one.items()) if hasattr(one, "items") else sorted(one) if isinstance(one, set) else None
    contents = list(one) if contents is None and hasattr(one, "__iter__") else contents
    own = vars(one) if hasattr(one, "__dict__") else getattr(one, "value", None)
    return contents, dict(own) if isinstance(own, dict) else own


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{kind}-{way.__name__}" for kind, way in CASES])
def test_changed_as_by_python_alone(number: int) -> None:
    """One change a step: others make it eager. Each is made in one of the holders."""
    kind, way = CASES[number]
    put, found = list(HOLDERS.values())[number % len(HOLDERS)]
    make = WAYS[kind][0]
    expected = make()
    for batch_idx in range(BATCHES):
        way(expected, batch_idx)
    put(make())
    options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(max_epochs=1, accelerator="cpu", devices=1, **options)
        trainer.fit(Changing(lambda n: way(found(), n)), DataLoader(TensorDataset(torch.ones(BATCHES, 2)), 1))
    assert shown(found()) == shown(expected)
