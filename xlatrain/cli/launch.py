"""``xlatrain launch``: several processes of one script: on this machine, over ssh, or as templates for a scheduler."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

HELP = "run a script as several processes of one world: here, on hosts over ssh, or print what starts it on a cluster"

_NEEDED = {
    "ssh": ("hosts",),
    "gcloud": ("name", "zone"),
    "jobset": ("name", "image", "accelerator", "topology"),
    "slurm": ("nodes",),
}
_ONLY_FOR = {
    "processes": "this machine",
    "devices_per_process": "this machine",
    "elastic": "this machine",
    "rejoin_after": "this machine",
    "memory_steps": "this machine",
    "hosts": "ssh",
    "zone": "gcloud",
    "image": "jobset",
    "accelerator": "jobset",
    "topology": "jobset",
    "slices": "jobset",
    "chips_per_host": "jobset",
    "nodes": "slurm",
    "gpus_per_node": "slurm",
    "partition": "slurm",
    "time": "slurm",
}

_WATCH = {
    "join-within": "seconds for all processes to come; those that did not are named (default: 300)",
    "dead-after": "seconds without a sign of life after which a process is named, and all end (default: 60)",
    "slow-after": "seconds that the others wait for a process until it is named, with its stacks (default: 45; 0: never)",
    "hang-after": "seconds without progress inside a run after which the one behind is named, and all end; 0: never",
}


def main(arguments: Sequence[str]) -> int:
    """Run ``xlatrain launch …``; returns the exit status of the launch."""
    args = _parser().parse_args(arguments)
    program = ["-m", *args.module] if args.module else args.script
    if not program or program == ["-m"]:
        print("xlatrain launch: say what to run: a script, or -m and a module", file=sys.stderr)
        return 2
    try:
        _check(args)
        plan = {"XLATRAIN_PLAN": args.plan} if args.plan else {}
        variables = {**_watch_variables(args), **_variables(args.env), **plan}
        if args.print:
            print(_printed(args, program, variables), end="")
            return 0
        return _on_hosts(args, program, variables) if args.hosts else _here(args, program, variables)
    except ValueError as error:
        print(f"xlatrain launch: {error}", file=sys.stderr)
        return 2


def _check(args: argparse.Namespace) -> None:
    """Every option that is given is used, and all that are needed are given."""
    target = args.print or ("ssh" if args.hosts else "this machine")
    for name, owner in _ONLY_FOR.items():
        if getattr(args, name) is not None and owner != target:
            hint = f"it is for --print {owner}" if owner in ("gcloud", "jobset", "slurm") else f"it is for {owner}"
            raise ValueError(f"{_flag(name)} does nothing here ({target}): {hint}")
    if args.elastic is not None:
        if args.processes is not None:
            raise ValueError("--elastic says how many processes there are, from MIN to MAX: leave --processes out")
        _bounds(args.elastic)
        args.processes = 0  # it is not needed then
    elif given := [name for name in ("rejoin_after", "memory_steps") if getattr(args, name) is not None]:
        raise ValueError(f"{_flag(given[0])} is for --elastic MIN:MAX: without it nothing goes on with fewer processes")
    if missing := [_flag(name) for name in _NEEDED.get(target, ("processes",)) if getattr(args, name) is None]:
        raise ValueError(f"{target} needs {', '.join(missing)}")
    if args.plan and target == "this machine" and not os.path.isfile(args.plan):
        raise ValueError(f"--plan {args.plan}: there is no such file")
    if args.name and target not in ("gcloud", "jobset", "slurm"):
        raise ValueError("--name is for --print gcloud, jobset and slurm")
    if args.coordinator_port and args.print in ("gcloud", "jobset", "slurm"):
        raise ValueError(f"--coordinator-port does nothing with --print {args.print}: the cluster says where process 0 listens")
    if args.max_restarts and args.print in ("ssh", "gcloud"):
        again = "leave --print out" if args.print == "ssh" else "use tpu_scripts/supervise.sh"
        raise ValueError(f"printed commands run once; for --max-restarts {again}")
    if (args.directory or args.python) and target == "this machine":
        raise ValueError("--directory and --python are for other hosts; here the current ones are used")
    if args.directory and target == "jobset":
        raise ValueError("--directory does nothing with --print jobset: set WORKDIR in the image")


def _bounds(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    least, most = map(int, found.groups()) if found else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(f"--elastic takes MIN:MAX, numbers of processes with 1 <= MIN <= MAX, e.g. 6:8; not {text!r}")
    return least, most


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variables(given: Sequence[str]) -> dict[str, str]:
    for pair in given:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=[^\n]*", pair):
            raise ValueError(f"--env takes NAME=VALUE, not {pair!r}")
    return dict(pair.split("=", 1) for pair in given)


def _watch_variables(args: argparse.Namespace) -> dict[str, str]:
    """The options of the watch as environment variables of the processes."""
    given = {name: getattr(args, name.replace("-", "_")) for name in _WATCH}
    return {f"XLATRAIN_{name.replace('-', '_').upper()}": f"{value:g}" for name, value in given.items() if value is not None}


def _here(args: argparse.Namespace, program: list[str], variables: dict[str, str]) -> int:
    from xlatrain.cluster.elastic import launch_elastic
    from xlatrain.cluster.launch import launch

    command, devices = [sys.executable, *program], 1 if args.devices_per_process is None else args.devices_per_process
    options: dict[str, Any] = {
        "coordinator_port": args.coordinator_port,
        "grace_s": args.grace_seconds,
        "max_restarts": args.max_restarts,
        "environment": {**os.environ, **variables},
    }
    if args.elastic is None:
        return launch(command, args.processes, devices, **options)
    back = 60.0 if args.rejoin_after is None else args.rejoin_after
    return launch_elastic(command, *_bounds(args.elastic), devices, rejoin_after=back, memory_steps=args.memory_steps, **options)


def _on_hosts(args: argparse.Namespace, program: list[str], variables: dict[str, str]) -> int:
    from xlatrain.cluster.hosts import PORT, launch_on_hosts

    return launch_on_hosts(
        args.hosts.split(","),
        program,
        python=args.python or sys.executable,
        directory=args.directory,
        port=args.coordinator_port or PORT,
        variables=variables,
        grace_s=args.grace_seconds,
        max_restarts=args.max_restarts,
    )


def _printed(args: argparse.Namespace, program: list[str], variables: dict[str, str]) -> str:
    from xlatrain.cluster import cluster_templates as cluster_templates
    from xlatrain.cluster import hosts

    if args.max_restarts:
        variables = cluster_templates.resuming(variables, int(time.time()))
    directory = args.directory or os.getcwd()
    if args.print == "ssh":
        python, port = args.python or sys.executable, args.coordinator_port or hosts.PORT
        names = args.hosts.split(",")
        commands = hosts.ssh_commands(names, program, python=python, directory=directory, port=port, variables=variables)
        return "".join(f"{shlex.join(command)}\n" for command in commands)
    if args.print == "gcloud":
        where, python = args.directory or "xlatrain/code", args.python or "../venv/bin/python"
        return cluster_templates.gcloud(args.name, args.zone, program, python=python, directory=where, variables=variables) + "\n"
    if args.print == "jobset":
        return cluster_templates.jobset(
            args.name,
            args.image,
            args.accelerator,
            args.topology,
            program,
            slices=1 if args.slices is None else args.slices,
            chips_per_host=args.chips_per_host,
            max_restarts=args.max_restarts,
            python=args.python or "python3",
            variables=variables,
        )
    return cluster_templates.slurm(
        args.nodes,
        program,
        name=args.name or "xlatrain",
        gpus_per_node=args.gpus_per_node or 0,
        partition=args.partition,
        time=args.time,
        max_restarts=args.max_restarts,
        python=args.python or sys.executable,
        directory=directory,
        variables=variables,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xlatrain launch",
        description=HELP,
        usage="xlatrain launch (--processes N | --elastic MIN:MAX | --hosts A,B | --print WHAT) [options] (script | -m module) …",
    )
    add = parser.add_argument
    add("--processes", "-n", type=int, metavar="N", help="number of processes on this machine")
    add(
        "--elastic",
        metavar="MIN:MAX",
        help="on this machine: begin with MAX processes, go on with MIN or more when some are lost",
    )
    add("--rejoin-after", type=float, metavar="S", help="with --elastic: when one that was lost is started again (default: 60)")
    add(
        "--memory-steps",
        type=int,
        metavar="N",
        help="with --elastic: lose at most N optimizer steps with a process: the state is kept in the memory of two hosts",
    )
    add("--devices-per-process", type=int, metavar="N", help="CPU devices of each (default: 1)")
    add("--hosts", metavar="A,B,…", help="run one process on each of these hosts, through ssh")
    add("--print", choices=tuple(_NEEDED), help="start nothing; print the commands, or the file for the scheduler")
    add("--coordinator-port", type=int, metavar="PORT", help="where process 0 listens (default: a free port; on hosts 8476)")
    add(
        "--grace-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="from asking a process to end until killing it (default: 10)",
    )
    add("--max-restarts", type=int, default=0, metavar="N", help="start all again after a failure, from the newest checkpoint")
    for name, what in _WATCH.items():
        add(f"--{name}", type=float, metavar="S", help=what)
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for the processes; not for secrets")
    add("--plan", metavar="FILE", help="a plan of `xlatrain preflight`, for runs that choose no strategy; its path there")
    add("--directory", metavar="DIR", help="where to run on the hosts (default: the current one's path)")
    add("--python", metavar="PATH", help="the interpreter there (default: this one's path; in an image python3)")
    there = parser.add_argument_group("for --print gcloud, jobset, slurm")
    there.add_argument("--name", help="of the TPU VM, the JobSet or the job")
    there.add_argument("--zone", help="gcloud: of the TPU VM")
    there.add_argument("--image", help="jobset: the container image")
    there.add_argument("--accelerator", help="jobset: v4, v5e, v5p, v6e or tpu7x")
    there.add_argument("--topology", help="jobset: chips along each axis of a slice, e.g. 4x4")
    there.add_argument("--slices", type=int, metavar="N", help="jobset: number of slices (default: 1)")
    there.add_argument("--chips-per-host", type=int, metavar="N", help="jobset: default 4")
    there.add_argument("--nodes", type=int, metavar="N", help="slurm: number of nodes")
    there.add_argument("--gpus-per-node", type=int, metavar="N", help="slurm: GPUs of each")
    there.add_argument("--partition", help="slurm: as for sbatch")
    there.add_argument("--time", help="slurm: as for sbatch")
    add("-m", dest="module", nargs=argparse.REMAINDER, help="the module to run, as for python, with its arguments")
    add("script", nargs=argparse.REMAINDER, help="the script to run, with its arguments")
    return parser
