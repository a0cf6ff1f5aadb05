"""``python -m benchmarks.checkpoint``: saving and restoring the same arrays by xlatrain, by Orbax itself, by torch.

Interleaved, each repeated; medians. *Blocking* is the time until the caller may change the arrays, *total* until the checkpoint
is committed. torch writes from CPU tensors of the same bytes, by ``torch.save`` and by ``torch.distributed.checkpoint``, which
block throughout. Peaks are of resident memory above what the arrays take before.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import jax
import numpy as np
import orbax.checkpoint as ocp
import psutil
import torch
import torch.distributed.checkpoint as dcp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import hardware
from xlatrain import checkpoint
from xlatrain.mesh import make_mesh

ROOT = Path(__file__).resolve().parents[1]
Timed = tuple[float, float]


@contextmanager
def peak_above_now() -> Iterator[list[int]]:
    """The list gets the largest growth of this process's resident memory, sampled every 2 ms."""
    process = psutil.Process()
    before, found, over = process.memory_info().rss, [0], threading.Event()

    def sample() -> None:
        while not over.wait(0.002):
            found[0] = max(found[0], process.memory_info().rss - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def timed(start: Callable[[], Callable[[], Any]]) -> Timed:
    """Seconds until ``start`` returns, and until what it gave has returned."""
    began = time.perf_counter()
    finish = start()
    blocked = time.perf_counter() - began
    finish()
    return blocked, time.perf_counter() - began


def ways(arrays: dict[str, jax.Array]) -> dict[str, tuple[Callable[[Path], Timed], Callable[[Path], Any]]]:
    """Name → save to a path, restore from it."""
    template = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in arrays.items()}
    tensors = {name: torch.from_numpy(np.array(a)) for name, a in arrays.items()}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    restore = {name: ocp.ArrayRestoreArgs(sharding=a.sharding) for name, a in arrays.items()}

    def by_orbax(path: Path) -> Timed:
        with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as saver:

            def start() -> Callable[[], Any]:
                saver.save(path, args=ocp.args.PyTreeSave(arrays))
                return saver.wait_until_finished

            return timed(start)

    def blocking(save: Callable[[], Any]) -> Timed:
        return timed(lambda: (save() and (lambda: None)) or (lambda: None))

    def dcp_restore(path: Path) -> None:
        dcp.load({name: torch.empty_like(tensor) for name, tensor in tensors.items()}, checkpoint_id=path, no_dist=True)

    return {
        "xlatrain": (
            lambda path: timed(lambda: checkpoint.save(path, arrays).wait),
            lambda path: jax.block_until_ready(checkpoint.open_checkpoint(path).restore(template)),
        ),
        "orbax": (
            by_orbax,
            lambda path: jax.block_until_ready(handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore))),
        ),
        "torch.save": (lambda path: blocking(lambda: torch.save(tensors, path)), torch.load),
        "torch dcp": (lambda path: blocking(lambda: dcp.save(tensors, checkpoint_id=path, no_dist=True)), dcp_restore),
    }


def measure(megabytes: int, repeats: int, folder: Path) -> dict[str, dict[str, float]]:
    mesh = make_mesh({"fsdp": jax.device_count()})
    side = NamedSharding(mesh, PartitionSpec("fsdp"))
    rng = np.random.default_rng(0)
    arrays = {
        f"layer{i}/weight": jax.device_put(rng.standard_normal((2048, 2048), np.float32), side) for i in range(megabytes // 16)
    }
    found: dict[str, dict[str, list[float]]] = {}
    for repeat in range(repeats + 1):  # the first warms up
        for name, (save, restore) in ways(arrays).items():
            path = folder / f"{name}-{repeat}"
            with peak_above_now() as saving:
                blocked, total = save(path)
            began = time.perf_counter()
            with peak_above_now() as restoring:
                restore(path)
            took = time.perf_counter() - began
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            if repeat:
                row = found.setdefault(name, {key: [] for key in ("blocking_s", "total_s", "restore_s", "save_mb", "restore_mb")})
                for key, value in zip(row, (blocked, total, took, saving[0] / 1e6, restoring[0] / 1e6), strict=True):
                    row[key].append(value)
    return {name: {key: round(statistics.median(values), 3) for key, values in row.items()} for name, row in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where to write (default: a temporary directory)")
    args = parser.parse_args()
    machine = {**hardware.describe(), "load_before": hardware.load()}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure(args.megabytes, args.repeats, Path(folder))
    for name, row in rows.items():
        print(f"{name:<12}" + "  ".join(f"{key} {value:9.3f}" for key, value in row.items()))
    ratios = {key: round(rows["xlatrain"][key] / rows["orbax"][key], 2) for key in ("blocking_s", "total_s", "restore_s")}
    print("xlatrain / orbax:", ratios)
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d_%H%M")
    target = ROOT / "benchmarks" / "results" / f"{today}_checkpoint.json"
    target.write_text(json.dumps({"date": today, "machine": machine, "megabytes": args.megabytes, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
