"""``python -m benchmarks.checkpoint``: saving and restoring the same arrays by xlatrain, by Orbax itself, by torch.

*Blocking* is the time until the caller may change the arrays, *total* until the checkpoint is committed. torch writes from CPU
tensors of the same bytes, by ``torch.save`` and by ``torch.distributed.checkpoint``, which block throughout.

What is compared must meet the same machine: each round saves and restores new values once by every way, in an order drawn by lot
(turns would always put the same way before another, which leaves memory as it likes), and what a save left for the disk is
written before the next begins. Ratios are medians over rounds of
the ratio in a round. Restores read what was just written, from memory. Peaks are of resident memory above what was there before,
in rounds of their own, since sampling them takes time from what is measured.
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
from xlatrain.mesh.mesh import make_mesh

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


TIMES = ("blocking_s", "total_s", "save_cpu_s", "restore_s", "restore_cpu_s")
PEAKS = ("save_mb", "restore_mb")


def new_arrays(megabytes: int, rng: np.random.Generator) -> dict[str, jax.Array]:
    """Arrays as training has them: they have not been copied to the host yet."""
    side = NamedSharding(make_mesh({"fsdp": jax.device_count()}), PartitionSpec("fsdp"))
    values = {f"layer{i}/weight": rng.standard_normal((2048, 2048), np.float32) for i in range(megabytes // 16)}
    return jax.block_until_ready(jax.device_put(values, side))


def times(save: Callable[[Path], Timed], restore: Callable[[Path], Any], path: Path) -> tuple[float, ...]:
    os.sync()
    cpu = time.process_time()
    blocked, total = save(path)
    saving = time.process_time() - cpu
    os.sync()
    began, cpu = time.perf_counter(), time.process_time()
    restore(path)
    return blocked, total, saving, time.perf_counter() - began, time.process_time() - cpu


def peaks(save: Callable[[Path], Timed], restore: Callable[[Path], Any], path: Path) -> tuple[float, ...]:
    with peak_above_now() as saving:
        save(path)
    with peak_above_now() as restoring:
        restore(path)
    return saving[0] / 1e6, restoring[0] / 1e6


Rows = dict[str, dict[str, list[float]]]


def measure(megabytes: int, repeats: int, folder: Path) -> Rows:
    """Way → quantity → its value in every round."""
    rng = np.random.default_rng(0)
    found: Rows = {}
    for repeat in range(-1, repeats + 2):  # the first warms up; the last two are for the peaks
        by_name = ways(new_arrays(megabytes, rng))
        order = [str(name) for name in rng.permutation(list(by_name))]
        timing = repeat < repeats
        for name in order:
            path = folder / name
            values = (times if timing else peaks)(*by_name[name], path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            if repeat >= 0:
                row = found.setdefault(name, {key: [] for key in TIMES + PEAKS})
                for key, value in zip(TIMES if timing else PEAKS, values, strict=True):
                    row[key].append(value)
    return found


def summary(rows: Rows) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Medians, and the ratios of xlatrain to Orbax."""
    medians = {name: {key: round(statistics.median(values), 3) for key, values in row.items()} for name, row in rows.items()}
    pairs = {key: zip(rows["xlatrain"][key], rows["orbax"][key], strict=True) for key in TIMES}
    return medians, {key: round(statistics.median(own / orbax for own, orbax in pair), 2) for key, pair in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=12, help="rounds")
    parser.add_argument("--folder", help="where to write (default: a temporary directory)")
    args = parser.parse_args()
    machine = {**hardware.describe(), "load_before": hardware.load()}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure(args.megabytes, args.repeats, Path(folder))
    medians, ratios = summary(rows)
    for name, row in medians.items():
        print(f"{name:<12}" + "  ".join(f"{key} {value:9.3f}" for key, value in row.items()))
    print("xlatrain / orbax:", ratios)
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d_%H%M")
    target = ROOT / "benchmarks" / "results" / f"{today}_checkpoint.json"
    result = {"date": today, "machine": machine, "megabytes": args.megabytes, "rounds": args.repeats}
    target.write_text(json.dumps(result | {"rows": medians, "xlatrain_over_orbax": ratios}, indent=2) + "\n")


if __name__ == "__main__":
    main()
