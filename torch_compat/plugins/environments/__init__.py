"""Who started the processes, and where each stands. API: ``lightning.pytorch.plugins.environments``."""

from __future__ import annotations

from typing import NoReturn

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.environments.kubeflow import KubeflowEnvironment
from torch_compat.plugins.environments.lightning import LightningEnvironment
from torch_compat.plugins.environments.mpi import MPIEnvironment
from torch_compat.plugins.environments.slurm import SLURMEnvironment
from torch_compat.plugins.environments.torchelastic import TorchElasticEnvironment

__all__ = [
    "ClusterEnvironment",
    "KubeflowEnvironment",
    "LightningEnvironment",
    "MPIEnvironment",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
]

_REFUSED = {
    "LSFEnvironment": "start the processes with jsrun and set XLATRAIN_COORDINATOR, XLATRAIN_PROCESSES and XLATRAIN_PROCESS_ID, "
    "or write a ClusterEnvironment of your own",
    "XLAEnvironment": "JAX finds the hosts of a TPU pod by itself: give no environment",
}


def __getattr__(name: str) -> NoReturn:
    if name in _REFUSED:
        raise ImportError(f"lightning.pytorch.plugins.environments.{name} is not offered: {_REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
