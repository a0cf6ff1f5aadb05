"""The modules that an ``activation_checkpointing_policy`` means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from torch_compat.utilities.rank_zero import rank_zero_warn


def modules_of_policy(root: torch.nn.Module, policy: Any) -> list[torch.nn.Module]:
    """The modules below ``root`` that a policy names; of nested modules the outermost.

    Args:
        policy: module classes, or what torch's FSDP takes as ``auto_wrap_policy``: a function
            ``(module, recurse, nonwrapped_numel) -> bool``, or an object of a policy class of
            ``torch.distributed.fsdp.wrap``.
    """
    chosen = {id(module) for module in _chosen(root, policy)}
    found: dict[str, torch.nn.Module] = {}
    for path, module in root.named_modules():
        if path and id(module) in chosen and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    if not found:
        rank_zero_warn(f"The activation checkpointing policy matches no module of {type(root).__name__}: nothing is recomputed")
    return list(found.values())


def globs(argument: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Globs over module paths.

    Raises:
        ValueError: a single text, or something else than texts.
    """
    if isinstance(patterns, str):
        raise ValueError(f"{argument}={patterns!r}; expected a list of globs: [{patterns!r}]")
    found = tuple(patterns) if isinstance(patterns, Iterable) else (patterns,)
    if any(not isinstance(pattern, str) for pattern in found):
        raise ValueError(f"{argument}={patterns!r}; expected a list of globs over module paths, e.g. ['layers.*']")
    return found


def _chosen(root: torch.nn.Module, policy: Any) -> Iterable[torch.nn.Module]:
    if hasattr(policy, "_run_policy"):  # a policy object of torch
        return policy._run_policy(root, ignored_modules=set(), root_kwargs={})
    if callable(policy):
        found: list[torch.nn.Module] = []
        _ask(root, cast(Any, policy), found)
        return found
    classes = tuple(policy)
    return [module for module in root.modules() if isinstance(module, classes)]


def _ask(module: torch.nn.Module, policy: Callable[..., bool], found: list[torch.nn.Module]) -> int:
    """Ask the policy like torch: first whether to look inside, then, with what is left, whether the module itself is meant.

    Returns:
        Elements of the parameters inside that are taken.
    """
    size = sum(param.numel() for param in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=size):
        return 0
    taken = 0
    for child in module.children():
        taken += _ask(child, policy, found)
    if not policy(module=module, recurse=False, nonwrapped_numel=size - taken):
        return taken
    found.append(module)
    return size
