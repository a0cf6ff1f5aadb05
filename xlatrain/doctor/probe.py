"""JAX's devices and a collective over them, in a process of its own: a runtime that hangs or aborts must not end the doctor.

``python -m xlatrain.doctor.probe`` prints one line of JSON, the last of its output.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

SECONDS = 2.0
"""How long the collective is repeated."""
SIMULATED = 8
"""CPU devices, where nothing else is set and JAX finds no accelerator."""
_BYTES = 4 << 20
_OF_A_LAUNCH = ("XLATRAIN_COORDINATOR", "XLATRAIN_PROCESSES", "XLATRAIN_PROCESS_ID", "XLATRAIN_LOCAL_PROCESS_ID")


def probe(timeout_s: float, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What :func:`_probe` finds in a process of its own.

    Returns:
        ``{"devices": […], "collective": {…}}``, or ``{"error": text}``.
    """
    inherited = {name: value for name, value in environment.items() if name not in _OF_A_LAUNCH}
    command = [sys.executable, "-m", "xlatrain.doctor.probe"]
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
    return lines[-1] if lines else _last_lines(text)


def _probe() -> dict[str, Any]:
    import jax

    if jax.config.jax_num_cpu_devices < 1 and "device_count" not in os.environ.get("XLA_FLAGS", ""):  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", SIMULATED)  # a sum over one device would test nothing
    started = time.perf_counter()
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "start_s": round(time.perf_counter() - started, 3),
        "devices": [_describe(device) for device in devices],
        "collective": _collective(devices),
    }


def _describe(device: Any) -> dict[str, Any]:
    memory = device.memory_stats() or {} if device.platform != "cpu" else {}
    return {"id": device.id, "kind": device.device_kind, "platform": device.platform, "memory_bytes": memory.get("bytes_limit")}


def _collective(devices: list[Any]) -> dict[str, Any]:
    """A sum over all devices, checked, then repeated. Of 4 MiB of float32 on each device."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(devices), ("device",))
    count, length = len(devices), _BYTES // 4
    rows = np.arange(1, count + 1, dtype=np.float32)[:, None].repeat(length, axis=1)
    split = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("device")))
    whole = NamedSharding(mesh, PartitionSpec())
    total = jax.jit(lambda x: x.sum(axis=0), out_shardings=whole)
    started = time.perf_counter()
    found = np.asarray(total(split))
    compile_s = time.perf_counter() - started
    expected = count * (count + 1) / 2
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
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


if __name__ == "__main__":
    print(json.dumps(_probe()))
