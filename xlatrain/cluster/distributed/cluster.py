"""The place of a process in the world, read from the variables of its launcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import jax

from xlatrain.cluster.distributed.torchrun import has_agent_store
from xlatrain.cluster.launch import COORDINATOR, LOCAL_PROCESS_ID, PROCESS_ID, PROCESSES

# srun's own port where none is given: as JAX chooses it, so that a mix of both would meet.
_SLURM_PORTS = range(65535 - 2**12 + 1, 65536)


SLURM = "SLURM's variables"


@dataclass(frozen=True)
class ProcessPlace:
    """A process's place.

    Attributes:
        coordinator_address: ``host:port`` of process 0; None in a world of one.
        process_count, process_id: the world's size, this process's index.
        local_process_id: index among the processes on this host.
        local_device_ids: the GPUs of this process where several share a host; None: all of them.
        source: what said so, for messages.
        agent_store: ``coordinator_address`` is that of a torchrun agent's store, in which process 0 says where it listens.
    """

    coordinator_address: str | None
    process_count: int
    process_id: int
    local_process_id: int
    local_device_ids: tuple[int, ...] | None
    source: str
    agent_store: bool = False


ALONE = ProcessPlace(None, 1, 0, 0, None, "nothing (one process)")


def detect(environment: Mapping[str, str] | None = None) -> ProcessPlace:
    """The place that the environment gives this process: ``xlatrain launch``, torchrun, SLURM, LSF, then what JAX itself
    detects (TPU pods, Kubernetes, Open MPI); :data:`ALONE` if none of them does.

    Raises:
        ValueError: a variable that is missing beside the others, or is no number.
    """
    environment = os.environ if environment is None else environment
    for read in _READERS:
        place = read(environment)
        if place is not None:
            return place if place.process_count > 1 else replace(ALONE, source=place.source)
    return _from_jax() or ALONE


def _from_launcher(env: Mapping[str, str]) -> ProcessPlace | None:
    """``xlatrain launch``, or the same variables set by hand."""
    if COORDINATOR not in env:
        return None
    source = f"{COORDINATOR} and {PROCESSES}, {PROCESS_ID}"
    process_id = _number(env, PROCESS_ID, source)
    local = _number(env, LOCAL_PROCESS_ID, source) if LOCAL_PROCESS_ID in env else local_process_id(env[COORDINATOR], process_id)
    return ProcessPlace(env[COORDINATOR], _number(env, PROCESSES, source), process_id, local, None, source)


def local_process_id(address: str, process_id: int) -> int:
    """The index among the processes of a host, where no variable says: 0, unless all processes meet at a loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    return process_id if host in ("localhost", "::1") or host.startswith("127.") else 0


def _from_torchrun(env: Mapping[str, str]) -> ProcessPlace | None:
    """torchrun, or its variables (``env://`` of torch.distributed)."""
    if not {"MASTER_ADDR", "RANK", "WORLD_SIZE"} <= env.keys():
        return None
    source = "torchrun's variables (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE)"
    port = _number(env, "MASTER_PORT", source)
    local = _number(env, "LOCAL_RANK", source) if "LOCAL_RANK" in env else 0
    shares_host = _number(env, "LOCAL_WORLD_SIZE", source) > 1 if "LOCAL_WORLD_SIZE" in env else False
    return ProcessPlace(
        f"{env['MASTER_ADDR']}:{port}",
        _number(env, "WORLD_SIZE", source),
        _number(env, "RANK", source),
        local,
        (local,) if shares_host else None,
        source,
        has_agent_store(env),
    )


def _from_slurm(env: Mapping[str, str]) -> ProcessPlace | None:
    """A task of ``srun``. A shell in an allocation (``salloc``, the batch script itself) is one process of its own."""
    if not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"} <= env.keys():
        return None
    if env.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    source = SLURM
    tasks = _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS", source)
    port = env.get("JAX_COORDINATOR_PORT") or _SLURM_PORTS[_number(env, "SLURM_JOB_ID", source) % len(_SLURM_PORTS)]
    local = _number(env, "SLURM_LOCALID", source)
    nodes = _number(env, "SLURM_STEP_NUM_NODES", source) if "SLURM_STEP_NUM_NODES" in env else tasks
    return ProcessPlace(
        f"{first_host(env['SLURM_STEP_NODELIST'])}:{port}",
        tasks,
        _number(env, "SLURM_PROCID", source),
        local,
        (local,) if tasks > nodes else None,
        source,
    )


