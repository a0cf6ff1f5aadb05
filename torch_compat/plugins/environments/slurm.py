"""Tasks of ``srun``. API: ``lightning.pytorch.plugins.environments.SLURMEnvironment``."""

from __future__ import annotations

import os
import signal
from typing import ClassVar

from torch_compat.plugins.environments.fixed_world import FixedWorld
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.cluster.distributed.cluster import detect, first_host


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

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        super().__init__()
        self.auto_requeue = auto_requeue
        self.requeue_signal = signal.SIGUSR1 if requeue_signal is None else requeue_signal
        if self.requeue_signal == signal.SIGTERM:
            raise MisconfigurationException(
                "SLURMEnvironment(requeue_signal=SIGTERM): with that signal SLURM ends a job for other reasons too; take SIGUSR1 "
                "or SIGUSR2, and #SBATCH --signal for it"
            )

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR") or first_host(os.environ.get("SLURM_NODELIST", "127.0.0.1"))

    @property
    def main_port(self) -> int:
        if "MASTER_PORT" in os.environ:
            return int(os.environ["MASTER_PORT"])
        address = detect().coordinator_address
        if address is None:
            raise RuntimeError("SLURMEnvironment: these are not the tasks of an srun with several tasks; set MASTER_PORT")
        return int(address.rpartition(":")[2])

    @staticmethod
    def detect() -> bool:
        return "SLURM_NTASKS" in os.environ and SLURMEnvironment.job_name() not in ("bash", "interactive")

    @staticmethod
    def job_name() -> str | None:
        """``SLURM_JOB_NAME``."""
        return os.environ.get("SLURM_JOB_NAME")

    @staticmethod
    def job_id() -> int | None:
        """``SLURM_JOB_ID``; None in an interactive shell."""
        job = os.environ.get("SLURM_JOB_ID", "")
        return int(job) if job.isdecimal() and SLURMEnvironment.job_name() not in ("bash", "interactive") else None

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """The first host of SLURM's list: ``"host[5-9,3]"`` → ``"host5"``."""
        return first_host(nodes.split()[0])

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        tasks = os.environ.get("SLURM_NTASKS", "")
        if num_nodes > 1 and tasks.isdecimal() and int(tasks) != num_nodes:
            raise ValueError(
                f"Trainer(num_nodes={num_nodes}), but srun started {tasks} tasks: start one task per host (--ntasks-per-node=1)"
            )
