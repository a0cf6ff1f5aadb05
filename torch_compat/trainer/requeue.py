"""SLURM's automatic requeueing: a signal before the time is over, a checkpoint, the job in the queue again, and on from there.

``#SBATCH --signal=SIGUSR1@90`` has SLURM send the signal 90 s before the end. See
:class:`~torch_compat.plugins.environments.SLURMEnvironment`.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from torch_compat.plugins.environments.slurm import SLURMEnvironment
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn
from xlatrain.checkpoint import is_checkpoint
from xlatrain.cluster.distributed import cluster
from xlatrain.cluster.distributed.cluster import SLURM

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

_NAME = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


def requeue_signal(trainer: Trainer) -> int | None:
    """The signal that asks this run to save and to queue its job again; None where nothing of the kind is on."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None and SLURMEnvironment.detect() and cluster.detect().source == SLURM:
        environment = SLURMEnvironment()
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue or environment.job_id() is None:
        return None
    return environment.requeue_signal


def next_checkpoint(trainer: Trainer) -> str:
    """The path at which the run saves before it is queued again: ``hpc_ckpt_<n>.ckpt`` in ``default_root_dir``, as in stock."""
    return _path(trainer, max(_versions(trainer), default=0) + 1)


def newest_checkpoint(trainer: Trainer) -> str | None:
    """The newest checkpoint of an earlier run of this job, for ``fit`` without ``ckpt_path`` under SLURM; process 0 decides.

    Not what SLURM killed before it was committed: then the one before.
    """
    if not SLURMEnvironment.detect():
        return None
    path = _newest(trainer)
    if path is not None:
        rank_zero_info(f"this job was queued again: continuing from {path}")
    return path


def newest(trainer: Trainer) -> str:
    """The checkpoint that ``ckpt_path="hpc"`` asks for.

    Raises:
        ValueError: no run that was queued again has saved anything.
    """
    path = _newest(trainer)
    if path is None:
        fn = trainer.state.fn.value if trainer.state.fn is not None else "fit"
        raise ValueError(
            f'`.{fn}(ckpt_path="hpc")` is set but no HPC checkpoint was found: there is no complete hpc_ckpt_<n>.ckpt in '
            f"{trainer.default_root_dir}; pass a path, or another default_root_dir"
        )
    return path


def _newest(trainer: Trainer) -> str | None:
    complete = filter(_is_complete, (_path(trainer, version) for version in sorted(_versions(trainer), reverse=True)))
    return trainer.strategy.broadcast(next(complete, None) if trainer.is_global_zero else None)


def requeue() -> bool:
    """Queue this process's job again; on process 0. Whether SLURM took it."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        rank_zero_warn(f"the job could not be queued again ({error}); its checkpoint is complete: submit it again")
        return False
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        rank_zero_warn(
            f"`{' '.join(command)}` failed ({said}): the job is not queued again (was it submitted with --no-requeue?). Its "
            "checkpoint is complete: submit it again"
        )
        return False
    rank_zero_info(f"SLURM job {job} is queued again")
    return True


def _path(trainer: Trainer, version: int) -> str:
    return os.path.join(trainer.default_root_dir, f"hpc_ckpt_{version}.ckpt")


def _is_complete(path: str) -> bool:
    return os.path.isfile(path) or is_checkpoint(path)  # a stock file, or ours


def _versions(trainer: Trainer) -> list[int]:
    root = Path(trainer.default_root_dir)
    if "://" in trainer.default_root_dir or not root.is_dir():
        return []
    return [int(match[1]) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
