"""Changes of globals, tables, objects of installed packages and functions that a step may reach, seen without compiling."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from torch_compat import LightningModule
from torch_compat.step.guards.fingerprints import contents_of
from torch_compat.step.guards.global_guards import ChangedSurroundingsError, GlobalGuards
from torch_compat.step.guards.user_code import user_code
from torch_compat.step.values.user_objects import is_user_object

TABLE = [0.0] * 5000
ARRAY = np.zeros(100_000, np.float32)
GAPS = np.array([1.0, np.nan])  # equal to nothing, not even to itself
FOREIGN = PretrainedConfig()
FOREIGN.nested = {"deep": [1]}  # pyright: ignore[reportAttributeAccessIssue]
FACTOR = 1.0
FUNCTIONS = [functools.partial(lambda scale, x: x * FACTOR, 2.0)]


class Named:
    alpha_one = 1.0

    def beta_one(self) -> float:
        return HIDDEN


HIDDEN = 1.0


class Module(LightningModule):
    def training_step(self, name: str) -> Any:
        return TABLE, ARRAY, GAPS, FOREIGN, FUNCTIONS[0], getattr(Named(), f"{name}_one")

    def on_train_end(self) -> None:  # not called by the step
        print(OTHER)


OTHER = 1.0


class Weighted(Protocol):
    weight: float = 2.0


class Loss(Weighted):
    proxy: Any = None


class Proxy:
    """Stands for nothing yet, and says so in its own way."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not bound")


Loss.proxy = Proxy()


class WithProtocol(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.loss = Loss()
        self.proxy = Proxy()

    def training_step(self, batch: float) -> float:
        return batch * self.loss.weight


def steps(around: GlobalGuards, count: int) -> list[int]:
    return [around.key("training_step") for _ in range(count)]


def test_names_of_functions_in_containers_and_of_computed_attributes() -> None:
    found = {name.text.removeprefix(f"{__name__}.") for name in user_code("training_step", Module(), {}).names}
    assert {"TABLE", "ARRAY", "FOREIGN", "FUNCTIONS", "FACTOR", "Named.alpha_one", "HIDDEN"} <= found
    assert "OTHER" not in found

    def function() -> None:
        print(OTHER)

    assert {name.name for name in user_code("a step", torch.nn.Module(), {}, [function]).names} == {"OTHER"}


def test_protocols_and_proxies() -> None:
    found = {name.text.removeprefix(f"{__name__}.") for name in user_code("training_step", WithProtocol(), {}).names}
    assert {"Weighted.weight", "Loss.weight", "Loss.proxy"} & found
    assert not is_user_object(Proxy())
    assert contents_of(Proxy()) is None


def test_changes_of_installed_objects_are_seen_at_once_and_those_for_nothing_no_longer_than_twice() -> None:
    around = GlobalGuards(Module(), {})
    before, *_ = steps(around, 3)
    states = []
    for value in (2, 3):
        FOREIGN.nested["deep"][0] = value  # pyright: ignore[reportAttributeAccessIssue]
        states += steps(around, 1)
        if value == 2:
            around.count_state("training_step", same=True)
    assert len({before, *states}) == 3
    with pytest.warns(UserWarning, match=r"training_step names .*FOREIGN, a transformers.*, whose contents"):
        around.count_state("training_step", same=True)
    after = steps(around, 1)
    FOREIGN.nested["deep"][0] = 4  # pyright: ignore[reportAttributeAccessIssue]
    assert steps(around, 1) == after


@pytest.mark.parametrize("large", [TABLE, ARRAY], ids=["list", "array"])
def test_large_tables_are_compared_now_and_then_and_a_late_change_is_an_error(large: Any) -> None:
    around = GlobalGuards(Module(), {})
    before, *_ = steps(around, 3)
    large[7] += 1.0
    seen = steps(around, 200)
    assert seen[0] == before and seen[-1] != before and len(set(seen)) == 2
    with pytest.raises(ChangedSurroundingsError, match="entries, of which some were changed in place") as raised:
        around.count_state("training_step", same=False)
    assert not raised.value.recoverable


def test_another_length_of_a_large_table_is_seen_at_once() -> None:
    around = GlobalGuards(Module(), {})
    before, *_ = steps(around, 3)
    TABLE.append(1.0)
    after = steps(around, 3)
    assert before not in after and len(set(after)) == 1
    around.count_state("training_step", same=False)


def test_what_a_step_changes_outside_is_taken_back_and_named() -> None:
    around = GlobalGuards(Module(), {})
    with around.taken_back("training_step") as changed:
        TABLE[0], ARRAY[0], FOREIGN.seen = 7.0, 7.0, 1  # pyright: ignore[reportAttributeAccessIssue]
    names = {text.removeprefix(f"{__name__}.") for text in changed}
    assert names == {"TABLE", "ARRAY", "FOREIGN"}
    assert (TABLE[0], float(ARRAY[0]), hasattr(FOREIGN, "seen")) == (0.0, 0.0, False)
    with pytest.raises(ChangedSurroundingsError, match=r"training_step changes the contents of .*ARRAY"):
        around.refuse_changes("training_step", changed)
