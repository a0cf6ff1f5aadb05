"""Cluster environments: what they read, and that the world which they describe is the one that is joined."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest

from tests.torch_compat.strategies.small import trainer
from torch_compat.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    XLAEnvironment,
)
from torch_compat.strategies import DDPStrategy
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.cluster.distributed import cluster


def test_torchrun(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, value in {"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    environment = TorchElasticEnvironment()
    assert (environment.main_address, environment.main_port, environment.creates_processes_externally) == ("a", 1, True)
    assert (environment.world_size(), environment.global_rank(), environment.local_rank()) == (4, 3, 1)
    caplog.set_level(logging.DEBUG, "lightning.fabric.plugins.environments")
    environment.set_world_size(9)
    assert environment.world_size() == 4 and environment.node_rank() == 0
    assert caplog.messages == [
        "TorchElasticEnvironment.set_world_size was called, but setting world size is not allowed. Ignored."
    ]
    monkeypatch.delenv("RANK")
    for kind in (KeyError, ValueError):
        with pytest.raises(kind, match=r"^Cannot determine global rank\. Environment variable `RANK` not found\..*with torchrun"):
            environment.global_rank()


def test_torchrun_without_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # which the environment sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with pytest.warns(UserWarning, match="is not defined. Set as"):
        assert (TorchElasticEnvironment().main_address, TorchElasticEnvironment().main_port) == ("127.0.0.1", 12910)
    assert os.environ["MASTER_PORT"] == "12910"


@pytest.mark.parametrize("environment", [SLURMEnvironment(), TorchElasticEnvironment(), KubeflowEnvironment()])
def test_outside_of_its_launcher_a_process_is_alone(environment: ClusterEnvironment) -> None:
    assert trainer(devices=1, plugins=[environment], strategy="ddp").world_size == 1


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_JOB_ID": "17"}
    for name, value in {**settings, "SLURM_NODELIST": "node[003-004]", "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # which the environment sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    environment = SLURMEnvironment()
    assert SLURMEnvironment.detect() and SLURMEnvironment.job_id() == 17
    assert (environment.main_address, environment.world_size(), environment.global_rank()) == ("node003", 2, 1)
    assert environment.main_port == 15017
    with pytest.raises(ValueError, match=r"num_nodes=3.*srun started 2 tasks"):
        environment.validate_settings(num_devices=1, num_nodes=3)
    assert (environment.auto_requeue, environment.requeue_signal) == (True, signal.SIGUSR1)
    assert SLURMEnvironment(False, signal.SIGUSR2).requeue_signal == signal.SIGUSR2
    with pytest.raises(MisconfigurationException, match=r"requeue_signal=SIGTERM.*take SIGUSR1"):
        SLURMEnvironment(requeue_signal=signal.SIGTERM)
    for nodes, first in (("host[5-9,3] other", "host5"), ("host0 host1", "host0"), ("a[2]-x", "a2-x"), ("a[7-8, 10]", "a7")):
        assert SLURMEnvironment.resolve_root_node_address(nodes) == first


def test_lsf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("n1\nn1\nn1\nn2\nn2\n")  # launched from a host that has tasks too
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # which the environment sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    settings = {"LSB_JOBID": "1234567", "LSB_DJOB_RANKFILE": str(hosts), "JSM_NAMESPACE_LOCAL_RANK": "1"}
    for name, value in {
        **settings,
        "JSM_NAMESPACE_SIZE": "4",
        "JSM_NAMESPACE_RANK": "3",
        "JSM_NAMESPACE_LOCAL_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    environment = LSFEnvironment()
    assert LSFEnvironment.detect() and environment.creates_processes_externally
    assert (environment.main_address, environment.main_port) == ("n1", 10567)
    assert (environment.world_size(), environment.global_rank(), environment.local_rank()) == (4, 3, 1)
    monkeypatch.setattr("socket.gethostname", lambda: "n2")
    assert environment.node_rank() == 1
    monkeypatch.setattr("socket.gethostname", lambda: "n3")
    with pytest.raises(ValueError, match=r"this host, n3, is not one of LSB_DJOB_RANKFILE=.*: n1, n2"):
        environment.node_rank()
    place = cluster.detect()
    assert (place.coordinator_address, place.process_count, place.process_id) == ("n1:10567", 4, 3)
    assert (place.local_process_id, place.local_device_ids) == (1, (1,))
    assert os.environ["MASTER_PORT"] == "10567"
    hosts.unlink()
    with pytest.raises(ValueError, match="the hosts of this LSF job were to be read from LSB_DJOB_RANKFILE="):
        cluster.detect()


def test_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = XLAEnvironment()
    assert (alone.world_size(), alone.global_rank(), alone.local_rank(), alone.node_rank()) == (1, 0, 0, 0)
    assert alone.creates_processes_externally and not XLAEnvironment.detect()
    for name, value in {"COORDINATOR": "host0:1234", "PROCESSES": "4", "PROCESS_ID": "2", "LOCAL_PROCESS_ID": "0"}.items():
        monkeypatch.setenv(f"XLATRAIN_{name}", value)
    one = XLAEnvironment()
    assert (one.main_address, one.main_port, one.world_size(), one.global_rank()) == ("host0", 1234, 4, 2)
    with pytest.raises(TypeError, match=r"takes no arguments here, found \['devices'\]"):
        XLAEnvironment(devices=4)


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
    with pytest.raises(MisconfigurationException, match="Mine does not start the other processes"):
        trainer(**arguments, devices=4, num_nodes=2)
