"""Checkpoints in the background. API: ``lightning.pytorch.plugins.io.AsyncCheckpointIO``."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.utils._pytree as pytree

from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.io.mesh_io import MeshCheckpointIO


class WrappingCheckpointIO(CheckpointIO):
    """A checkpoint plugin around another plugin.

    Args:
        checkpoint_io: the one inside; None: the strategy's own is put there when the Trainer takes the plugin.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = checkpoint_io

    def inner(self) -> CheckpointIO:
        """The plugin inside.

        Raises:
            RuntimeError: there is none yet.
        """
        if self.checkpoint_io is None:
            raise RuntimeError(f"{type(self).__name__} has no checkpoint_io inside yet: a Trainer gives it one")
        return self.checkpoint_io

    @property
    def collective(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner().collective

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.inner().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.inner().load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.inner().remove_checkpoint(*args, **kwargs)

    def teardown(self) -> None:
        self.inner().teardown()


class AsyncCheckpointIO(WrappingCheckpointIO):
    """Saves in a thread, one after the other; an error is raised by the next save, or at the end of the run.

    Around :class:`MeshCheckpointIO` (the default) no thread is needed: arrays leave the devices at once, and the commit
    happens in its own background.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        super().__init__(checkpoint_io)
        self._executor: ThreadPoolExecutor | None = None
        self._saves: list[Future[None]] = []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        inner = self.inner()
        if isinstance(inner, MeshCheckpointIO):
            inner.wait = False
            inner.save_checkpoint(*args, **kwargs)
            return
        self._raise_failures(wait=False)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="xlatrain-checkpoint")
        checkpoint, *rest = args if args else (kwargs.pop("checkpoint"),)
        # Training goes on while it is written.
        copied = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), checkpoint)
        self._saves.append(self._executor.submit(inner.save_checkpoint, copied, *rest, **kwargs))

    def remove_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self._executor is None:
            super().remove_checkpoint(*args, **kwargs)
        else:  # behind the save of the same path, which may still wait
            self._saves.append(self._executor.submit(super().remove_checkpoint, *args, **kwargs))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._raise_failures(wait=True)
        return super().load_checkpoint(*args, **kwargs)

    def teardown(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
        self._raise_failures(wait=True)
        super().teardown()

    def _raise_failures(self, *, wait: bool) -> None:
        done = [save for save in self._saves if wait or save.done()]
        self._saves = [save for save in self._saves if save not in done]
        for save in done:
            save.result()
