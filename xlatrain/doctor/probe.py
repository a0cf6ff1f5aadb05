"""JAX's devices and a collective over them, in a process of its own: a runtime that hangs or aborts must not end the doctor.

``python -m xlatrain.doctor.probe [--world]`` prints one line of JSON, the last of its output.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from xlatrain.cluster.watch.settings import JOIN_WITHIN

SECONDS = 2.0
"""How long the collective is repeated, about."""
SIMULATED = 8
"""CPU devices, where nothing else is set and JAX finds no accelerator."""
_BYTES = 4 << 20
_OF_A_LAUNCH = ("XLATRAIN_COORDINATOR", "XLATRAIN_PROCESSES", "XLATRAIN_PROCESS_ID", "XLATRAIN_LOCAL_PROCESS_ID")


def probe(timeout_s: float, environment: Mapping[str, str] = os.environ, *, joins: bool = False) -> dict[str, Any]:
    """Run :func:`_probe` in a process of its own and return its findings.

    Args:
        timeout_s: how long it may take.
        environment: of this process.
        joins: join the world that the environment describes, and sum over the devices of all of its processes.

    Returns:
        ``{"devices": […], "collective": {…}}``, or ``{"error": text}``.
    """
    inherited = {name: value for name, value in environment.items() if joins or name not in _OF_A_LAUNCH}
    if joins:
        inherited.setdefault(JOIN_WITHIN, f"{max(1.0, timeout_s / 2):g}")  # so that a process that does not come is named
    command = [sys.executable, "-m", "xlatrain.doctor.probe", *(["--world"] if joins else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=inherited, check=False)
    except subprocess.TimeoutExpired as error:
        output = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        return {"error": f"no answer within {timeout_s:g} s\n{_last_lines(output)}".strip(), "timed_out": True}
    if done.returncode != 0:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        return {"error": f"it ended with {how}: {_reason(done.stderr)}"}
    return json.loads(done.stdout.splitlines()[-1])


def _last_lines(text: str, count: int = 3) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


def _reason(text: str) -> str:
    """The error of a traceback, or what XLA wrote before it ended the process."""
    lines = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception|Interrupt)\b|F\d{4} |.*Unknown flag", line)]
    if lines and lines[-1] == "AssertionError":  # JAX's own, where JAX_PLATFORMS names only what it does not have
        return f"JAX has no backend for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
    return lines[-1] if lines else _last_lines(text)


def _probe(*, joins: bool) -> dict[str, Any]:
    import jax

    if jax.config.jax_num_cpu_devices < 1 and "device_count" not in os.environ.get("XLA_FLAGS", ""):  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", SIMULATED)  # a sum over one device would test nothing
    started = time.perf_counter()
    world = {}
    if joins:
        from xlatrain.cluster import distributed

        joined = distributed.initialize()
        world = {"world": {"process": joined.process_id, "processes": joined.process_count, "source": joined.source}}
    devices = jax.devices()
    return {
        **world,
        "platform": devices[0].platform,
        "start_s": round(time.perf_counter() - started, 3),
        "devices": [_describe(device) for device in devices],
        "collective": _collective(devices),
    }


def _describe(device: Any) -> dict[str, Any]:
    import jax

    own = device.platform != "cpu" and device.process_index == jax.process_index()
    memory = device.memory_stats() or {} if own else {}
    return {"id": device.id, "kind": device.device_kind, "platform": device.platform, "memory_bytes": memory.get("bytes_limit")}


def _collective(devices: list[Any]) -> dict[str, Any]:
    """A sum over all devices, checked, then repeated. Of 4 MiB of float32 on each device."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(devices), ("device",))
    count, length = len(devices), _BYTES // 4
    rows = np.arange(1, count + 1, dtype=np.float32)

    def part(index: Any) -> np.ndarray:
        return rows[index[0]][:, None].repeat(length, axis=1)

    split = jax.make_array_from_callback((count, length), NamedSharding(mesh, PartitionSpec("device")), part)
    whole = NamedSharding(mesh, PartitionSpec())
    # without compiler_options: what is timed is the collective as XLA makes it
    total = jax.jit(lambda x: x.sum(axis=0), out_shardings=whole)
    started = time.perf_counter()
    found = np.asarray(total(split))
    compile_s = time.perf_counter() - started
    expected = count * (count + 1) / 2
    times: list[float] = []
    # As often on every process: process 0 counts how often it can be done in that time.
    repeats = _agreed(max(3, min(10_000, int(SECONDS / _seconds(lambda: total(split))))))
    for _ in range(repeats):
        started = time.perf_counter()
        total(split).block_until_ready()
        times.append(time.perf_counter() - started)
    return {
        "devices": count,
        "bytes_per_device": _BYTES,
        "correct": bool((found == expected).all()),
        "compile_s": round(compile_s, 3),
        "median_ms": round(sorted(times)[len(times) // 2] * 1e3, 3),
        "repeats": len(times),
    }


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call().block_until_ready()
    return max(1e-6, time.perf_counter() - started)


def _agreed(number: int) -> int:
    from xlatrain.cluster import distributed

    return distributed.broadcast_object(number)


if __name__ == "__main__":
    print(json.dumps(_probe(joins="--world" in sys.argv[1:])), flush=True)