def _from_lsf(env: Mapping[str, str]) -> ProcessPlace | None:
    """A task of ``jsrun``, in a job of LSF."""
    if not {"LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"} <= env.keys():
        return None
    source = "LSF's variables (jsrun)"
    local = _number(env, "JSM_NAMESPACE_LOCAL_RANK", source) if "JSM_NAMESPACE_LOCAL_RANK" in env else 0
    shares_host = _number(env, "JSM_NAMESPACE_LOCAL_SIZE", source) > 1 if "JSM_NAMESPACE_LOCAL_SIZE" in env else False
    return ProcessPlace(
        f"{lsf_hosts(env)[0]}:{lsf_port(env)}",
        _number(env, "JSM_NAMESPACE_SIZE", source),
        _number(env, "JSM_NAMESPACE_RANK", source),
        local,
        (local,) if shares_host else None,
        source,
    )


def lsf_hosts(env: Mapping[str, str]) -> list[str]:
    """The hosts of an LSF job's tasks, in order: those of its rank file without the first, from which they are launched.

    Raises:
        ValueError: the file is missing or names none.
    """
    path = env.get("LSB_DJOB_RANKFILE")
    if not path:
        found = "Did not find the environment variable `LSB_DJOB_RANKFILE`" if path is None else ""
        raise ValueError(f"{found or 'The environment variable `LSB_DJOB_RANKFILE` is empty'}: start the tasks with jsrun")
    try:
        with open(path) as file:
            lines = [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise ValueError(f"the hosts of this LSF job were to be read from LSB_DJOB_RANKFILE={path!r}: {error}") from error
    if len(lines) < 2:
        raise ValueError(f"LSB_DJOB_RANKFILE={path!r} names {lines}; expected the launch host and then those of the tasks")
    return list(dict.fromkeys(lines[1:]))  # tasks may run on the host that launched them too


def lsf_port(env: Mapping[str, str]) -> int:
    """``MASTER_PORT``, or one that all tasks of an LSF job compute from its id."""
    if "MASTER_PORT" in env:
        return _number(env, "MASTER_PORT", "LSF's variables (jsrun)")
    if "LSB_JOBID" not in env:
        raise ValueError("Could not find job id in environment variable LSB_JOBID: start the tasks with jsrun")
    return 10000 + _number(env, "LSB_JOBID", "LSF's variables (jsrun)") % 1000  # as stock Lightning's environment has it


_READERS: tuple[Callable[[Mapping[str, str]], ProcessPlace | None], ...] = (
    _from_launcher,
    _from_torchrun,
    _from_slurm,
    _from_lsf,
)


def first_host(node_list: str) -> str:
    """The first host of SLURM's list: ``node[003-007,9],other`` → ``node003``."""
    head, bracket, rest = node_list.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + rest.replace("]", ",").replace("-", ",").split(",")[0]


def _from_jax() -> ProcessPlace | None:
    """The place of this process that JAX detects by itself: TPU pods, Kubernetes jobs, Open MPI."""
    from jax._src import clusters

    for cluster in clusters.ClusterEnv._cluster_types:
        if cluster.opt_in_only_method or not _may_be(cluster) or not cluster.is_env_present():
            continue
        source = f"JAX's detection of {cluster.__name__}"
        count = cluster.get_process_count()
        if count == 1:
            return replace(ALONE, source=source)
        address = cluster.get_coordinator_address(300, os.environ.get("JAX_COORDINATOR_PORT"))
        local = cluster.get_local_process_id()
        ids = None if local is None else (local,)
        return ProcessPlace(address, count, cluster.get_process_id(), local or 0, ids, source)
    return None


def _may_be(cluster: type) -> bool:
    """Whether JAX may look for this kind of cluster: looking has side effects (requests, warnings), or finds too much."""
    if cluster.__name__ == "SlurmCluster":
        return False  # read above, where a shell in an allocation counts as alone
    if cluster.__name__ == "K8sCluster":
        return "JOB_COMPLETION_INDEX" in os.environ  # set in the pods of an indexed Job; any other pod is a machine of its own
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    return "Tpu" not in cluster.__name__ or not platforms or "tpu" in platforms


def _number(env: Mapping[str, str], name: str, source: str) -> int:
    value = env.get(name)
    if value is None or not value.strip().isdecimal():
        found = "is not set" if value is None else f"is {value!r}"
        raise ValueError(f"the world was to be read from {source}, but {name} {found}; it must be a number of at least 0")
    return int(value)
