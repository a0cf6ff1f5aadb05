"""``xlatrain doctor``: what is installed, what JAX computes on, and what is wrong with it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xlatrain.doctor import Examination

HELP = "check versions, devices, environment variables and a collective"


def main(arguments: Sequence[str]) -> int:
    """Run ``xlatrain doctor …``; returns 1 on a fault."""
    args = _parser().parse_args(arguments)
    from xlatrain.doctor import examine

    found = examine(args.timeout, joins=args.world)
    if args.json:
        print(json.dumps({"healthy": found.healthy, **dataclasses.asdict(found)}, indent=1))
    else:
        print("\n".join(_lines(found)))
    return 0 if found.healthy else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="xlatrain doctor", description=f"{HELP}. The exit status is 1 on a fault.")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="how long JAX may take to start and compute (default: 60)"
    )
    parser.add_argument(
        "--world",
        action="store_true",
        help="join the other processes, which run this too (xlatrain launch, srun, …), and sum over all",
    )
    return parser


def _lines(found: Examination) -> Iterator[str]:
    system = found.system
    yield f"Python {system['python']} ({system['executable']}) on {system['platform']}, {system['cpu_cores']} cores"
    yield "installed: " + ", ".join(f"{name} {version}" for name, version in found.versions.items() if version)
    yield from _device_lines(found)
    if found.environment:
        yield "environment:"
        yield from (f"  {name}={value}" for name, value in found.environment.items())
    free = ", ".join(f"{name} {size >> 30} GiB" for name, size in found.storage["free_bytes"].items())
    cache = found.storage["compilation_cache"]
    kept = f"{cache['folder']}: {cache['files']} files, {cache['bytes'] >> 20} MiB" if cache else "off"
    yield f"free space: {free}; compiled programs: {kept}"
    yield ""
    for level in ("fault", "warning"):
        yield from (f"{level.upper()} {finding}" for finding in found.findings if finding.level == level)
    if not found.findings:
        yield "nothing wrong was found"


def _device_lines(found: Examination) -> Iterator[str]:
    if "error" in found.probe:
        return  # among the faults
    if (world := found.probe.get("world")) is not None:
        yield f"process {world['process']} of {world['processes']}, says {world['source']}"
    devices = found.probe["devices"]
    memory = devices[0]["memory_bytes"]
    each = f", {memory / 2**30:.1f} GiB each" if memory else ""
    kinds = ", ".join(sorted({device["kind"] for device in devices}))
    described = "simulated on the CPU; Trainer(devices=N) makes N" if found.probe["platform"] == "cpu" else f"{kinds}{each}"
    yield f"devices: {len(devices)} × {found.probe['platform']} ({described})"
    test = found.probe["collective"]
    verdict = "right" if test["correct"] else "WRONG"
    size = test["bytes_per_device"] >> 20
    yield f"sum of {size} MiB over {test['devices']} devices: {verdict}, {test['median_ms']:g} ms (median of {test['repeats']})"
