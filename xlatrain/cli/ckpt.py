"""``xlatrain ckpt``: look at checkpoints, compare, verify, convert and remove them."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlatrain.checkpoint import ArrayMetadata, Checkpoint
    from xlatrain.cli.torch_file import TorchFile

HELP = "list, show, compare, verify, convert and remove checkpoints"

FORMATS_GROUP = "xlatrain.checkpoint_formats"
"""Entry points of this group are functions ``(source, target, **options)`` that convert a checkpoint, named after the format."""


def main(arguments: Sequence[str]) -> int:
    """Run ``xlatrain ckpt …``: 0, or 1 where checkpoints differ, are damaged, or something is wrong."""
    args = _parser().parse_args(arguments)
    import jax

    from xlatrain.checkpoint import CheckpointError

    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # reading files must not take an accelerator from a run on this host

    try:
        return args.run(args)
    except (CheckpointError, OSError, ValueError, pickle.UnpicklingError) as error:
        print(f"xlatrain ckpt {args.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="xlatrain ckpt", description=HELP)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print JSON")
        return sub

    command("ls", _list, "checkpoints of a directory, the newest first").add_argument("directory", nargs="?", default=".")
    show = command("show", _show, "arrays and facts of a checkpoint")
    show.add_argument("checkpoint")
    diff = command("diff", _diff, "differences between two checkpoints; status 1 if there are any")
    diff.add_argument("first")
    diff.add_argument("second")
    verify = command("verify", _verify, "read every byte and compare digests; status 1 on damage")
    verify.add_argument("checkpoints", nargs="+", metavar="checkpoint")
    convert = command("convert", _convert, "write a checkpoint in another format")
    convert.add_argument("source")
    convert.add_argument("target")
    convert.add_argument("--to", required=True, choices=sorted(_formats()), metavar="FORMAT", help=", ".join(sorted(_formats())))
    convert.add_argument("--trusted", action="store_true", help="unpickle what the safe loader does not read: may run any code")
    convert.add_argument("--prefix", help="safetensors: only weights whose names begin with it, and without it")
    convert.add_argument("--max-file-size", type=int, metavar="BYTES", help="of a safetensors file (default: 5 GB)")
    prune = command("prune", _prune, "remove the checkpoints of a directory that no rule keeps; never the newest complete one")
    prune.add_argument("directory")
    prune.add_argument("--last", type=int, metavar="N", help="keep the newest N")
    prune.add_argument("--best", type=int, metavar="K", help="keep the best K by --monitor")
    prune.add_argument("--monitor", metavar="METRIC")
    prune.add_argument("--mode", choices=("min", "max"), default="min")
    prune.add_argument("--every-n-steps", type=int, metavar="N", help="keep multiples of N steps")
    prune.add_argument("--younger-than-hours", type=float, metavar="H")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    return parser


def _formats() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=FORMATS_GROUP)}


def _list(args: argparse.Namespace) -> int:
    from xlatrain.checkpoint import entries

    _check_directory(args.directory)
    links = _links(args.directory)
    found = [
        {
            "name": entry.path.name,
            "link": ", ".join(name for name, target in links.items() if target == entry.path.name),
            "committed": _when(entry.committed_ns),
            "bytes": entry.size_bytes,
            **{name: (entry.facts or {}).get(name) for name in ("step", "epoch", "metrics")},
            "state": entry.problem or "complete",
        }
        for entry in entries(args.directory)
    ]
    if args.json:
        return _print_json(found)
    if not found:
        print(f"no checkpoints in {args.directory}")
        return 0
    rows = [{**one, "bytes": _size(one["bytes"]), "metrics": _metrics(one["metrics"])} for one in found]
    return _print_table(rows)


def _check_directory(directory: str) -> None:
    if "://" not in directory and not os.path.isdir(directory):
        raise FileNotFoundError(f"no directory at {directory}; give the one that holds the checkpoints (….ckpt)")


def _links(directory: str) -> dict[str, str]:
    """The name of each symbolic link, such as ``last.ckpt`` of ``save_last="link"`` → the name beside it that it leads to."""
    if "://" in directory:
        return {}
    with os.scandir(directory) as entries:
        return {entry.name: os.path.basename(os.path.realpath(entry.path)) for entry in entries if entry.is_symlink()}


def _show(args: argparse.Namespace) -> int:
    opened = _opened(args.checkpoint)
    arrays = opened.array_metadata()
    about = {
        "path": str(opened.path),
        "committed": _when(opened.committed_ns) if opened.committed_ns else "",
        "bytes": opened.size_bytes,
        "facts": dict(opened.facts),
        "versions": dict(opened.versions),
        "files": list(opened.files),
        "elements": sum(math.prod(entry.shape) for entry in arrays.values()),
    }
    described = [{"name": name, **_described(entry)} for name, entry in arrays.items()]
    if args.json:
        return _print_json({**about, "arrays": described})
    for name, value in about.items():
        print(f"{name}: {_size(value) if name == 'bytes' else value}")
    return _print_table(described)


def _opened(path: str) -> Checkpoint | TorchFile:
    from xlatrain.checkpoint import open_checkpoint

    if os.path.isfile(path):
        from xlatrain.cli.torch_file import TorchFile

        return TorchFile(path)
    return open_checkpoint(path)


def _described(entry: ArrayMetadata) -> dict[str, Any]:
    return {"shape": list(entry.shape), "dtype": entry.dtype}


def _diff(args: argparse.Namespace) -> int:
    first, second = (_opened(path) for path in (args.first, args.second))
    ours, theirs = first.array_metadata(), second.array_metadata()
    rows = []
    for name in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            rows.append({"array": name, "difference": f"only in the {'second' if one is None else 'first'}"})
        elif (one.shape, one.dtype) != (other.shape, other.dtype):
            rows.append({"array": name, "difference": f"{one.dtype}{list(one.shape)} → {other.dtype}{list(other.shape)}"})
        elif difference := _difference(first, second, name):
            rows.append({"array": name, "difference": difference})
    if args.json:
        _print_json(rows)
    elif rows:
        _print_table(rows)
    else:
        print(f"the {len(ours)} arrays are the same")
    return 1 if rows else 0


def _difference(first: Any, second: Any, name: str) -> str:
    import numpy as np

    values = [opened.restore_numpy([name])[name] for opened in (first, second)]
    if values[0].tobytes() == values[1].tobytes():
        return ""
    differing = int((values[0] != values[1]).sum())
    largest = np.abs(values[0].astype(np.float64) - values[1].astype(np.float64)).max() if values[0].size else 0.0
    return f"{differing} of {values[0].size} values, largest difference {largest:.3g}"


def _verify(args: argparse.Namespace) -> int:
    from xlatrain.checkpoint import CheckpointError, verify

    found, unreadable = [], {}
    for path in args.checkpoints:
        try:
            found.append(verify(path))
        except (CheckpointError, OSError, ValueError) as error:  # the others are looked at all the same
            unreadable[path] = str(error)
    if args.json:
        told = [{"path": path, "intact": False, "error": error} for path, error in unreadable.items()]
        _print_json([{**vars(one), "intact": one.intact} for one in found] + told)
        return 0 if all(one.intact for one in found) and not unreadable else 1
    for one in found:
        print(f"{one.path}: {'intact' if one.intact else 'DAMAGED'}, {_size(one.bytes_read)}")
        for kind, damaged in (("file", one.files), ("array", one.arrays)):
            for name, what in damaged.items():
                print(f"  {kind} {name}: {what}")
        for name in one.foreign:
            print(f"  {name}: not written by xlatrain")
    for path, error in unreadable.items():
        print(f"{path}: NOT READABLE: {error}")
    return 0 if all(one.intact for one in found) and not unreadable else 1


def _convert(args: argparse.Namespace) -> int:
    options = {"weights_only": False} if args.trusted else {}
    for name in ("max_file_size", "prefix"):
        if (value := getattr(args, name)) is not None:
            if args.to != "safetensors":
                raise ValueError(f"--{name.replace('_', '-')} is for --to safetensors, not {args.to}")
            options[name] = value
    written = _formats()[args.to].load()(args.source, args.target, **options)
    names = [str(path) for path in written]
    if args.json:
        return _print_json(names)
    print("wrote " + ", ".join(names))
    return 0


def _prune(args: argparse.Namespace) -> int:
    from xlatrain.checkpoint import Retention, prune

    _check_directory(args.directory)
    if all(rule is None for rule in (args.last, args.best, args.every_n_steps, args.younger_than_hours)):
        raise ValueError(
            "no rule says which checkpoints to keep: give --last, --best with --monitor, --every-n-steps or --younger-than-hours"
        )
    if (args.best is None) != (args.monitor is None):
        raise ValueError("--best and --monitor go together: the metric that says which are the best")
    age = None if args.younger_than_hours is None else args.younger_than_hours * 3600
    policy = Retention(args.last, args.best, args.monitor, args.mode, args.every_n_steps, age)
    removed = [str(path) for path in prune(args.directory, policy, dry_run=args.dry_run)]
    if args.json:
        return _print_json(removed)
    print("\n".join(f"{'would remove' if args.dry_run else 'removed'} {path}" for path in removed) or "nothing to remove")
    return 0


def _when(committed_ns: int) -> str:
    return datetime.datetime.fromtimestamp(committed_ns / 1e9, datetime.UTC).isoformat(timespec="seconds")


def _size(size: int | None) -> str:
    if size is None:
        return "?"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _metrics(metrics: dict[str, float] | None) -> str:
    return ", ".join(f"{name}={value:.4g}" for name, value in (metrics or {}).items())


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=1))
    return 0


def _print_table(rows: Sequence[dict[str, Any]]) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0] if rows else ():
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    # In a pipe nothing is folded: names stay whole for whoever reads them.
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 10_000).print(table)
    return 0
