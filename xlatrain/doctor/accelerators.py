"""Accelerators that this machine has, asked of drivers and device files, against those that JAX drives."""

from __future__ import annotations

import ctypes
import glob
from collections.abc import Iterator, Mapping
from typing import Any

from xlatrain.doctor.finding import Finding
from xlatrain.supported import how_to_install


def present_accelerators() -> dict[str, int]:
    """``"cuda"`` and ``"tpu"`` → number of chips, where there are any. Starts no runtime."""
    counts = {"cuda": _cuda_devices(), "tpu": len(glob.glob("/dev/accel[0-9]*")) or len(glob.glob("/dev/vfio/[0-9]*"))}
    return {name: count for name, count in counts.items() if count}


def _cuda_devices() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


_JAX_PLATFORM = {"cuda": "gpu", "tpu": "tpu"}


def check_accelerators(
    present: Mapping[str, int], probe: Mapping[str, Any], versions: Mapping[str, str | None], environment: Mapping[str, str]
) -> Iterator[Finding]:
    """A runtime that does not start, chips that JAX does not drive, a collective that is wrong."""
    chosen = environment.get("JAX_PLATFORMS")
    if "error" in probe:
        remedy = _missing_plugin(chosen, versions) or _remedy_of_start(probe, present)
        yield Finding("fault", "JAX", f"does not start: {probe['error']}", remedy)
        return
    for name, count in present.items():
        if probe["platform"] == _JAX_PLATFORM[name]:
            continue
        what = f"{count} chip(s) here, but JAX computes on {probe['platform']}"
        installed = versions.get("libtpu") if name == "tpu" else _cuda_plugin(versions)
        if chosen:
            yield Finding("warning", name, f"{what}: JAX_PLATFORMS={chosen} is set", "unset JAX_PLATFORMS to use them")
        elif installed:
            yield Finding(
                "fault", name, f"{what}, although its plugin is installed", "run `python -c 'import jax; jax.devices()'`"
            )
        else:
            yield Finding("fault", name, f"{what}: JAX's plugin is not installed", how_to_install(name))
    if not probe["collective"]["correct"]:
        yield Finding(
            "fault",
            "collective",
            f"a sum over {probe['collective']['devices']} devices gave wrong numbers",
            "train on fewer devices, and report it with the output of `xlatrain doctor --json`",
        )


def _cuda_plugin(versions: Mapping[str, str | None]) -> str | None:
    return versions.get("jax-cuda12-plugin") or versions.get("jax-cuda13-plugin")


def _missing_plugin(chosen: str | None, versions: Mapping[str, str | None]) -> str | None:
    """The next step where JAX_PLATFORMS asks for a platform whose plugin is not installed; None if there is nothing to do."""
    platforms = {name.strip() for name in (chosen or "").split(",")}
    for names, extra, plugin in (({"cuda", "gpu"}, "cuda", _cuda_plugin(versions)), ({"tpu"}, "tpu", versions.get("libtpu"))):
        if platforms & names and not plugin:
            return f"JAX_PLATFORMS={chosen} is set: {how_to_install(extra)}, or unset it"
    return None


def _remedy_of_start(probe: Mapping[str, Any], present: Mapping[str, int]) -> str:
    if "Unknown flag" in probe["error"] or "XLA_FLAGS" in probe["error"]:
        return "take the unknown flags out of XLA_FLAGS"
    if probe.get("timed_out") and "tpu" in present:
        return "another process may hold the TPU (sudo lsof /dev/accel* /dev/vfio/*), or the other hosts of the slice are missing"
    if probe.get("timed_out"):
        return "set JAX_PLATFORMS=cpu if this machine has no accelerator; `--timeout` waits longer"
    return "`python -c 'import jax; jax.devices()'` shows the whole traceback; JAX_PLATFORMS=cpu does without the accelerator"
