"""``torch.load`` of a checkpoint directory, for scripts that read ``best_model_path`` themselves."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import IO, Any

import fsspec
import torch

from torch_compat.checkpoint import host_state
from torch_compat.checkpoint.checkpoint_dict import load_checkpoint_dict
from torch_compat.utilities.types import _PATH
from xlatrain.checkpoint import is_checkpoint_directory, wait_for_save


def patch_torch_load() -> None:
    """Make ``torch.load`` accept our checkpoint directories too; everything else goes to PyTorch unchanged. Idempotent."""
    if not hasattr(torch.load, "_reads_directories"):
        torch.load = _reading_directories(torch.load)


def unpatch_torch_load() -> None:
    """Undo :func:`patch_torch_load`, if nobody else has replaced ``torch.load`` since."""
    torch.load = getattr(torch.load, "_reads_directories", torch.load)


def _load(path_or_url: IO[bytes] | _PATH, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Load a file that ``torch.save`` wrote, or a checkpoint directory of ours.

    Args:
        path_or_url: a path, a URL that fsspec opens, or an open binary file.
        map_location: as for ``torch.load``.
        weights_only: False unpickles: only for files that you trust. None is torch's default: True.

    Raises:
        FileNotFoundError: there is nothing.
        pickle.UnpicklingError: the safe loader cannot read it.
    """
    if not isinstance(path_or_url, (str, os.PathLike)):
        return torch.load(path_or_url, map_location=map_location, weights_only=weights_only)
    if is_checkpoint_directory(path_or_url):
        patch_torch_load()
        return torch.load(path_or_url, map_location=map_location, weights_only=weights_only)
    with fsspec.open(os.fspath(path_or_url), "rb") as file:
        return torch.load(file, map_location=map_location, weights_only=weights_only)  # pyright: ignore[reportArgumentType]


def _reading_directories(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def torch_load(
        f: Any,
        map_location: Any = None,
        pickle_module: Any = None,
        *,
        weights_only: bool | None = None,
        mmap: Any = None,
        **rest: Any,
    ) -> Any:
        if isinstance(f, (str, os.PathLike)):
            wait_for_save(f)  # a file that is being written
        if not (isinstance(f, (str, os.PathLike)) and is_checkpoint_directory(f)):
            return load(f, map_location, pickle_module, weights_only=weights_only, mmap=mmap, **rest)
        if pickle_module is not None or rest:
            given = ["pickle_module"] * (pickle_module is not None) + list(rest)
            raise TypeError(
                f"torch.load({os.fspath(f)!r}): {', '.join(given)} cannot be used with a sharded checkpoint "
                "directory; leave it out"
            )
        state = load_checkpoint_dict(f, weights_only, lazy=bool(mmap))
        return _mapped(state, map_location)

    torch_load._reads_directories = load  # pyright: ignore[reportAttributeAccessIssue]
    return torch_load


def _mapped(state: Any, map_location: Any) -> Any:
    """``map_location`` as for a file whose tensors were saved from the CPU."""
    target = map_location.get("cpu") if isinstance(map_location, dict) else map_location
    if target is None or callable(target) or torch.device(target).type == "cpu":
        return state

    def match(node: Any) -> torch.Tensor | None:
        return node if isinstance(node, torch.Tensor) else None

    return host_state.replace_leaves(state, match, lambda tensor, _: tensor.to(target))
