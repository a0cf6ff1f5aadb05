"""Cluster environments: what they read, and that the world which they describe is the one that is joined."""

from __future__ import annotations

import pytest

from tests.torch_compat.strategies.small import trainer
from torch_compat.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from torch_compat.strategies import DDPStrategy
from torch_compat.utilities.exceptions import MisconfigurationException


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    environment = TorchElasticEnvironment()
    assert (environment.main_address, environment.main_port, environment.creates_processes_externally) == ("a", 1, True)
    assert (environment.world_size(), environment.global_rank(), environment.local_rank()) == (4, 3, 1)
    environment.set_world_size(9)
    assert environment.world_size() == 4
    with pytest.raises(RuntimeError, match="GROUP_RANK must be the node rank, but it is ''"):
        environment.node_rank()


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_JOB_ID": "17"}
    for name, value in {**settings, "SLURM_NODELIST": "node[003-004]", "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)
    environment = SLURMEnvironment()
    assert SLURMEnvironment.detect() and SLURMEnvironment.job_id() == 17
    assert (environment.main_address, environment.world_size(), environment.global_rank()) == ("node003", 2, 1)
    with pytest.raises(ValueError, match=r"num_nodes=3.*srun started 2 tasks"):
        environment.validate_settings(num_devices=1, num_nodes=3)
    with pytest.raises(MisconfigurationException, match=r"auto_requeue=True.*not offered"):
        SLURMEnvironment(auto_requeue=True)


def test_lightning_and_kubeflow(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = LightningEnvironment()
    assert not environment.creates_processes_externally and environment.main_port == environment.main_port > 0
    environment.set_world_size(2)
    assert environment.world_size() == 2
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert environment.creates_processes_externally
    with pytest.raises(NotImplementedError):
        KubeflowEnvironment.detect()


class Mine(LightningEnvironment):
    """A user's environment."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_devices != 4:
            raise ValueError(f"this cluster has hosts of 4 devices, not {num_devices}")


@pytest.mark.parametrize("given", ["plugins", "strategy"])
def test_an_environment_is_asked_before_the_world_is_joined(given: str) -> None:
    arguments = {"plugins": [Mine()]} if given == "plugins" else {"strategy": DDPStrategy(cluster_environment=Mine())}
    with pytest.raises(ValueError, match="hosts of 4 devices, not 8"):
        trainer(**arguments)
    one = trainer(**arguments, devices=4)
    assert isinstance(one.strategy.cluster_environment, ClusterEnvironment)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(MisconfigurationException, match="Mine says that nobody started the other processes"):
        trainer(**arguments, devices=4, num_nodes=2)


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ImportError, match="XLAEnvironment is not offered: JAX finds the hosts"):
        from torch_compat.plugins.environments import XLAEnvironment  # noqa: F401
