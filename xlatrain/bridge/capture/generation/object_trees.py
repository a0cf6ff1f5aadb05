"""Tensors in nested containers and in the library's objects: caches, their layers, logits processors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_OF_TENSORS = ("transformers.cache_utils", "transformers.generation.logits_process")
"""Modules whose objects are looked into."""


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors, in the order in which :func:`with_tensors` takes others; an object that is there twice counts once."""
    return [leaf for leaf in _leaves(tree, set()) if isinstance(leaf, torch.Tensor)]


def with_tensors(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """A copy with other tensors: nothing that is done to it changes the first."""
    return _rebuilt(tree, tensors, {})


def outline(tree: Any) -> list[Any]:
    """Everything but the tensors' values, to see whether that is the same in two trees."""
    return [
        (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf if isinstance(leaf, _PLAIN) else type(leaf)
        for leaf in _leaves(tree, set())
    ]


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def _leaves(tree: Any, seen: set[int]) -> Iterator[Any]:
    children = _children(tree)
    if children is None:
        yield tree
    elif id(tree) not in seen:
        seen.add(id(tree))
        yield type(tree)
        for key, child in children.items():
            yield key
            yield from _leaves(child, seen)


def _children(tree: Any) -> dict[Any, Any] | None:
    """Contents of a container or of one of the library's objects; None for a leaf."""
    if isinstance(tree, dict):
        return tree
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    return vars(tree) if type(tree).__module__ in _OF_TENSORS and not isinstance(tree, type) else None


def _rebuilt(tree: Any, tensors: Iterator[torch.Tensor], made: dict[int, Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return next(tensors)
    children = _children(tree)
    if children is None:
        return tree
    if id(tree) in made:
        return made[id(tree)]

    def rebuild(child: Any) -> Any:
        return _rebuilt(child, tensors, made)

    made[id(tree)] = copy = _copied(tree, children, rebuild)
    return copy


def _copied(tree: Any, children: dict[Any, Any], rebuild: Callable[[Any], Any]) -> Any:
    if type(tree) is dict:
        return {key: rebuild(child) for key, child in children.items()}
    if isinstance(tree, dict):  # the output of a model
        return type(tree)(**{key: rebuild(child) for key, child in children.items()})
    if type(tree) in (list, tuple):
        return type(tree)(rebuild(child) for child in tree)
    if isinstance(tree, list | tuple):
        raise TypeError(f"a {type(tree).__name__} is not a list of the library's")
    copy = object.__new__(type(tree))
    vars(copy).update({key: rebuild(child) for key, child in children.items()})
    return copy
