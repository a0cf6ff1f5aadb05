"""Parameters that several modules share (``lightning.pytorch.utilities.parameter_tying``)."""

from __future__ import annotations

from torch import nn


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Groups of names that denote the same parameter, the first being the one that ``named_parameters()`` gives."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def set_shared_parameters(module: nn.Module, shared_params: list[list[str]]) -> nn.Module:
    """Ties each group of names, as :func:`find_shared_parameters` gave them, to the parameter of its first name."""
    for first, *others in shared_params:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)
    return module
