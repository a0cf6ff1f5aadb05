"""Checkpoints of a loop in the user's hands. API: ``lightning.fabric.Fabric`` 2.6."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from torch_compat.fabric.world import World
from torch_compat.fabric.wrappers import is_wrapped, unwrap, unwrap_all


class Checkpoints(World):
    """The part of Fabric that saves and loads."""

    def save(self, path: str | Path, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None = None) -> None:
        """Writes modules, optimizers and anything else that can be pickled; every process calls it; returns when committed.

        ::

            fabric.save("run.ckpt", {"model": model, "optimizer": optimizer, "step": 3})

        Args:
            path: of the checkpoint: a file, or a directory where parameters are split over devices.
            state: of modules and optimizers the ``state_dict()`` is saved, shard by shard; of all else that has
                ``state_dict`` and ``load_state_dict`` (a scheduler) as well.
            filter: key of ``state`` → ``(name, value) -> bool``, whether that entry of its state dict is saved.

        Raises:
            TypeError: a filter that is no dict of functions.
            ValueError: filters for keys that ``state`` does not have.
        """
        self._check_launched()
        if filter is not None:
            if not isinstance(filter, dict):
                raise TypeError(f"Filter should be a dictionary, given {filter!r}: names to functions")
            if not set(filter).issubset(state):
                raise ValueError(f"The filter keys {set(filter) - set(state)} are not present in the state keys {set(state)}.")
            for key, chosen in filter.items():
                if not callable(chosen):
                    raise TypeError(f"Expected `fabric.save(filter=...)` for key {key!r} to be a callable, given {chosen!r}")
        self._strategy.save_checkpoint(path=path, state=unwrap_all(state), filter=filter)
        self.barrier("saved")

    def load(
        self,
        path: str | Path,
        state: dict[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads a checkpoint into ``state``, in place: onto any mesh, whatever mesh saved it.

        ::

            fabric.save("run.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
            rest = fabric.load("run.ckpt", {"model": model, "optimizer": optimizer})
            assert rest == {"step": 3}

        Args:
            path: what :meth:`save` was given, here or under stock Fabric.
            state: what is restored; None: nothing.
            strict: whether every key of ``state`` must be there, and names of modules must match.
            weights_only: False unpickles: only for checkpoints that you trust.

        Returns:
            What was not restored; without ``state`` all of it.
        """
        self._check_launched()
        plain = unwrap_all(state)
        with self._strategy.reading(weights_only):
            left = self._strategy.load_checkpoint(path=path, state=plain, strict=strict)
        self.barrier("loaded")
        for key in plain or ():
            if state is not None and not is_wrapped(state[key]):
                state[key] = plain[key]
        return left

    def load_raw(
        self, path: str | Path, obj: Module | Optimizer, strict: bool = True, *, weights_only: bool | None = None
    ) -> None:
        """Reads a checkpoint that is the state dict of one module or optimizer.

        Args: as :meth:`load`.
        """
        self._check_launched()
        with self._strategy.reading(weights_only):
            self._strategy.load_checkpoint(path=path, state=unwrap(obj), strict=strict)
