"""``save_hyperparameters`` and ``hparams``."""

from __future__ import annotations

import copy
import warnings
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.hparams import AttributeDict
from torch_compat.core.module import LightningModule
from torch_compat.trainer import Trainer
from torch_compat.trainer.run import attach


class Parent(LightningModule):
    def __init__(self, width: int = 1, depth: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()


class Child(Parent):
    def __init__(self, depth: int = 5, *args: Any, rate: float = 0.1, **kwargs: Any) -> None:
        super().__init__(width=3, depth=depth + 1)


def test_all_arguments_of_all_constructors_with_the_outermost_winning() -> None:
    module = Child(7, "positional", rate=0.5, extra="x")
    assert module.hparams == {"width": 3, "depth": 7, "rate": 0.5, "extra": "x"}
    assert module._hparams_name == "kwargs"


def test_arguments_have_the_values_that_their_names_hold_at_the_call() -> None:
    class Module(LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            width = width * 2
            self.save_hyperparameters()

    assert Module(2).hparams == {"width": 4}


def test_a_module_under_construction_inside_another_has_that_ones_arguments_too() -> None:
    class Outer(LightningModule):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.inner = Parent(width=8)
            self.save_hyperparameters()

    outer = Outer("o")
    assert outer.hparams == {"name": "o"}
    assert outer.inner.hparams == {"width": 8, "depth": 2, "name": "o"}  # as in stock


def test_a_subclass_takes_out_what_its_base_saved() -> None:
    class Sub(Parent):
        def __init__(self, width: int = 1, extra: int = 3) -> None:
            super().__init__(width)
            self.save_hyperparameters(ignore="width")

    assert Sub().hparams == {"depth": 2, "extra": 3}


def test_fields_that_the_constructor_does_not_take_are_left_out() -> None:
    @dataclass
    class Data(LightningDataModule):
        width: int = 1
        derived: int = field(default=4, init=False)

        def __post_init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()

    assert Data(3).hparams == {"width": 3}


def test_an_empty_container_saves_nothing() -> None:
    module = LightningModule()
    module.save_hyperparameters({})
    assert module.hparams == {} and not hasattr(module, "_hparams_name")


def test_what_cannot_be_pickled_is_removed_when_a_run_begins() -> None:
    class Module(LightningModule):
        def __init__(self, function: Any, width: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()

    trainer, module = Trainer(logger=False, enable_checkpointing=False), Module(lambda: 1)
    with pytest.warns(UserWarning, match="Attribute 'function' removed from hparams because it cannot be pickled"):
        attach(trainer, module, None)
    assert module.hparams == {"width": 1} and list(module.hparams_initial) == ["function", "width"]


def test_saving_from_a_helper_method() -> None:
    class Module(LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.remember()

        def remember(self) -> None:
            self.save_hyperparameters()

    assert Module(2).hparams == {"width": 2}


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, {"a": 1, "b": 2, "c": 3}),
        (("a", "c"), {}, {"a": 1, "c": 3}),
        ((), {"ignore": "b"}, {"a": 1, "c": 3}),
        ((), {"ignore": ["a", "b"]}, {"c": 3}),
        (("a", "b"), {"ignore": "a"}, {"b": 2}),
    ],
)
def test_choice_of_names(args: tuple[str, ...], kwargs: dict[str, Any], expected: dict[str, int]) -> None:
    class Module(LightningModule):
        def __init__(self, a: int, b: int, *, c: int) -> None:
            super().__init__()
            self.save_hyperparameters(*args, **kwargs)

    assert Module(1, 2, c=3).hparams == expected


def test_a_name_that_is_no_argument() -> None:
    class Module(LightningModule):
        def __init__(self, rate: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters("learning_rate")

    with pytest.raises(KeyError, match=r"'learning_rate' is not an argument of `__init__`.*expected one of \['rate'\]"):
        Module()


class TakesConfiguration(LightningModule):
    def __init__(self, config: Any, other: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters(config)


@pytest.mark.parametrize("config", [{"width": 3}, Namespace(width=3), AttributeDict(width=3)])
def test_one_object_that_is_the_hyperparameters(config: Any) -> None:
    module = TakesConfiguration(config)
    assert module.hparams == {"width": 3}
    assert module.hparams.width == 3
    assert module._hparams_name == "config"


@pytest.mark.parametrize(
    ("config", "message"),
    [(5, "Primitives .* are not allowed"), (["x", 1], "Unsupported config type of <class 'list'>")],
)
def test_an_object_that_is_no_mapping(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TakesConfiguration(config)


def test_calls_add_up() -> None:
    class Module(LightningModule):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.save_hyperparameters("a")
            self.save_hyperparameters({"b": b}, logger=False)

    module = Module(1, 2)
    assert module.hparams == {"a": 1, "b": 2}
    assert not module._log_hyperparams


def test_a_dataclass() -> None:
    @dataclass
    class Data(LightningDataModule):
        root: str
        batch_size: int = 4

        def __post_init__(self) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="root")

    assert Data("x").hparams == {"batch_size": 4}


def test_changes_reach_hparams_and_not_hparams_initial() -> None:
    module = Parent(width=2)
    module.hparams.width = 9
    module.hparams["added"] = 1
    assert module.hparams == {"width": 9, "depth": 2, "added": 1}
    assert module.hparams_initial == {"width": 2, "depth": 2}
    module.hparams_initial["width"] = 100
    assert module.hparams_initial["width"] == 2


def test_a_module_as_hyperparameter_is_warned_of() -> None:
    class Module(LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.save_hyperparameters()

    with pytest.warns(UserWarning, match="Attribute 'net' is an instance of `nn.Module`.*ignore"):
        Module(nn.Linear(1, 1))


def test_without_a_call_there_are_none() -> None:
    module = LightningModule()
    assert module.hparams == {}
    assert module.hparams_initial == {}
    assert not module._log_hyperparams


def test_names_to_ignore_must_be_names() -> None:
    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=3)

    with pytest.raises(TypeError, match="expects a name or a list of names, found 3"):
        Module()


class TestAttributeDict:
    def test_keys_are_attributes(self) -> None:
        mapping = AttributeDict(one=1)
        mapping.two = 2
        del mapping.one
        assert mapping == {"two": 2}
        assert mapping.two == 2

    def test_errors(self) -> None:
        mapping = AttributeDict()
        with pytest.raises(AttributeError, match="'AttributeDict' object has no attribute 'one'"):
            _ = mapping.one
        with pytest.raises(KeyError, match="one"):
            del mapping.one

    def test_repr_is_a_sorted_table(self) -> None:
        assert repr(AttributeDict(long_name="s", x=1)) == '"long_name": s\n"x":         1'
        assert repr(AttributeDict()) == ""

    def test_copies(self) -> None:
        mapping = AttributeDict(nested={"a": [1]})
        other = copy.deepcopy(mapping)
        other.nested["a"].append(2)
        assert mapping.nested == {"a": [1]}
        assert isinstance(other, AttributeDict)


def test_nothing_is_warned_of_in_the_plain_case() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Child()
