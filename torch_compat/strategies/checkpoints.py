"""The part of a strategy that deals with checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import torch
import torch.utils._pytree as pytree

from torch_compat.checkpoint.checkpoint_dict import raising_damage
from torch_compat.checkpoint.markers import split
from torch_compat.core.saving import weights_of
from torch_compat.plugins.io.async_plugin import WrappingCheckpointIO
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.io.mesh_io import MeshCheckpointIO
from torch_compat.utilities.host_arrays import to_torch
from xlatrain import checkpoint as sharded

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.step.mesh_run import MeshRun
    from torch_compat.step.model_state import ModelState


class StrategyCheckpoints:
    """Saving, loading and removing through a :class:`CheckpointIO`.

    Attributes:
        pending_save: of a checkpoint that is being committed in the background; None where none of ours is.
    """

    _mesh_run: MeshRun

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self._checkpoint_io = checkpoint_io
        self._default_io = MeshCheckpointIO()
        self.pending_save: sharded.PendingSave | None = None
        self._commits_in_background = False

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin by which checkpoints reach storage: one file, or a directory of shards, unless a plugin was given."""
        io = self._checkpoint_io
        if isinstance(io, WrappingCheckpointIO) and io.checkpoint_io is None:
            io.checkpoint_io = self._default_io
        return self._default_io if io is None else io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO | None) -> None:
        self._checkpoint_io = checkpoint_io

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint dict; every process calls it; returns when committed (but see :meth:`commits_in_background`)."""
        io = self.checkpoint_io
        if (placed := self._mesh_run.placed) is not None:
            placed.push_values()  # a hook may have changed weights since the last step
        if self._mesh_run.device.type != "cpu":  # a checkpoint of a GPU is read where there is none
            checkpoint = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, checkpoint)
        if io.collective:
            plugin = innermost(io)
            if isinstance(plugin, MeshCheckpointIO):
                plugin.array_of, plugin.wait = self._array_of, not self._commits_in_background
            io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            self.pending_save = plugin.pending if isinstance(plugin, MeshCheckpointIO) else None
            return
        plain = self._plain(checkpoint)  # every process: shards may lie anywhere
        if self.is_global_zero:  # pyright: ignore[reportAttributeAccessIssue]
            if storage_options is None and not _takes(io, "save_checkpoint", "storage_options"):
                io.save_checkpoint(plain, filepath)
            else:
                io.save_checkpoint(plain, filepath, storage_options=storage_options)
        self.barrier(f"saved {filepath}")  # pyright: ignore[reportAttributeAccessIssue]

    def split(self, checkpoint: Mapping[str, Any]) -> tuple[dict[str, jax.Array], Any]:
        """The arrays in a checkpoint dict by name, as they are on the mesh, and the dict with markers in their place."""
        if (placed := self._mesh_run.placed) is not None:
            placed.push_values()  # a hook may have changed weights since the last step
        return split(checkpoint, self._array_of)

    @contextmanager
    def commits_in_background(self) -> Iterator[None]:
        """Let :meth:`save_checkpoint` return when the arrays are off the devices; ``pending_save`` tells of the commit.

        ``pending_save`` stays None where a subclass or a plugin saves in its own way.
        """
        self.pending_save = None
        self._commits_in_background = True
        try:
            yield
        finally:
            self._commits_in_background = False

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint dict (a directory of ours, or a stock ``.ckpt`` file), on every process."""
        io = self.checkpoint_io
        if weights_only is None and not _takes(io, "load_checkpoint", "weights_only"):
            return io.load_checkpoint(checkpoint_path)
        return io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint (process 0)."""
        if self.is_global_zero:  # pyright: ignore[reportAttributeAccessIssue]
            self.checkpoint_io.remove_checkpoint(filepath)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's ``state_dict()``: global shapes; what is on the mesh is read when somebody uses it."""
        return self._module().state_dict(keep_vars=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give the module the weights of a checkpoint dict; before parameters are placed."""
        with raising_damage():
            self._module().load_state_dict(weights_of(checkpoint), strict=strict)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's ``state_dict()``, with the state that is on the mesh."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        executor = self._mesh_run.executor
        return optimizer.state_dict() if executor is None else executor.optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the optimizers the state of a checkpoint dict, on the mesh; after parameters were placed.

        Raises:
            RuntimeError: no fit is on.
        """
        if self._mesh_run.executor is None:
            raise RuntimeError("optimizers get the state of a checkpoint only while a fit is set up")
        self._mesh_run.executor.load_optimizer_states(checkpoint["optimizer_states"])

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are restored after :meth:`setup` rather than before."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether the loop restores the optimizers' state; False: the strategy does it itself."""
        return True

    def _module(self) -> LightningModule:
        module = self.lightning_module  # pyright: ignore[reportAttributeAccessIssue]
        if module is None:
            raise RuntimeError(f"{type(self).__name__} has no module: it gets one when a run begins")
        return module

    def _array_of(self, tensor: torch.Tensor) -> jax.Array | None:
        """The array behind a live parameter or buffer."""
        placed: ModelState | None = self._mesh_run.placed
        name = None if placed is None else placed.name_of(tensor)
        return None if placed is None or name is None else placed.array(name)

    def _plain(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """The dict with plain CPU tensors, as stock's: for plugins that write it themselves. Collective."""

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, jax.Array):
                return to_torch(leaf)
            array = self._array_of(leaf)
            return leaf.detach().cpu().clone() if array is None else to_torch(array, leaf.dtype)

        return pytree.tree_map_only((torch.Tensor, jax.Array), plain, dict(checkpoint))


def innermost(io: CheckpointIO) -> CheckpointIO:
    """The plugin that reads and writes, inside of those that wrap it."""
    while isinstance(io, WrappingCheckpointIO):
        io = io.inner()
    return io


def _takes(io: CheckpointIO, method: str, argument: str) -> bool:
    """Whether a plugin's method takes an argument that plugins of earlier releases do not know."""
    parameters = inspect.signature(getattr(innermost(io), method)).parameters.values()
    return any(parameter.name == argument or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
