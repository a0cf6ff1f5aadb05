"""Silent data corruption: a device that holds other weights than its replicas is named, before they are saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.mesh.mesh import in_words
from xlatrain.step.replicas import ReplicaCheck

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule

VARIABLE = "XLATRAIN_SDC_CHECK"


class SilentDataCorruptionCheck(Callback):
    """Compares, bit by bit, what data-parallel devices hold of parameters, buffers and optimizer state.

    They compute it each for itself, so that a difference means a device that computed wrongly, or whose memory lost a bit. The
    run ends with its name and host. Every checkpoint is checked before it is written, so that none holds what is wrong. For a
    script that is not to be changed: ``XLATRAIN_SDC_CHECK=100``.

    What is split over all devices has no replica and is not checked: with ``"fsdp"`` over all devices nearly everything. A
    warning says how much, and ``replica_checks`` in the run report. With a data axis beside it (``MeshStrategy(axes={"data": 2,
    "fsdp": -1})``, or ``HYBRID_SHARD``) all of it is. Where two replicas alone differ, both are named.

    ::

        trainer = pl.Trainer(max_epochs=1, devices=2, strategy="ddp", callbacks=[SilentDataCorruptionCheck(100)])
        trainer.fit(module, loader)

    Args:
        every_n_train_steps: optimizer steps from one check to the next.

    Raises (during training):
        SilentDataCorruptionError: names the devices, their hosts and the arrays.
        MisconfigurationException: nothing has a replica, or steps are not compiled.
    """

    def __init__(self, every_n_train_steps: int = 100) -> None:
        if not isinstance(every_n_train_steps, int) or every_n_train_steps < 1:
            raise MisconfigurationException(
                f"SilentDataCorruptionCheck(every_n_train_steps={every_n_train_steps!r}) (or {VARIABLE}): expected a whole "
                "number of optimizer steps, at least 1"
            )
        self.every_n_train_steps = every_n_train_steps
        self._checked_at = -1
        self._replicas: ReplicaCheck | None = None

    @property
    def is_on(self) -> bool:
        """Whether a run trains that it checks."""
        return self._replicas is not None

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        self._replicas = None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self._checked_at = trainer.global_step
        placed, mesh = self._placed(trainer), trainer.strategy.mesh
        if mesh.devices.size == 1:
            raise MisconfigurationException(
                f"SilentDataCorruptionCheck compares the replicas of several devices, and the mesh has {in_words(mesh)}: leave "
                f"it out here ({VARIABLE} too)"
            )
        self._replicas = ReplicaCheck(mesh)
        sums = self._replicas.sums_of(placed.raw_state)
        trainer.run_time.replica_checks = facts = {
            "every_n_train_steps": self.every_n_train_steps,
            "checked_bytes": sums.checked_bytes,
            "unchecked_bytes": sums.unchecked_bytes,
            "unchecked": len(sums.unchecked),
        }
        names = [name for name in sums.unchecked if name.startswith("params.")] or list(sums.unchecked)
        some = ", ".join(names[:3]) + (f" and {len(sums.unchecked) - 3} more" if len(sums.unchecked) > 3 else "")
        advice = 'a data axis beside the others, MeshStrategy(axes={"data": 2, "fsdp": -1}), gives each shard a replica'
        if not any(path.startswith("params.") for path in sums.paths):
            raise MisconfigurationException(
                f"SilentDataCorruptionCheck: no parameter has a replica on {in_words(mesh)} ({some}): {advice}"
            )
        if names:
            share = facts["unchecked_bytes"] / (facts["unchecked_bytes"] + facts["checked_bytes"])
            rank_zero_warn(
                f"SilentDataCorruptionCheck cannot check {share:.0%} of the state, which is on one device each, or in the hosts' "
                f"memory: {some}; {advice}"
            )

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every_n_train_steps == 0 and trainer.global_step != self._checked_at:
            self.check(trainer)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.check(trainer)

    def check(self, trainer: Any) -> None:
        """Compare the state as it is; collective.

        Raises:
            SilentDataCorruptionError: names the devices, their hosts and the arrays.
        """
        placed, replicas = self._placed(trainer), self._replicas
        assert replicas is not None
        if found := replicas.disagreements(placed.raw_state):
            found = replicas.disagreements(placed.state) or found  # layers that are stacked in the program, by their own names
            raise replicas.error(found, f"at step {trainer.global_step}")
        self._checked_at = trainer.global_step
        trainer.run_time.replica_checks |= {
            "checks": replicas.checks,
            "seconds": round(replicas.seconds, 4),
            "compile_s": round(replicas.compile_s, 3),
        }

    def _placed(self, trainer: Any) -> Any:
        steps, placed = trainer.executor.steps, trainer.strategy.placed
        if placed is None or steps is None or steps.executor != "compiled":
            why = "" if steps is None else getattr(steps.log, "short_reason", "")
            raise MisconfigurationException(
                "SilentDataCorruptionCheck compares the state that compiled steps keep on a mesh, but steps run eagerly "
                f"({why}): leave it out ({VARIABLE} too), or make the steps compile"
            )
        return placed


def check_before_save(trainer: Any) -> None:
    """Check what is about to be saved, where the run has a :class:`SilentDataCorruptionCheck` and its state is on the mesh."""
    for callback in trainer.callbacks:
        if isinstance(callback, SilentDataCorruptionCheck) and callback.is_on and trainer.strategy.placed is not None:
            callback.check(trainer)
