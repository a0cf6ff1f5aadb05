"""Paths of a ``ModelCheckpoint``'s checkpoints: their names, and links, removal and look-up below its directory."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_compat.callbacks.checkpoint import Checkpoint
from torch_compat.callbacks.checkpoint_name import format_name
from torch_compat.utilities.cloud_io import is_local_path
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.checkpoint import DirectoryInUseError, claim, claims
from xlatrain.checkpoint.filesystem import holds_checkpoints
from xlatrain.cluster.launch import RESUME_SINCE

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


class CheckpointPaths(Checkpoint):
    """The members of :class:`~torch_compat.callbacks.ModelCheckpoint` about files; its arguments say what they mean."""

    dirpath: str | None
    filename: str | None
    save_top_k: int
    auto_insert_metric_name: bool
    _enable_version_counter: bool
    _fs: Any

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    def _resolve_dirpath(self, trainer: Trainer) -> str:
        if self.dirpath is not None:
            return self.dirpath
        if not trainer.loggers:
            return os.path.join(trainer.default_root_dir, "checkpoints")
        logger = trainer.loggers[0]
        root = logger.save_dir if logger.save_dir is not None else trainer.default_root_dir
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        return os.path.join(root, str(logger.name), version, "checkpoints")

    def _warn_if_not_empty(self, dirpath: str) -> None:
        found = self._fs.ls(dirpath, detail=False) if self.save_top_k != 0 and self._fs.isdir(dirpath) else []
        if any(os.path.basename(path) != claims.NAME for path in found):
            rank_zero_warn(f"Checkpoint directory {dirpath} exists and is not empty.")

    def _warn_if_not_writable(self, dirpath: str) -> None:
        """Warn before hours of training rather than at the first save, which is where stock and we raise."""
        path = os.path.abspath(dirpath)
        while not os.path.lexists(path):
            path = os.path.dirname(path)
        if self.save_top_k != 0 and not (os.path.isdir(path) and os.access(path, os.W_OK)):
            why = "this process may not write to it" if os.path.isdir(path) else "it is no directory"
            rank_zero_warn(f"No checkpoint can be saved in {dirpath}, because of {path}: {why}. Pass another dirpath.")

    @staticmethod
    def _claim(trainer: Trainer, dirpath: str) -> None:
        """For as long as the run lasts; every process raises where process 0 finds another run there."""
        refusal = ""
        claims = getattr(trainer, "_claims", None)  # a test's stand-in for a Trainer has none
        if claims is not None and trainer.is_global_zero and holds_checkpoints(dirpath):
            try:
                claims.append(claim(dirpath, os.environ.get(RESUME_SINCE, "")))
            except DirectoryInUseError as error:
                refusal = str(error)
            except OSError:  # not writable: said above, and raised by the save
                pass
        if refusal := trainer.strategy.broadcast(refusal):
            raise DirectoryInUseError(refusal)

    def format_checkpoint_name(
        self, metrics: dict[str, Tensor], filename: str | None = None, ver: int | None = None, prefix: str | None = None
    ) -> str:
        """The path for ``metrics``: ``filename`` or the callback's own template filled in, below ``dirpath``, with ``-v<ver>`` if
        given.

        A metric that is not in ``metrics`` counts as 0. Raises ValueError if a value does not suit its format.
        """
        name = self._format_checkpoint_name(filename or self.filename, metrics, prefix, self.auto_insert_metric_name)
        if ver is not None:
            name = self.CHECKPOINT_JOIN_CHAR.join((name, f"v{ver}"))
        name += self.FILE_EXTENSION
        return os.path.join(self.dirpath, name) if self.dirpath else name

    def _format_checkpoint_name(
        self,
        filename: str | None,
        metrics: dict[str, Tensor],
        prefix: str | None = None,
        auto_insert_metric_name: bool = True,
    ) -> str:
        template = filename or self.CHECKPOINT_JOIN_CHAR.join(("{epoch}", "{step}"))
        name = format_name(template, metrics, auto_insert_metric_name, self.CHECKPOINT_EQUALS_CHAR)
        return name if prefix is None else self.CHECKPOINT_JOIN_CHAR.join((prefix, name))

    def _get_metric_interpolated_filepath_name(
        self, monitor_candidates: dict[str, Tensor], trainer: Trainer, del_filepath: str | None = None
    ) -> str:
        return self._unused_name(trainer, monitor_candidates, del_filepath, None)

    def _unused_name(self, trainer: Trainer, candidates: dict[str, Tensor], own: str | None, filename: str | None) -> str:
        """The name for ``candidates``, with a version if it exists; ``own`` may be overwritten."""
        self._await_commit(trainer)  # and with it the removal of what was replaced: its name is free then
        path, version = self.format_checkpoint_name(candidates, filename), self.STARTING_VERSION
        while self._enable_version_counter and path != own and self.file_exists(path, trainer):
            path = self.format_checkpoint_name(candidates, filename, ver=version)
            version += 1
        return path

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Whether process 0 sees the path; the same answer on every process."""
        exists = self._fs.exists(filepath) if trainer.is_global_zero else False
        return trainer.strategy.reduce_boolean_decision(exists, all=False)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """The paths of ``last*.ckpt`` in the directory of this callback, from which ``ckpt_path="last"`` chooses."""
        directory = self._resolve_dirpath(trainer)
        if not self._fs.exists(directory):
            return set()
        # A link may have lost the checkpoint that it leads to.
        paths = (Path(path) for path in self._fs.ls(directory, detail=False) if self._fs.exists(path))
        pattern = re.compile(rf"{self.CHECKPOINT_NAME_LAST}(-(\d+))?")
        return {os.path.normpath(path) for path in paths if path.suffix == self.FILE_EXTENSION and pattern.match(path.stem)}

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        """Whether to remove a checkpoint: not if just overwritten, nor, if local, one outside ``dirpath``, or the resumed one.

        One that ``ckpt_path="auto"`` has found is this run's own: it goes when it is replaced.
        """
        if previous == current:
            return False
        if not is_local_path(previous):
            return True
        path = Path(previous).absolute()
        found = getattr(trainer, "_found_ckpt_path", False)  # a test's stand-in for a Trainer has none
        if trainer.ckpt_path is not None and not found and path == Path(trainer.ckpt_path).absolute():
            return False
        assert self.dirpath is not None
        return Path(self.dirpath).absolute() in path.parents

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        pending = trainer.strategy.pending_save
        if pending is None or os.path.islink(filepath):
            trainer.strategy.remove_checkpoint(filepath)
        else:  # were the process killed before the new checkpoint is committed, there would be neither
            pending.then_remove(filepath)

    @staticmethod
    def _await_commit(trainer: Trainer) -> None:
        if trainer.strategy.pending_save is not None:
            with trainer.run_time.account.span("save"):
                trainer.strategy.pending_save.wait()

    @classmethod
    def _link_checkpoint(cls, trainer: Trainer, filepath: str, linkpath: str) -> None:
        cls._await_commit(trainer)  # until then the link must lead to the checkpoint before
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            _replace_by_link(linkpath, os.path.relpath(filepath, os.path.dirname(linkpath)))
        trainer.strategy.barrier()


def _replace_by_link(linkpath: str, target: str) -> None:
    """Makes ``linkpath`` a symbolic link to ``target``; where links are not allowed (Windows), a copy."""
    if os.path.isdir(linkpath) and not os.path.islink(linkpath):
        shutil.rmtree(linkpath)
    temporary = f"{linkpath}.tmp"
    try:
        if os.path.lexists(temporary):
            os.remove(temporary)
        os.symlink(target, temporary, target_is_directory=True)
    except OSError:
        source = os.path.join(os.path.dirname(linkpath), target)
        (shutil.copytree if os.path.isdir(source) else shutil.copy2)(source, linkpath)
    else:
        os.replace(temporary, linkpath)  # at no time is there no link


def remove_empty(dirpath: Path) -> None:
    """Remove directories of checkpoints in which a killed run had written nothing yet; the run has claimed ``dirpath``."""
    for path in dirpath.glob("*.ckpt"):
        with suppress(OSError):  # no directory, or not empty
            path.rmdir()
