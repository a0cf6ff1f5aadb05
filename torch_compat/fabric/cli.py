"""The command ``fabric run``: ``python -m torch_compat.fabric run script.py``. API: ``lightning.fabric.cli``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torch_compat.fabric.connector import VARIABLES

_SUPPORTED_ACCELERATORS = ("cpu", "gpu", "cuda", "tpu", "auto")
_PROGRAM = "python -m torch_compat.fabric"
_CONSOLIDATE = "one file of a checkpoint folder is written by `xlatrain ckpt convert X.ckpt TARGET --to lightning`"


def main(args: argparse.Namespace, script_args: Sequence[str] | None = None) -> None:
    """Run a script whose ``Fabric`` takes what was chosen on the command line; in this process, which drives all devices.

    Args:
        args: ``script``, and the options ``accelerator``, ``strategy``, ``devices``, ``num_nodes``, ``node_rank``,
            ``main_address``, ``main_port``, ``precision``.
        script_args: the script's own.

    Raises:
        SystemExit: as the script does.
    """
    from torch_compat.__main__ import main as run

    os.environ.update(_variables(args))
    run([args.script, *(script_args or [])])


def command(arguments: Sequence[str]) -> None:
    """``fabric run [options] script.py [script's arguments]``; unknown options are the script's, as all after ``--`` is.

    Raises:
        SystemExit: as the script does; status 2: the arguments are wrong.
    """
    before, after = list(arguments), []
    if "--" in before:
        at = before.index("--")
        before, after = before[:at], before[at + 1 :]
    if before[:1] == ["consolidate"]:
        sys.exit(f"{_PROGRAM} consolidate: {_CONSOLIDATE}")
    args, rest = _parser().parse_known_args(before)
    if not os.path.exists(args.script):
        _parser().error(f"script {args.script!r} does not exist")
    if not 0 <= args.node_rank < args.num_nodes:
        _parser().error(f"--node-rank {args.node_rank}: expected the index of this host, from 0 to {args.num_nodes - 1}")
    main(args, [*rest, *after])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROGRAM, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="run")
    run = commands.add_parser(
        "run",
        allow_abbrev=False,
        help="run a script with a Fabric object",
        description="Runs a script whose Fabric takes the options given here. What else stands on the line is the script's.",
    )
    run.add_argument("script", help="a Python file with a Fabric object")
    run.add_argument("--accelerator", choices=_SUPPORTED_ACCELERATORS)
    run.add_argument("--strategy", help="ddp, fsdp, mesh, or the name of one that the script registers")
    run.add_argument("--devices", default="1", help="devices on each host: a number, indices (0,1), or auto; default: 1")
    run.add_argument("--num-nodes", "--num_nodes", type=int, default=1, help="hosts; start the command on each of them")
    run.add_argument("--node-rank", "--node_rank", type=int, default=0, help="index of this host")
    run.add_argument("--main-address", "--main_address", default="127.0.0.1", help="name or address of host 0")
    run.add_argument("--main-port", "--main_port", type=int, default=29400, help="a free port there")
    run.add_argument("--precision", help="32-true, bf16-mixed, bf16-true, 64-true, …")
    return parser


def _variables(args: argparse.Namespace) -> dict[str, str]:
    """The environment variables that a Fabric, and a process on one of several hosts (torchrun's names), is configured by."""
    chosen = {variable: getattr(args, name) for name, variable in VARIABLES.items()}
    found = {variable: str(value) for variable, value in chosen.items() if value is not None}
    found["LT_CLI_USED"] = "1"
    if args.num_nodes > 1:
        found |= {"MASTER_ADDR": args.main_address, "MASTER_PORT": str(args.main_port)}
        found |= {"WORLD_SIZE": str(args.num_nodes), "RANK": str(args.node_rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return found


if __name__ == "__main__":  # stock's module takes the script without the word
    command(["run", *sys.argv[1:]])
