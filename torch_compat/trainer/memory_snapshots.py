"""Snapshots of a fit in the memory of its hosts, where ``xlatrain launch --elastic … --memory-steps N`` has started it.

A snapshot is a checkpoint that is in no storage: the same dict, taken at the boundary of a batch or an epoch, at which a
preempted run saves, too. It is taken every N/2 steps, and the next one waits until it is complete, so that never more than N
steps are lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_compat.checkpoint import host_state
from torch_compat.plugins.io.mesh_io import MeshCheckpointIO
from torch_compat.strategies.checkpoints import innermost
from torch_compat.trainer import state_io
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.checkpoint.snapshots import Snapshots
from xlatrain.cluster.keepers import VARIABLE, NeighbourMemory

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


class MemorySnapshots:
    """The snapshots of one fit.

    Args:
        trainer: about to train.
        memory: what the launcher said.
    """

    def __init__(self, trainer: Trainer, memory: NeighbourMemory) -> None:
        self._trainer = trainer
        self._every = max(1, memory.steps // 2)
        self._waits = memory.steps == 1
        self._snapshots = Snapshots(memory, trainer._fit_number)
        self._step = trainer.global_step
        self._told = ""
        if len(memory.keepers) < 2:
            self._warn("this host has no neighbour now: a snapshot is in one place only")

    def take_if_due(self) -> None:
        """Called by every process at each boundary."""
        trainer = self._trainer
        if trainer.global_step - self._step < self._every:
            return
        self._step = trainer.global_step
        with trainer.run_time.account.span("save"):
            arrays, host = trainer.strategy.split(state_io.dump(trainer))
            self._snapshots.wait()
            self._report()
            self._snapshots.take(arrays, lambda: host_state.dump(host), self._step)
            if self._waits:
                self.finish()

    def finish(self) -> None:
        """Wait for the last one."""
        self._snapshots.wait()
        self._report()

    def _report(self) -> None:
        snapshots = self._snapshots
        if snapshots.failure:
            self._warn(snapshots.failure)
        self._trainer.run_time.memory_snapshots = {
            "every_n_train_steps": self._every,
            "snapshots": snapshots.taken,
            "bytes": snapshots.part_bytes,
            "kept_bytes": snapshots.held_bytes,
            "seconds": round(snapshots.waited_s, 4),
        }

    def _warn(self, why: str) -> None:
        if why != self._told:
            rank_zero_warn(f"The state at step {self._step} is not kept in the memory of two hosts: {why}")
        self._told = why


def begin(trainer: Trainer) -> MemorySnapshots | None:
    """The snapshots of a fit that begins to train; None where the launcher asked for none.

    Raises:
        MisconfigurationException: steps are not compiled, or a plugin of the user's reads and writes checkpoints.
    """
    memory = NeighbourMemory.of_environment()
    if memory is None or trainer.fast_dev_run:
        return None
    if trainer._fit_number == 0:
        rank_zero_warn(
            "--memory-steps: nothing is kept in memory, since fit(ckpt_path=…) is obeyed, also after a loss; leave ckpt_path out "
            "to continue from the newest state"
        )
        return None
    advice = f"leave --memory-steps out ({VARIABLE})"
    steps, io = trainer.executor.steps, innermost(trainer.strategy.checkpoint_io)
    if trainer.strategy.placed is None or steps is None or steps.executor != "compiled":
        raise MisconfigurationException(
            f"--memory-steps keeps what compiled steps have on a mesh, but steps run eagerly: {advice}, or mend that"
        )
    if not isinstance(io, MeshCheckpointIO):
        raise MisconfigurationException(
            f"--memory-steps keeps what the default plugin would write, and checkpoints go through {type(io).__name__}: "
            f"{advice}, or the plugin"
        )
    return MemorySnapshots(trainer, memory)
