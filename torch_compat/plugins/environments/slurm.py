"""Tasks of ``srun``. API: ``lightning.pytorch.plugins.environments.SLURMEnvironment``."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from typing import ClassVar

from torch_compat.plugins.environments.fixed_world import FixedWorld
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn
from torch_compat.utilities.warnings import PossibleUserWarning


class SLURMEnvironment(FixedWorld):
    """SLURM, with a task per host: ``SLURM_NTASKS``, ``SLURM_PROCID``, ``SLURM_LOCALID``, ``SLURM_NODEID``.

    Args:
        auto_requeue: at ``requeue_signal`` a fit saves ``hpc_ckpt_<n>.ckpt`` in ``default_root_dir``, queues its job again
            (``scontrol requeue``) and ends; the next run's ``fit`` continues from there. Ask SLURM for the signal:
            ``#SBATCH --signal=SIGUSR1@90``.
        requeue_signal: default: SIGUSR1.
    """

    variables: ClassVar[dict[str, str]] = {
        "world_size": "SLURM_NTASKS",
        "global_rank": "SLURM_PROCID",
        "local_rank": "SLURM_LOCALID",
        "node_rank": "SLURM_NODEID",
    }
    launcher = "srun"

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        super().__init__()
        self.auto_requeue = auto_requeue
        self.requeue_signal = signal.SIGUSR1 if requeue_signal is None else requeue_signal
        if self.requeue_signal == signal.SIGTERM:
            raise MisconfigurationException(
                "SLURMEnvironment(requeue_signal=SIGTERM): with that signal SLURM ends a job for other reasons too; take SIGUSR1 "
                "or SIGUSR2, and #SBATCH --signal for it"
            )
        self._validate_srun_used()

    @property
    def main_address(self) -> str:
        if "MASTER_ADDR" not in os.environ:
            os.environ["MASTER_ADDR"] = self.resolve_root_node_address(os.environ.get("SLURM_NODELIST", "127.0.0.1"))
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        if "MASTER_PORT" not in os.environ:  # the same in all tasks of a job
            job = os.environ.get("SLURM_JOB_ID")
            os.environ["MASTER_PORT"] = str(12910 if job is None else 15000 + int(job[-4:]))
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        SLURMEnvironment._validate_srun_used()
        return _is_srun_used()

    @staticmethod
    def job_name() -> str | None:
        """``SLURM_JOB_NAME``."""
        return os.environ.get("SLURM_JOB_NAME")

    @staticmethod
    def job_id() -> int | None:
        """``SLURM_JOB_ID``; None in an interactive shell."""
        job = os.environ.get("SLURM_JOB_ID", "")
        return int(job) if job.isdecimal() and not _is_slurm_interactive_mode() else None

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """The first host of SLURM's list: ``"host[5-9,3]"`` → ``"host5"``; hosts may stand apart by blanks too."""
        first_of_ranges = re.sub(r"\[(.*?)\]", r"\1", re.sub(r"\[(.*?)[,-].*\]", r"\1", nodes))
        return first_of_ranges.split(" ")[0].split(",")[0]

    @staticmethod
    def _validate_srun_used() -> None:
        """Say where ``srun`` is there and not used: whoever forgets it has one task where several were meant."""
        if shutil.which("srun") is not None and not _is_srun_used():
            command = " ".join(["srun", os.path.basename(sys.executable), *sys.argv])[:64]
            rank_zero_warn(
                "The `srun` command is available on your system but is not used: this process is alone. To run on all hosts of"
                f" the allocation, begin the command with it: {command} ...",
                category=PossibleUserWarning,
            )

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        tasks = os.environ.get("SLURM_NTASKS", "")
        if num_nodes > 1 and tasks.isdecimal() and int(tasks) != num_nodes:
            raise ValueError(
                f"Trainer(num_nodes={num_nodes}), but srun started {tasks} tasks: start one task per host (--ntasks-per-node=1)"
            )


def _is_srun_used() -> bool:
    return "SLURM_NTASKS" in os.environ and not _is_slurm_interactive_mode()


def _is_slurm_interactive_mode() -> bool:
    return SLURMEnvironment.job_name() in ("bash", "interactive")
