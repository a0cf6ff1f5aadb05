"""``python -m benchmarks.born_sharded``: time and memory of making a 1.1e9-parameter Llama, beside stock torch.

Stock torch makes it whole in one process; here N processes on this machine make a shard each. Peaks are of the largest
process.
With ``--train``, two steps in bfloat16 are taken as well, and the peak is that of the whole run; with ``--floor`` also by a loop
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
from pathlib import Path
from typing import Any

from benchmarks import hardware

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "scripts" / "born_sharded.py"
FLOOR = ROOT / "benchmarks" / "scripts" / "born_sharded_floor.py"


def measured(command: list[str]) -> list[dict[str, Any]]:
    """What each process printed.

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


def born(processes: int, flags: list[str], what: str = "init", command: Sequence[str] = (str(SCRIPT), "born")) -> dict[str, Any]:
    launch = [sys.executable, "-m", "xlatrain.cli", "launch", "--processes", str(processes), "--devices-per-process", "2"]
    each = measured([*launch, *command, "--processes", str(processes), *flags])
    worst = {key: max(one[key] for one in each) for key in each[0]}
    return {"what": f"{what}, {processes} processes x 2 devices", **worst, "cpu": sum(one["cpu"] for one in each)}


def line_of(row: dict[str, Any]) -> str:
    giga = {key: row[key] / 1e9 for key in ("shards", "base", "peak")}
    rest = giga["peak"] - giga["shards"] - giga["base"]
    return (
        f"{row['what']:<36} {row['seconds']:7.1f} s wall {row['cpu']:7.1f} s cpu   a process: peak {giga['peak']:5.2f} GB = "
        f"shards {giga['shards']:.2f} + base {giga['base']:.2f} + {rest:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.born_sharded", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--train", action="store_true", help="also take two training steps, in bfloat16 with SGD")
    parser.add_argument("--floor", action="store_true", help="also take the training steps by hand-written JAX")
    parser.add_argument("--precision", default="bf16-true", choices=["bf16-true", "32-true"], help="of the training steps")
    args = parser.parse_args()
    flags = ["--hidden", str(args.hidden), "--layers", str(args.layers)]
    machine = {**hardware.describe(), "load_before": hardware.load()}
    print(", ".join(f"{name} {value}" for name, value in machine.items()), end="\n\n")
    runs = [lambda: stock(flags), *(lambda n=n: born(n, flags) for n in args.processes)]
    training = [*flags, "--steps", "2", "--precision", args.precision]
    if args.train:
        runs += [lambda n=n: born(n, training, f"init and training, {args.precision}") for n in args.processes]
    if args.floor:
        runs += [lambda n=n: born(n, training, f"hand-written JAX, {args.precision}", [str(FLOOR)]) for n in args.processes]
        ordered = [str(FLOOR), "--ordered"]
        runs += [lambda n=n: born(n, training, f"and ordered, {args.precision}", ordered) for n in args.processes]
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
