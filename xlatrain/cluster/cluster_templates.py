"""Templates for schedulers: the commands and files that start a script on every host of a TPU VM, of GKE, of SLURM.

Each function gives text, ready to be run or submitted. Formats: JobSet ``jobset.x-k8s.io/v1alpha2``, as GKE documents it for TPU
slices; ``sbatch``; ``gcloud compute tpus tpu-vm ssh``.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from xlatrain.cluster.launch import RESUME_SINCE

_KUBERNETES_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_TOPOLOGY = re.compile(r"[1-9]\d*x[1-9]\d*(x[1-9]\d*)?")

ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""GKE's node label of each generation."""

CHIPS_PER_HOST = 4


def gcloud(name: str, zone: str, arguments: Sequence[str], *, python: str, directory: str, variables: Mapping[str, str]) -> str:
    """The command that runs ``python arguments…`` on all workers of a TPU VM, in the foreground.

    Args:
        name, zone: of the TPU VM.
        arguments: of Python.
        python: the interpreter on the workers.
        directory: where to run there; from their home folder if it is relative.
        variables: for the processes.
    """
    program = _program(arguments, python, variables)
    remote = f"cd {shlex.quote(directory)} && {program}"
    return shlex.join(
        ["gcloud", "compute", "tpus", "tpu-vm", "ssh", name, f"--zone={zone}", "--worker=all", f"--command={remote}"]
    )


def jobset(
    name: str,
    image: str,
    accelerator: str,
    topology: str,
    arguments: Sequence[str],
    *,
    slices: int = 1,
    chips_per_host: int | None = None,
    max_restarts: int = 0,
    python: str = "python3",
    variables: Mapping[str, str] | None = None,
) -> str:
    """A JobSet for ``kubectl apply``: one pod for each host of each slice.

    Args:
        name: of the JobSet, at most 40 characters.
        image: the container image, with the script and xlatrain in it.
        accelerator: v4, v5e, v5p, v6e or tpu7x.
        topology: chips along each axis of a slice: ``4x4``, ``2x2x4``.
        arguments: of Python.
        slices: number of slices; more than one compute together over the data-centre network.
        chips_per_host: None: 4, or all of a smaller slice.
        max_restarts: how often all pods are started again after one has failed.
        python: the interpreter in the image.
        variables: for the processes.

    Raises:
        ValueError: a name, accelerator or topology that there is not; chips that do not divide among hosts.
    """
    import yaml

    if not _KUBERNETES_NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a JobSet: 1 to 40 of a-z, 0-9 and -, beginning with a letter")
    if accelerator not in ACCELERATORS:
        raise ValueError(f"accelerator must be one of {', '.join(ACCELERATORS)}, not {accelerator!r}")
    if not _TOPOLOGY.fullmatch(topology):
        raise ValueError(f"topology must be like 4x4 or 2x2x4, not {topology!r}")
    if slices < 1 or max_restarts < 0:
        raise ValueError(f"slices must be at least 1 and max_restarts at least 0, not {slices} and {max_restarts}")
    chips = math.prod(int(size) for size in topology.split("x"))
    per_host = min(chips, CHIPS_PER_HOST) if chips_per_host is None else chips_per_host
    if per_host < 1 or chips % per_host:
        raise ValueError(f"the {chips} chips of {topology} do not divide among hosts of {per_host}")
    container = {
        "name": "train",
        "image": image,
        "command": [python, *arguments],
        "env": [{"name": key, "value": value} for key, value in {"PYTHONUNBUFFERED": "1", **(variables or {})}.items()],
        "ports": [{"containerPort": 8471}, {"containerPort": 8080}],  # ports of libtpu: between hosts, and between slices
        "resources": {"limits": {"google.com/tpu": per_host}},
    }
    pod = {
        "restartPolicy": "Never",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": 300,  # SIGTERM asks for a checkpoint
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[accelerator],
            "cloud.google.com/gke-tpu-topology": topology,
        },
        "containers": [container],
    }
    hosts = chips // per_host
    job = {"parallelism": hosts, "completions": hosts, "backoffLimit": 0, "template": {"spec": pod}}
    manifest: dict[str, Any] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {"maxRestarts": max_restarts},
            "replicatedJobs": [{"name": "slice", "replicas": slices, "template": {"spec": job}}],
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False)


def slurm(
    nodes: int,
    arguments: Sequence[str],
    *,
    name: str = "xlatrain",
    gpus_per_node: int = 0,
    partition: str | None = None,
    time: str | None = None,
    max_restarts: int = 0,
    python: str = "python3",
    directory: str,
    variables: Mapping[str, str] | None = None,
) -> str:
    """A batch script for ``sbatch``: one process on each node, with all of its GPUs.

    Args:
        nodes: how many.
        arguments: of Python.
        name: of the job.
        gpus_per_node: to ask for; 0: none are asked for.
        partition, time: as for sbatch; None: the cluster's default.
        max_restarts: how often the job is queued again after a failure.
        python: the interpreter on the nodes.
        directory: where to run.
        variables: for the processes.

    Raises:
        ValueError: fewer than one node; a text with a line break.
    """
    if nodes < 1 or gpus_per_node < 0 or max_restarts < 0:
        raise ValueError(f"nodes must be at least 1, not {nodes}; GPUs and restarts at least 0")
    options = {"job-name": name, "nodes": nodes, "ntasks-per-node": 1, "output": "%x-%j.log", "open-mode": "append"}
    options |= {"gpus-per-node": gpus_per_node} if gpus_per_node else {}
    options |= {key: value for key, value in (("partition", partition), ("time", time)) if value}
    if broken := [key for key, value in options.items() if re.search(r"\s", str(value))]:
        raise ValueError(f"{broken[0]} must not hold spaces or line breaks: {options[broken[0]]!r}")
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in options.items())]
    lines += ["#SBATCH --requeue"] if max_restarts else []
    lines += [
        "",
        f"cd {shlex.quote(directory)} || exit",
        f"srun --kill-on-bad-exit=1 {_program(arguments, python, variables or {})}",
    ]
    lines += ["status=$?"]
    if max_restarts:
        lines += [
            f'if [ "$status" -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_restarts} ]; then',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return "\n".join([*lines, 'exit "$status"', ""])


def _program(arguments: Sequence[str], python: str, variables: Mapping[str, str]) -> str:
    assignments = [f"{key}={value}" for key, value in {"PYTHONUNBUFFERED": "1", **variables}.items()]
    return shlex.join(["env", *assignments, python, *arguments])


def resuming(variables: Mapping[str, str], now: int) -> dict[str, str]:
    """``variables``, with the variable by which a run that is started again finds its checkpoints."""
    return {RESUME_SINCE: str(now), **variables}
