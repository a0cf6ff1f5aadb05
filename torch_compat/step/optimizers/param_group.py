"""A param group of a ``torch.optim`` optimizer, read cheaply every step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from xlatrain.step.optimizers.blocks import number
from xlatrain.step.optimizers.rule import UpdateRule

ParamGroup = dict[str, Any]


class UnsupportedOptimizerError(NotImplementedError):
    """An optimizer, or an option of one, that cannot run inside a compiled step. The text says what to use instead."""


class GroupReader:
    """The update rule, numbers and parameter names of one param group as they are now.

    :meth:`refresh` compares the group's options with those seen last and does nothing where they are equal. A tensor
    option (``lr=torch.tensor(1e-3)``, changed in place by schedulers) is compared by value.
    """

    def __init__(self, index: int, kind: type[UpdateRule], names: Mapping[torch.Tensor, str]) -> None:
        self.index = index
        self.rule: UpdateRule
        self.numbers: tuple[float, ...] = ()
        self.params: list[torch.Tensor] = []
        self.names: tuple[str, ...] = ()
        self._kind = kind
        self._name_of = names
        self._get: Callable[[ParamGroup], Any] | None = None
        self._seen: object = None

    def refresh(self, group: ParamGroup) -> bool:
        """Read the group's options; True where one of them changed.

        Raises:
            UnsupportedOptimizerError: an option that cannot run inside a compiled step.
        """
        if self._get is not None and self._get(group) == self._seen:
            return False
        refuse_differentiable(group, self.index)
        options = {key: frozen(group[key]) for key in self._kind.OPTIONS if key in group}
        self.rule = self._kind.from_options(options)
        self.numbers = tuple(self.rule.numbers(options))
        # "differentiable" is watched too, so that switching it on later is refused.
        watched = (*options, "differentiable") if "differentiable" in group else tuple(options)
        self._get = operator.itemgetter(*watched)
        self._seen = tuple(frozen(group[key]) for key in watched)
        return True

    def refresh_members(self, group: ParamGroup) -> bool:
        """Look up the names of the group's parameters; True where the membership changed.

        Raises:
            UnsupportedOptimizerError: a parameter that has no name.
        """
        params = group["params"]
        if len(params) == len(self.params) and all(map(operator.is_, params, self.params)):
            return False
        names = tuple(name_of(self._name_of, param, self.index, position) for position, param in enumerate(params))
        self.params, self.names = list(params), names
        return True

    def members(self) -> Iterator[tuple[torch.Tensor, str]]:
        """The group's parameters, each with its name."""
        return zip(self.params, self.names, strict=True)


def name_of(names: Mapping[torch.Tensor, str], param: torch.Tensor, index: int, position: int) -> str:
    """The name of the ``position``-th parameter of the ``index``-th group.

    Raises:
        UnsupportedOptimizerError: it has none.
    """
    if param not in names:
        raise UnsupportedOptimizerError(
            f"optimizer.param_groups[{index}]['params'][{position}] (shape {tuple(param.shape)}, {param.dtype}) is not a "
            "parameter of the module that is being trained, so the compiled step gives it no gradient; build the optimizer from "
            "the module's own parameters (self.parameters()), after any of them was replaced"
        )
    return names[param]


def refuse_differentiable(group: ParamGroup, index: int) -> None:
    """Refuse a param group that asks for autograd through the step.

    Raises:
        UnsupportedOptimizerError: ``differentiable=True``.
    """
    if group.get("differentiable"):
        raise UnsupportedOptimizerError(
            f"optimizer.param_groups[{index}]['differentiable'] is True: autograd through the optimizer's step needs the eager "
            "executor; leave differentiable=False, or set XLATRAIN_EXECUTOR=eager"
        )


def frozen(value: Any) -> Any:
    """``value`` as it is now: Python numbers in place of tensors, tuples and lists copied."""
    if isinstance(value, tuple | list):
        return type(value)(frozen(item) for item in value)
    return number(value) if isinstance(value, torch.Tensor) else value


def numbers_in(value: Any) -> list[float]:
    """The numbers of an option: of a number, or of a tuple or list of them; none for anything else."""
    values = value if isinstance(value, tuple | list) else [value]
    if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in values):
        return []
    return [float(item) for item in values]


class TracedOptions:
    """The options of the param groups of an optimizer whose Python is captured: which are inputs of its program.

    The learning rate is one; any other number becomes one when it first changes.

    Attributes:
        groups: the options of each group as they were read last.
        inputs: the names of those that are inputs where they are numbers.
        constant: whether none is: numbers are constants of the program.
    """

    def __init__(self) -> None:
        self.groups: list[ParamGroup] = []
        self.inputs = {"lr"}
        self.constant = False

    def read(self, groups: list[ParamGroup]) -> bool:
        """Read the options; True where one of them changed."""
        now = [{key: frozen(value) for key, value in group.items() if key != "params"} for group in groups]
        if now == self.groups:
            return False
        if not self.constant:
            for old, new in zip(self.groups, now, strict=False):
                self.inputs |= {key for key in new if numbers_in(old.get(key)) and numbers_in(new[key]) and old[key] != new[key]}
        self.groups = now
        return True

    def is_input(self, key: str, value: Any) -> bool:
        """Whether an option is an input of the program."""
        return not self.constant and key in self.inputs and bool(numbers_in(value))

    def numbers(self) -> list[float]:
        """The inputs, group by group."""
        return [
            number
            for one in self.groups
            for key, value in one.items()
            if self.is_input(key, value)
            for number in numbers_in(value)
        ]

    def fixed(self) -> Hashable:
        """All that is no input."""
        return tuple(
            tuple((key, hashable(value)) for key, value in one.items() if not self.is_input(key, value)) for one in self.groups
        )


def hashable(value: Any) -> Hashable:
    """A key for an option's value."""
    if isinstance(value, tuple | list):
        return tuple(hashable(item) for item in value)
    return value if isinstance(value, Hashable) else repr(value)
