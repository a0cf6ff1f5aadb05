"""Dicts of modules, optimizers and other state, to and from checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from torch_compat.utilities.types import _Stateful


def plain_states(
    state: Mapping[str, Any],
    of_module: Callable[[Module], Any],
    of_optimizer: Callable[[Optimizer], Any],
    filters: Mapping[str, Callable[[str, Any], bool]],
) -> dict[str, Any]:
    """``state`` with state dicts in place of modules, optimizers and whatever else has them, filtered.

    Raises:
        TypeError: a filter that cannot be called.
        ValueError: filters for keys that ``state`` does not have.
    """
    if unknown := sorted(set(filters) - set(state)):
        raise ValueError(f"filter has the keys {unknown}, which the state does not have; it has {sorted(state)}")
    for key, chosen in filters.items():
        if not callable(chosen):
            raise TypeError(f"filter[{key!r}] is {chosen!r}; expected a function (name, value) -> bool")
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Module):
            value = of_module(value)
        elif isinstance(value, Optimizer):
            value = of_optimizer(value)
        elif isinstance(value, _Stateful):  # a scheduler, a loader that can be resumed
            value = value.state_dict()
        apply_filter(key, filters, value, plain)
    return plain


def apply_filter(
    key: str, filter: Mapping[str, Callable[[str, Any], bool]], source_dict: object, target_dict: dict[str, Any]
) -> None:
    """Put ``source_dict`` into ``target_dict[key]``; of a dict the entries that the key's filter wants."""
    if key not in filter or not isinstance(source_dict, dict):
        target_dict[key] = source_dict
    elif chosen := {name: one for name, one in source_dict.items() if filter[key](name, one)}:
        target_dict[key] = chosen


def validate_keys_for_strict_loading(requested_keys: Iterable[str], checkpoint_keys: Iterable[str], strict: bool) -> None:
    """Check that a checkpoint has what is asked for.

    Raises:
        KeyError: lists the keys that it does not have (``strict``).
    """
    missing = [key for key in requested_keys if key not in checkpoint_keys]
    if missing and strict:
        raise KeyError(
            f"The requested state contains a key '{missing[0]}' that does not exist in the loaded checkpoint: of "
            f"{sorted(checkpoint_keys)}, {', '.join(map(repr, missing))} is missing. Set strict=False to go on"
        )


def restore_states(
    checkpoint: dict[str, Any],
    state: Module | Optimizer | Mapping[str, Any] | None,
    into_module: Callable[..., None],
    strict: bool,
    into_optimizer: Callable[[Optimizer, Any], None],
) -> dict[str, Any]:
    """Restore ``state`` in place; gives what is left of the checkpoint.

    Raises:
        KeyError: lists the keys that the checkpoint does not have (``strict``).
    """
    if state is None or (isinstance(state, dict) and not state):
        return checkpoint
    if isinstance(state, Module):
        into_module(state, checkpoint, strict=strict)
        return {}
    if isinstance(state, Optimizer):
        into_optimizer(state, checkpoint)
        return {}
    validate_keys_for_strict_loading(state.keys(), checkpoint.keys(), strict)
    left = dict(checkpoint)
    restored: Any = state
    for key, value in state.items():
        if key not in checkpoint:
            continue
        saved = left.pop(key)
        if isinstance(value, Module):
            into_module(value, saved, strict=strict)
        elif isinstance(value, Optimizer):
            into_optimizer(value, saved)
        elif isinstance(value, _Stateful) and isinstance(saved, Mapping):  # else saved before, as the object itself
            value.load_state_dict(saved)  # pyright: ignore[reportArgumentType]
        else:
            restored[key] = saved
    return left
