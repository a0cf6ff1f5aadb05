"""``python -m benchmarks.born_sharded``: time and memory of making a 1.1e9-parameter Llama, beside stock torch.

Stock torch makes it whole in one process; here N processes on this machine make a shard each. Peaks are of the largest
process. Each is compared with its bound: the process's shards (in training as much again for gradients, and its activations), the
largest parameter for each of its devices, and a base that does not grow with the model. The base is measured: what the same run
of a model of the same depth takes whose hidden size is 64, less that model's own bytes. Activations are what a token more takes
in the compiled step, times the tokens.

With ``--train``, two steps are taken as well, and the peak is that of the whole run; with ``--floor`` also by a loop
written by hand in JAX (``scripts/born_sharded_floor.py``), measured by the same means: what that takes too is XLA's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import hardware

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "scripts" / "born_sharded.py"
FLOOR = ROOT / "benchmarks" / "scripts" / "born_sharded_floor.py"


def measured(command: list[str]) -> list[dict[str, Any]]:
    """The numbers that each process printed.

    Raises:
        RuntimeError: the command failed; the text has the end of its output.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    found = [json.loads(line.split("measured ", 1)[1]) for line in done.stdout.splitlines() if "measured {" in line]
    if done.returncode != 0 or not found:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return found


def stock(flags: list[str]) -> dict[str, Any]:
    (one,) = measured([sys.executable, str(SCRIPT), "stock", *flags])
    return {"what": "stock torch, 1 process", **one}


@dataclass(frozen=True)
class World:
    """Processes on this machine, with as many CPU devices each."""

    processes: int
    devices: int

    def __str__(self) -> str:
        return f"{self.processes} processes x {self.devices} device{'s' if self.devices > 1 else ''}"

    def run(self, flags: Sequence[str], command: Sequence[str] = (str(SCRIPT), "born")) -> dict[str, Any]:
        """The largest of each number that the processes print; processor time of all."""
        sizes = ["--processes", str(self.processes), "--devices", str(self.devices)]
        launch = ["launch", "--processes", str(self.processes), "--devices-per-process", str(self.devices)]
        each = measured([sys.executable, "-m", "xlatrain.cli", *launch, *command, *sizes, *flags])
        worst = {key: max(one[key] for one in each) for key in each[0]}
        return {**worst, "cpu": sum(one["cpu"] for one in each)}


TOKENS = 16
"""Of a device's batch."""


def activations(world: World, flags: Sequence[str]) -> int:
    """Bytes in a process: compiled for the world's devices, a step with more tokens takes so much more."""

    def temporaries(tokens: int) -> int:
        devices = str(world.processes * world.devices)
        (one,) = measured([sys.executable, str(SCRIPT), "temporaries", *flags, "--devices", devices, "--length", str(tokens)])
        return one["temporaries"]

    return (temporaries(4 * TOKENS) - temporaries(TOKENS)) // 3 * world.devices


def born(world: World, size: Sequence[str], training: Sequence[str] = ()) -> dict[str, Any]:
    """The model made, and trained if flags for that are given, in a world; with the parts of its bound."""
    row, tiny = world.run([*size, *training]), world.run([*size, "--hidden", "64", *training])
    parts = {
        "shards": row["shards"],
        **({"gradients": row["gradients"], "activations": activations(world, [*size, *training])} if training else {}),
        "parameter x devices": row["largest"] * world.devices,
        "base": tiny["peak"] - tiny["shards"] - (tiny["gradients"] if training else 0) - tiny["largest"] * world.devices,
    }
    what = f"init and training, {training[-1]}" if training else "init"
    return {"what": f"{what}, {world}", **row, "parts": parts, "left": row["peak"] - sum(parts.values())}


def floor(world: World, what: str, flags: Sequence[str]) -> dict[str, Any]:
    row = world.run(flags, [str(FLOOR)])
    parts = {"shards": row["shards"], "gradients": row["shards"], "base before JAX starts": row["base"]}
    return {"what": f"{what}, {flags[-1]}, {world}", **row, "parts": parts}


def line_of(row: dict[str, Any]) -> str:
    parts = row.get("parts", {"model": row["shards"], "base": row["base"]})
    listed = " + ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    left = (row["peak"] - sum(parts.values())) / 1e9
    verdict = "" if "left" not in row else ": met" if left <= 0 else ": missed"
    return (
        f"{row['what']:<52} {row['seconds']:6.1f} s wall {row['cpu']:6.1f} s cpu   a process: peak {row['peak'] / 1e9:5.2f} GB = "
        f"{listed} {left:+.2f}{verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.born_sharded", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--devices-per-process", type=int, default=2)
    parser.add_argument("--no-stock", action="store_true", help="leave out stock torch, and making without training")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--train", action="store_true", help="also take two training steps, with SGD")
    parser.add_argument("--floor", action="store_true", help="also take the training steps by hand-written JAX")
    parser.add_argument("--precision", default="bf16-true", choices=["bf16-true", "32-true"], help="of the training steps")
    args = parser.parse_args()
    flags = ["--hidden", str(args.hidden), "--layers", str(args.layers), "--length", str(TOKENS)]
    machine = {**hardware.describe(), "load_before": hardware.load()}
    print(", ".join(f"{name} {value}" for name, value in machine.items()), end="\n\n")
    worlds = [World(processes, args.devices_per_process) for processes in args.processes]
    training = ["--steps", "2", "--precision", args.precision]
    runs = [] if args.no_stock else [lambda: stock(flags), *(lambda w=w: born(w, flags) for w in worlds)]
    if args.train:
        runs += [lambda w=w: born(w, flags, training) for w in worlds]
    if args.floor:
        runs += [lambda w=w: floor(w, "hand-written JAX", [*flags, *training]) for w in worlds]
        runs += [lambda w=w: floor(w, "and ordered", ["--ordered", *flags, *training]) for w in worlds]
    rows = []
    for run in runs:
        rows.append(run())
        print(line_of(rows[-1]), flush=True)
    print(f"{rows[0]['parameters']:,} parameters")
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d_%H%M")
    target = ROOT / "benchmarks" / "results" / f"{today}_born_sharded.json"
    target.write_text(json.dumps({"date": today, "machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
