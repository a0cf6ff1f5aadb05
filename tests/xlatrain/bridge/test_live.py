"""Live tensors: ``nn.Parameter``s whose values are elsewhere; lazy tensors: values fetched when they are needed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from xlatrain.bridge.tensors.lazy import lazy_tensor, unread_lazy
from xlatrain.bridge.tensors.live import LiveTensors, live_array


class Store:
    """The source of live tensors' values in these tests: a dict of arrays that counts how often it is read."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.arrays = {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}
        self.grads: dict[str, torch.Tensor | None] = {}
        self.reads: list[str] = []
        self.live = LiveTensors(self.read, self.grads.get, self.grads.__setitem__, array=self.arrays.get)
        self.live.adopt(tensors)

    def read(self, name: str) -> np.ndarray:
        self.reads.append(name)
        return self.arrays[name]

    def step(self, **arrays: Any) -> None:
        """The arrays were replaced by a program."""
        self.arrays.update({name: np.asarray(array, np.float32) for name, array in arrays.items()})
        self.live.advance()
        self.reads.clear()


@pytest.fixture
def store() -> Store:
    return Store(w=torch.nn.Parameter(torch.ones(2, 2)), b=torch.zeros(2))


READERS: dict[str, Callable[[torch.Tensor], float]] = {
    "function": lambda w: torch.sum(w).item(),
    "method": lambda w: w.sum().item(),
    "operator": lambda w: (w * 1).detach().sum().item(),
    "index": lambda w: 4 * w[0, 0].item(),
    "data": lambda w: w.data.sum().item(),
    "detach": lambda w: w.detach().sum().item(),
    "numpy": lambda w: float(w.detach().numpy().sum()),
    "list": lambda w: sum(map(sum, w.tolist())),
    "nested in arguments": lambda w: torch.cat([w, w]).sum().item() / 2,
    "keyword argument": lambda w: torch.sum(input=w).item(),
    "in-place on another": lambda w: torch.zeros(2, 2).add_(w.detach()).sum().item(),
    "copy": lambda w: copy.deepcopy(w).detach().sum().item(),
    "pickle": lambda w: pickle.loads(pickle.dumps(w.detach().clone())).sum().item(),
    "state_dict": lambda w: torch.nn.ParameterDict({"w": w}).state_dict()["w"].sum().item(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_way_of_reading_gives_the_current_value(store: Store, read: Callable[[torch.Tensor], float]) -> None:
    store.step(w=np.full((2, 2), 5.0))
    assert read(store.tensors["w"]) == 20.0
    store.step(w=np.full((2, 2), 6.0))
    assert read(store.tensors["w"]) == 24.0


def test_what_needs_no_values_brings_none_to_the_host(store: Store) -> None:
    store.step(w=np.full((2, 2), 5.0))
    w = store.tensors["w"]
    found = (w.shape, w.dtype, w.device, w.ndim, w.numel(), w.requires_grad, w.is_leaf, len(w), w.size(0), hash(w) != 0)
    assert found == ((2, 2), torch.float32, torch.device("cpu"), 2, 4, True, True, 2, 2, True)
    assert isinstance(w, torch.nn.Parameter)
    assert store.reads == []


def test_a_value_is_brought_once_for_each_step(store: Store) -> None:
    store.step(w=np.full((2, 2), 5.0))
    for _ in range(3):
        store.tensors["w"].sum()
    assert store.reads == ["w"]


WRITERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda w: w.mul_(2),
    "index": lambda w: w.__setitem__(0, 9.0),
    "data": lambda w: w.data.add_(1),
    "assigned data": lambda w: setattr(w, "data", torch.full((2, 2), 8.0)),
    "copy": lambda w: w.copy_(torch.full((2, 2), 3.0)),
    "through a view": lambda w: w.view(-1)[2:].zero_(),
    "through numpy": lambda w: w.detach().numpy().fill(4.0),
    "init": lambda w: torch.nn.init.constant_(w, 0.5),
    "as out": lambda w: torch.add(torch.ones(2, 2), 1, out=w),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_way_of_writing_is_found(store: Store, write: Callable[[torch.Tensor], Any]) -> None:
    store.step(w=np.full((2, 2), 5.0), b=np.ones(2))
    expected = torch.full((2, 2), 5.0)
    with torch.no_grad():
        write(expected)
        write(store.tensors["w"])
        assert store.tensors["b"].sum().item() == 2.0
    assert {name: host.tolist() for name, host in store.live.written().items()} == {"w": expected.tolist()}


def test_a_write_is_found_until_the_next_step_only(store: Store) -> None:
    with torch.no_grad():
        store.tensors["w"].mul_(3)
    assert list(store.live.written()) == ["w"]
    store.step(w=np.full((2, 2), 3.0))
    assert store.live.written() == {}


def test_nan_is_no_write(store: Store) -> None:
    store.step(w=np.full((2, 2), np.nan))
    assert store.tensors["w"].isnan().all()
    assert store.live.written() == {}


def test_gradients_come_from_and_go_to_the_owner(store: Store) -> None:
    w = store.tensors["w"]
    assert w.grad is None
    store.grads["w"] = torch.full((2, 2), 7.0)
    assert w.grad is store.grads["w"]
    w.grad = None
    assert store.grads["w"] is None


def test_a_change_of_requires_grad_is_counted(store: Store) -> None:
    w = store.tensors["w"]
    before = store.live.forms_changed
    w.requires_grad_(False)
    w.requires_grad = True
    assert store.live.forms_changed == before + 2
    assert w.requires_grad


def test_while_captured_it_stands_for_its_traced_value(store: Store) -> None:
    traced = torch.full((2, 2), 11.0)
    with store.live.traced_as({"w": traced}):
        assert torch.sum(store.tensors["w"]).item() == 44.0
        assert store.tensors["b"].sum().item() == 0.0  # one that is not traced is itself
    assert torch.sum(store.tensors["w"]).item() == 4.0


def test_copies_are_ordinary_parameters_with_the_current_value(store: Store) -> None:
    store.step(w=np.full((2, 2), 5.0))
    again = copy.deepcopy(store.tensors["w"])
    assert type(again) is torch.nn.Parameter
    store.step(w=np.zeros((2, 2)))
    assert again.detach().sum().item() == 20.0


def test_after_release_they_are_what_they_were(store: Store) -> None:
    w, b = store.tensors["w"], store.tensors["b"]
    store.step(w=np.full((2, 2), 5.0))
    store.live.release()
    assert (type(w), type(b)) == (torch.nn.Parameter, torch.Tensor)
    store.arrays["w"][:] = 0
    assert w.detach().sum().item() == 20.0
    (w**2).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [[10.0, 10.0], [10.0, 10.0]]


def test_a_subclass_of_parameter_stays_one() -> None:
    class Scaled(torch.nn.Parameter):
        pass

    store = Store(w=Scaled(torch.ones(2)))
    assert isinstance(store.tensors["w"], Scaled)
    store.live.release()
    assert type(store.tensors["w"]) is Scaled


def test_the_array_behind_it_is_given_only_while_it_is_current(store: Store) -> None:
    w = store.tensors["w"]
    assert live_array(w) is store.arrays["w"]
    assert live_array(torch.ones(2)) is None
    w.data  # noqa: B018  may be written to from now on
    assert live_array(w) is None


# -- lazy tensors ------------------------------------------------------------------------------------------------------


def make_lazy(calls: list[int], value: float = 3.0) -> torch.Tensor:
    def fetch() -> torch.Tensor:
        calls.append(1)
        return torch.full((2, 3), value)

    return lazy_tensor((2, 3), torch.float32, fetch)


def test_a_lazy_tensor_is_fetched_once_and_only_when_needed() -> None:
    calls: list[int] = []
    lazy = make_lazy(calls)
    assert (lazy.shape, lazy.dtype, lazy.requires_grad) == ((2, 3), torch.float32, False)
    assert isinstance(lazy, torch.Tensor)
    assert calls == []
    assert unread_lazy(lazy) is not None
    assert lazy.sum().item() == 18.0
    assert (lazy + lazy).sum().item() == 36.0
    assert len(calls) == 1
    assert type(lazy) is torch.Tensor
    assert unread_lazy(lazy) is None


@pytest.mark.parametrize(
    "method",
    [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), torch.clone],
    ids=["deepcopy", "pickle", "clone"],
)
def test_copies_of_a_lazy_tensor_have_its_values(method: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = method(make_lazy([]))
    assert type(found) is torch.Tensor
    assert found.sum().item() == 18.0


def test_writing_to_a_lazy_tensor_writes_to_its_own_values() -> None:
    first, second = make_lazy([]), make_lazy([], value=4.0)
    first.zero_()
    assert first.sum().item() == 0.0
    assert second.sum().item() == 24.0  # though lazy tensors of one dtype share their placeholder


def test_one_call_may_mix_live_and_lazy_tensors(store: Store) -> None:
    live, values = store.tensors["w"], torch.full_like(store.tensors["w"].detach(), 3.0)

    def lazy() -> torch.Tensor:
        return lazy_tensor(tuple(values.shape), values.dtype, lambda: values.clone())

    store.step(w=2 * np.ones((2, 2)))
    expected = torch.full((2, 2), 2.0)
    torch.testing.assert_close((live * lazy()).detach(), expected * values)
    torch.testing.assert_close((lazy() * live).detach(), expected * values)
    with torch.no_grad():
        live.copy_(lazy())
    torch.testing.assert_close(live.detach(), values)


@torch.jit.script
def _half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class _Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_torchscript_gets_values_of_lazy_tensors() -> None:
    """It asks no class for them, and would read memory that is not there."""

    def seven() -> torch.Tensor:
        return lazy_tensor((), torch.float32, lambda: torch.tensor(7.0))

    assert _half(seven()) == 3.5
    assert torch.jit.script(_Twice())(seven()) == 14
    traced: Any = torch.jit.trace(lambda x: x + 1, torch.zeros(()))
    assert traced(seven()) == 8
