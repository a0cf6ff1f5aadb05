"""Which host values select a variant of a captured step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_compat.step.guards.attribute_guards import AttributeGuards


class Settings(torch.nn.Module):
    """Attributes of the kinds that a step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.child = torch.nn.Linear(1, 1)
        self.number = 1.0
        self.unread = 1.0
        self.options = {"alpha": 1.0, "deep": {"delta": [1.0]}}
        self.kept: list[Any] = []
        self.plain = SimpleNamespace(gamma=1.0)
        self.tensor = torch.ones(2)


def read(module: Settings) -> None:
    assert module.number and module.options["deep"]["delta"] and module.plain.gamma
    assert module.tensor is not None and module.child.training is not None


CHANGES: dict[str, Callable[[Settings], Any]] = {
    "number": lambda m: setattr(m, "number", 2.0),
    "item": lambda m: m.options.update(alpha=2.0),
    "nested item": lambda m: m.options["deep"]["delta"].append(2.0),
    "plain object": lambda m: setattr(m.plain, "gamma", 2.0),
    "another tensor": lambda m: setattr(m, "tensor", torch.ones(2)),
    "mode of a child": lambda m: m.child.eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_what_was_read_is_seen(change: Callable[[Settings], Any]) -> None:
    module = Settings()
    guards = AttributeGuards(module)
    with guards.following():
        with guards.capturing("step"):
            read(module)
        before = guards.key("step")
        assert guards.key("step") == before
        change(module)
        assert guards.key("step") != before


def test_what_was_not_read_does_not_matter() -> None:
    module = Settings()
    guards = AttributeGuards(module)
    with guards.following():
        with guards.capturing("step"):
            read(module)
        before = guards.key("step")
        module.unread = 2.0
        module.kept.append(1)
        assert guards.key("step") == before


def test_what_is_read_from_the_class_is_as_it_was_and_what_is_written_past_setattr_is_not() -> None:
    class OfTheClass(Settings):
        weight = 0.5

    module = OfTheClass()
    guards = AttributeGuards(module)
    with guards.following():
        with guards.capturing("step"):
            assert module.weight and module.number
        before = guards.key("step")
        guards.refresh("step")
        assert guards.key("step") == before
        module.__dict__["number"] = 2.0
        guards.refresh("step")
        assert guards.key("step") != before


def test_a_value_that_comes_back_selects_the_same_variant() -> None:
    module = Settings()
    guards = AttributeGuards(module)
    with guards.following():
        with guards.capturing("step"):
            read(module)
        module.number = 2.0
        second = guards.key("step")
        module.number = 3.0
        assert guards.key("step") != second
        module.number = 2.0
        assert guards.key("step") == second


def test_what_a_step_writes_before_it_reads_is_not_an_input() -> None:
    module = Settings()
    guards = AttributeGuards(module)
    with guards.following(), guards.capturing("step"):
        module.number = 5.0
        assert module.number == 5.0
        assert module.unread == 1.0
    assert guards.reads_before("step", [("", "number"), ("", "unread")]) == ["self.unread"]


def test_attributes_of_callbacks_are_compared() -> None:
    class Callback:
        def __init__(self) -> None:
            self.weight = 1.0

    module, callback = Settings(), Callback()
    guards = AttributeGuards(module, {"self": module, "trainer.callbacks[0]": callback})
    with guards.following():
        with guards.capturing("step"):
            assert callback.weight == 1.0
        before = guards.key("step")
        callback.weight = 2.0
        guards.refresh("step")
        changed = guards.key("step")
        assert changed != before
        callback.weight = 1.0
        guards.refresh("step")
        first = guards.key("step")
    another = Callback()
    another.weight = 2.0
    guards.begin_run({"self": module, "trainer.callbacks[0]": another})
    assert first != guards.key("step") == changed
    assert "__getattribute__" not in vars(Callback)


def test_nothing_stays_patched() -> None:
    setter = torch.nn.Module.__setattr__
    guards = AttributeGuards(Settings())
    with pytest.raises(KeyError), guards.following(), guards.capturing("step"):
        raise KeyError
    assert torch.nn.Module.__setattr__ is setter
    assert "__getattribute__" not in vars(torch.nn.Module)
