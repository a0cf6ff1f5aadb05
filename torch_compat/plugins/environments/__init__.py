"""Cluster environments: who started the processes, and where each stands. API: ``lightning.pytorch.plugins.environments``."""

from __future__ import annotations

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.environments.kubeflow import KubeflowEnvironment
from torch_compat.plugins.environments.lightning import LightningEnvironment
from torch_compat.plugins.environments.lsf import LSFEnvironment
from torch_compat.plugins.environments.mpi import MPIEnvironment
from torch_compat.plugins.environments.slurm import SLURMEnvironment
from torch_compat.plugins.environments.torchelastic import TorchElasticEnvironment
from torch_compat.plugins.environments.xla import XLAEnvironment

__all__ = [
    "ClusterEnvironment",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LightningEnvironment",
    "MPIEnvironment",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
    "XLAEnvironment",
]
