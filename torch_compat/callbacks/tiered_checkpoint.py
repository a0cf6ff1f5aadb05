"""``TieredCheckpoint``: a ``ModelCheckpoint`` with rules for what is kept, and copies on durable storage."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.model_checkpoint import ModelCheckpoint
from torch_compat.utilities.cloud_io import is_local_path
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_info
from xlatrain.checkpoint import DurableCopies, Retention, commit_time_ns, prune

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer


class TieredCheckpoint(ModelCheckpoint):
    """``ModelCheckpoint`` that keeps by several rules at once, and copies to a second, durable directory in the background.

    ::

        saves = TieredCheckpoint(
            "local", every_n_train_steps=1, retention=Retention(last=2),
            durable_dirpath="memory://run", durable_retention=Retention(last=3, every_n_steps=10_000),
        )
        pl.Trainer(max_epochs=3, callbacks=[saves]).fit(module, loader)

    ``memory://run`` stands for a bucket here: ``gs://bucket/run``. Training waits for neither directory. What is copied is what
    was committed, ``last.ckpt`` and the checkpoint of a preempted run too; ``fit`` returns after the last copy, and raises
    then if something could not be copied. ``fit(ckpt_path="auto")`` continues from whichever directory has the newest complete
    checkpoint, and brings it back first if that is the durable one.

    Args:
        *args, **kwargs: as for ``ModelCheckpoint``.
        retention: what stays in ``dirpath`` of what this callback saved: everything that any rule keeps, always the newest
            complete checkpoint and the best one so far. Then every checkpoint that is due is saved, and ``save_top_k`` is left
            out: ``Retention(best=3, monitor="val_loss")`` is its place.
        durable_dirpath: URL that fsspec opens, or path; for the copies of this run alone.
        durable_retention: what stays there; None: what stays in ``dirpath``.

    Raises:
        MisconfigurationException: ``save_top_k`` or another ``monitor`` beside ``retention``; ``durable_retention`` without
            ``durable_dirpath``; in ``setup``: a remote ``dirpath`` with ``durable_dirpath``, a checkpoint plugin of
            another kind than the default.
    """

    def __init__(
        self,
        *args: Any,
        retention: Retention | None = None,
        durable_dirpath: str | os.PathLike[str] | None = None,
        durable_retention: Retention | None = None,
        **kwargs: Any,
    ) -> None:
        if retention is not None and kwargs.setdefault("save_top_k", -1) != -1:
            raise MisconfigurationException(
                f"TieredCheckpoint(save_top_k={kwargs['save_top_k']}, retention=…): leave save_top_k out, and say "
                f"Retention(best={kwargs['save_top_k']}, monitor=…)"
            )
        if durable_retention is not None and durable_dirpath is None:
            raise MisconfigurationException("TieredCheckpoint(durable_retention=…) needs durable_dirpath.")
        super().__init__(*args, **kwargs)
        for name, rules in (("retention", retention), ("durable_retention", durable_retention)):
            if rules is not None and rules.monitor not in (None, self.monitor):
                raise MisconfigurationException(
                    f"TieredCheckpoint(monitor={self.monitor!r}, {name}=Retention(monitor={rules.monitor!r})): checkpoints are "
                    "saved with the value of `monitor`: name the same metric"
                )
        self.retention = retention
        self.durable_dirpath = None if durable_dirpath is None else os.fspath(durable_dirpath)
        self.durable_retention = durable_retention
        self._copies: DurableCopies | None = None
        self._saved: list[str] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not trainer.strategy.checkpoint_io.collective:
            name = type(trainer.strategy.checkpoint_io).__name__
            raise MisconfigurationException(
                f"TieredCheckpoint copies the checkpoints of the default plugin, not those of {name}: leave the plugin out, or "
                "use ModelCheckpoint."
            )
        if self.durable_dirpath is not None and not is_local_path(self.dirpath or ""):
            raise MisconfigurationException(
                f"TieredCheckpoint(dirpath={self.dirpath!r}, durable_dirpath=…): dirpath is remote itself; give a directory "
                "that is mounted (and fast), or leave durable_dirpath out."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self._copies is not None:
            self._copies.wait()

    def copy_durably(self, path: str) -> None:
        """Copy a committed checkpoint, and wait for it; only process 0 does anything."""
        if (copies := self._durable()) is not None:
            copies.copy(path)
            copies.wait()

    def fetch_if_newer(self, directory: str, newest_ns: int) -> dict[str, int]:
        """Process 0: the newest durable copy, if newer than ``newest_ns``, is brought back; its path there, and its time."""
        copies = self._durable()
        newest = copies.newest() if copies is not None else None
        if copies is None or newest is None or newest[1] <= newest_ns:
            return {}
        rank_zero_info(f"{self.durable_dirpath} has a newer checkpoint than {directory}: bringing {newest[0]} back")
        return {os.fspath(copies.fetch(newest[0], directory)): newest[1]}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "saved": list(self._saved)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.dirpath == state_dict.get("dirpath", self.dirpath):
            self._saved = list(state_dict.get("saved", ()))

    def _durable(self) -> DurableCopies | None:
        if self._copies is None and self.durable_dirpath is not None:
            self._copies = DurableCopies(self.durable_dirpath, self.durable_retention)
        return self._copies

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if self.retention is not None:
            self._forget_pruned(trainer, filepath)
        super()._save_checkpoint(trainer, filepath)
        pending = trainer.strategy.pending_save
        if pending is None or not trainer.is_global_zero:
            return
        if (copies := self._durable()) is not None:
            pending.then(lambda: copies.copy(filepath))
        if (rules := self.retention) is not None:
            among = list(self._saved)
            protected = [path for path in (self.best_model_path, trainer.ckpt_path) if path]
            pending.then(lambda: self._prune(rules, among, protected))

    def _prune(self, rules: Retention, among: list[str], protected: list[str]) -> None:
        assert self.dirpath is not None
        for path in prune(self.dirpath, rules, among=among, protected=protected):
            self._remove_copy(os.fspath(path))

    def _forget_pruned(self, trainer: Trainer, saving: str) -> None:
        """Drop from the list of saved checkpoints all that are gone, and add the checkpoint that is being saved now."""
        self._await_commit(trainer)  # and with it the removals that followed
        present = [path for path in self._saved if path != saving and commit_time_ns(path) is not None]
        if saving != self.last_model_path:  # a second copy of what is counted already
            present.append(saving)
        self._saved = trainer.strategy.broadcast(present)
        self.best_k_models = {path: score for path, score in self.best_k_models.items() if path in self._saved}

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._remove_checkpoint(trainer, filepath)
        if trainer.is_global_zero and trainer.strategy.pending_save is not None:
            trainer.strategy.pending_save.then(lambda: self._remove_copy(filepath))

    def _remove_copy(self, path: str) -> None:
        if self._copies is not None and self.durable_retention is None:
            self._copies.remove(os.path.basename(path))
