"""The launcher of this process, read from its environment."""

from __future__ import annotations

import pytest

from xlatrain.cluster.distributed.cluster import ALONE, ProcessPlace, detect, first_host

LAUNCHER = {
    "XLATRAIN_COORDINATOR": "127.0.0.1:99",
    "XLATRAIN_PROCESSES": "4",
    "XLATRAIN_PROCESS_ID": "2",
    "XLATRAIN_LOCAL_PROCESS_ID": "1",
}
TORCHRUN = {
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
SLURM = {
    "SLURM_JOB_ID": "4099",
    "SLURM_STEP_NODELIST": "node[003-007,9]",
    "SLURM_STEP_NUM_NODES": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_NTASKS": "12",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
}


def place(environment: dict[str, str]) -> tuple[object, ...]:
    found = detect(environment)
    return (found.coordinator_address, found.process_count, found.process_id, found.local_process_id, found.local_device_ids)


def test_our_launcher_comes_first() -> None:
    assert place(SLURM | TORCHRUN | LAUNCHER) == ("127.0.0.1:99", 4, 2, 1, None)


def test_torchrun() -> None:
    assert place(SLURM | TORCHRUN) == ("host:29500", 8, 5, 1, (1,))
    assert place(TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == ("host:29500", 8, 5, 0, None)


def test_torchruns_agent_keeps_its_own_port() -> None:
    assert not detect(TORCHRUN).agent_store
    agent = detect(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (agent.coordinator_address, agent.agent_store) == ("host:29500", True)


def test_slurm() -> None:
    assert place(SLURM) == ("node003:61443", 6, 3, 0, None)
    assert place(SLURM | {"SLURM_STEP_NUM_NODES": "3", "SLURM_LOCALID": "1"})[3:] == (1, (1,))
    assert detect(SLURM | {"JAX_COORDINATOR_PORT": "7"}).coordinator_address == "node003:7"


@pytest.mark.parametrize("change", [{"SLURM_JOB_NAME": "bash"}, {"SLURM_JOB_NAME": "interactive"}])
def test_a_shell_in_an_allocation_is_alone(change: dict[str, str]) -> None:
    assert detect(SLURM | change) == ALONE


def test_the_batch_script_itself_is_alone() -> None:
    assert detect({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}) == ALONE


@pytest.mark.parametrize("environment", [LAUNCHER | {"XLATRAIN_PROCESSES": "1"}, TORCHRUN | {"WORLD_SIZE": "1"}])
def test_a_world_of_one_needs_no_coordinator(environment: dict[str, str]) -> None:
    found = detect(environment)
    assert (found.coordinator_address, found.process_count, found.process_id) == (None, 1, 0)
    assert found.source != ALONE.source


def test_nothing_said() -> None:
    assert detect({}) == ALONE == ProcessPlace(None, 1, 0, 0, None, ALONE.source)


def test_a_pod_that_is_no_job_is_alone(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # JAX would look for a job, and warn or fail where there is none
    assert detect({}) == ALONE
    assert not recwarn.list


def test_open_mpi_is_detected_by_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    found = detect({})
    assert (found.process_count, found.process_id, found.local_process_id, found.local_device_ids) == (4, 3, 1, (1,))
    assert found.coordinator_address is not None
    assert found.coordinator_address.startswith("10.96.0.1:")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"XLATRAIN_COORDINATOR": "h:1"}, "XLATRAIN_PROCESS_ID is not set"),
        (TORCHRUN | {"RANK": "first"}, "RANK is 'first'; it must be a number"),
        (SLURM | {"SLURM_PROCID": "-1"}, "SLURM_PROCID is '-1'"),
    ],
)
def test_incomplete_variables_are_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        detect(environment)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("a[01-04]", "a01"),
        ("a[7,9-12],b", "a7"),
        ("a,b[1-2]", "a"),
        ("a[3]", "a3"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_processes_on_one_machine_are_numbered_there() -> None:
    by_hand = {"XLATRAIN_PROCESSES": "3", "XLATRAIN_PROCESS_ID": "2"}
    for address, local in (("127.0.0.1:1", 2), ("localhost:1", 2), ("[::1]:1", 2), ("node0:1", 0), ("10.0.0.1:1", 0)):
        assert detect({**by_hand, "XLATRAIN_COORDINATOR": address}).local_process_id == local
