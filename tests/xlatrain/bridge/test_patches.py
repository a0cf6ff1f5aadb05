"""Patched names are as they were afterwards: own, inherited, or found by ``__getattr__``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.patches import patched


class Base:
    def method(self) -> str:
        return "base"

    @classmethod
    def made(cls) -> str:
        return cls.__name__


class Child(Base):
    own = 1


def test_own_and_inherited_attributes() -> None:
    child, before = Child(), dict(vars(Child))
    with patched([(Child, "method", lambda self: "patched"), (Child, "own", 2), (child, "method", lambda: "one")]):
        assert (Child().method(), child.method(), Child.own) == ("patched", "one", 2)
    assert dict(vars(Child)) == before
    assert vars(child) == {}
    assert child.method() == "base"


def test_a_class_method_is_bound_to_the_class_that_is_asked() -> None:
    with patched([(Base, "made", classmethod(lambda cls: "patched"))]):
        assert Child.made() == "patched"
    assert Child.made() == "Child"


def test_the_name_of_a_class() -> None:
    with patched([(Child, "__name__", "Other"), (Child, "__module__", "elsewhere")]):
        assert repr(Child).endswith("elsewhere.Child'>") and Child.__name__ == "Other"
    assert (Child.__name__, Child.__module__) == ("Child", __name__)


def test_what_a_module_looks_up_on_demand() -> None:
    assert "lstm" not in vars(torch._VF)
    with patched([(torch._VF, "lstm", print)]):
        assert torch._VF.lstm is print
    assert "lstm" not in vars(torch._VF)


def test_a_patch_that_fails_takes_the_others_back() -> None:
    def patches() -> Iterator[tuple[Any, str, Any]]:
        yield Child, "own", 2
        yield int, "real", None

    with pytest.raises(TypeError, match="immutable"), patched(patches()):
        pass
    assert Child.own == 1


@pytest.mark.parametrize(
    ("owner", "text"),
    [
        (torch.compiler, r"torch\.compiler has no attribute 'gone'.*torch \S+ is installed"),
        (torch.nn.Linear, r"torch\.nn\.modules\.linear\.Linear has no attribute 'gone'"),
        (Child(), r"Child has no attribute 'gone'.*doctor"),
    ],
    ids=["module", "class", "object"],
)
def test_a_name_that_is_not_there_is_refused(owner: Any, text: str) -> None:
    before = dict(vars(Child))
    with pytest.raises(AttributeError, match=text), patched([(Child, "own", 2), (owner, "gone", 1)]):
        pass
    assert not hasattr(owner, "gone") and vars(Child) == before


def test_a_capture_leaves_nothing_on_torchs_classes() -> None:
    kinds = (torch.Tensor, torch.autograd.graph.save_on_cpu, torch.nn.Module, torch.distributions.Distribution, LRScheduler)
    before = [dict(vars(kind)) for kind in kinds]
    capture(lambda x: x.cos().sum(), torch.ones(3))
    assert [dict(vars(kind)) for kind in kinds] == before


def test_a_list_of_tensors_is_a_tensor_during_and_after_a_patch_of_their_entries() -> None:
    class Given(torch.Tensor):
        def __getitem__(self, index: Any) -> Any:
            return index

    def numbers(*kinds: type[torch.Tensor]) -> list[torch.Tensor]:
        return [
            torch.tensor(3),
            torch.nn.Parameter(torch.tensor(1.0), requires_grad=False),
            *(torch.tensor(5).as_subclass(one) for one in kinds),
        ]

    take = torch.Tensor.__getitem__
    with patched([(torch.Tensor, "__getitem__", lambda x, index: take(x, index) + 1)]):
        with patched([(torch.Tensor, "__getitem__", lambda x, index: take(x, index) + 2)]):
            assert torch.ones(3)[1] == 3
        assert torch.ones(3)[1] == 2

        class Inheriting(torch.Tensor):
            pass

        assert torch.tensor(numbers()).tolist() == [3, 1]
    assert torch.tensor(numbers(Inheriting)).tolist() == [3, 1, 5]
    assert torch.ones(3)[1] == 1 and torch.ones(3).as_subclass(Given)[1] == 1
    assert [entry.tolist() for entry in torch.ones(2).as_subclass(Inheriting)] == [1, 1]
