"""Compiler options with which XLA compiles our programs, and the precision of float32 products on accelerators.

*VMEM, on TPUs.* By default a fusion has 16 MiB of a core's VMEM. What is fused into a product is then computed anew for each of
many small tiles of its result. With 24 MiB tiles are larger, and a Llama's products take four fifths of the compiler's cycles
(``docs/design/0044-options-of-the-tpu-compiler.md``). v4 and older have less VMEM, and keep the default.

*Gathers, on TPUs.* On v4, v5p and v6e the devices wait for each gather of a weight by default; with two options it goes on beside
a product, as it does on v5e and tpu7x without any.

The rest is about CPUs.

*Libraries.* jaxlib 0.10 gives convolutions, products and reductions to YNNPACK. Its convolutions of large images run on one
thread, whatever the machine has, and its gradients by weight take their threads in turn; Eigen's use all of them. A CNN's step on
two cores takes 0.71 of the time with Eigen's convolutions, on one core 0.96 (``benchmarks/notes/speed_on_cpu.md``). Products and
reductions stay with YNNPACK, where they are faster. A reduction takes the product before it along, and that its operands' casts:
16-bit weights are then kept in float32 inside of YNNPACK, where XLA does not count them. Where they are large, they are not.

*Order.* XLA:CPU orders a program so that much of it could run at once: of a sharded one it gathers what it will need at the
beginning. On a mesh the devices keep the cores busy, so that there the order is taken that needs least memory
(``benchmarks/notes/memory_on_cpu.md``).

*Sums.* XLA:CPU sums all gradients of a layer, or of the whole model, in one collective, before and after which each of them is
whole on every device. Where they are large, they are summed one by one.

*Loops.* XLA takes what is the same in all iterations out of a loop: a stack of parameters in another form too, a whole copy, of
which an iteration needs one row. Where gradients, and so parameters, are large, it stays in the loop.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from xlatrain.mesh.mesh import platform
from xlatrain.xla import kept_files
from xlatrain.xla.compilation_cache import nothing_kept

_KIND = "flag"
_FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
_LIBRARIES = (_FUSIONS, "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE")
_PRODUCTS_ALONE = (_FUSIONS, "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT")
_ORDER = ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")
_SAVING = ("xla_disable_hlo_passes", "cpu-all-reduce-combiner,while-loop-invariant-code-motion")
_VMEM = ("xla_tpu_scoped_vmem_limit_kib", "24576")
_GATHERS = (("xla_enable_async_all_gather", "true"), ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true"))
_WAIT_FOR_GATHERS = ("TPU v4", "TPU v5", "TPU v6 lite")
"""Kinds of devices."""
_LARGE_VMEM = ("TPU v5", "TPU v6", "TPU7x")
"""Kinds of devices by what their names begin with."""
LARGE = 64 << 20
"""Bytes of gradients from which on memory counts for more than the some ten microseconds of a further collective, or of an op
that is repeated."""


def compiler_options(mesh: Mesh, gradient_bytes: int = 0) -> dict[str, str]:
    """The ``compiler_options`` of :func:`jax.jit` for a program on ``mesh`` that computes so many bytes of gradients, unsharded.

    None where its devices are neither CPUs nor TPUs. A flag that the user has set in ``XLA_FLAGS`` or ``LIBTPU_INIT_ARGS``, or
    that this compiler does not have, is left out.
    """
    device = next((one for one in mesh.devices.flat if one.process_index == jax.process_index()), mesh.devices.flat[0])
    wanted: list[tuple[str, str]] = []
    if platform(mesh) == "tpu":
        wanted = [_VMEM] if device.device_kind.startswith(_LARGE_VMEM) else []
        wanted += _GATHERS if device.device_kind in _WAIT_FOR_GATHERS else ()
    elif platform(mesh) == "cpu":
        wanted = _of_cpus(mesh, gradient_bytes)
        device = jax.local_devices(backend="cpu")[0]
    return {flag: value for flag, value in wanted if not decided_by_user(flag) and _is_known(flag, value, device)}


def _of_cpus(mesh: Mesh, gradient_bytes: int) -> list[tuple[str, str]]:
    if mesh.devices.size == 1:
        return [_LIBRARIES]
    return [_PRODUCTS_ALONE, _ORDER, _SAVING] if gradient_bytes >= LARGE else [_LIBRARIES, _ORDER]


def decided_by_user(flag: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``XLA_FLAGS``, or libtpu's own variable, has the flag."""
    return any(flag in environment.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))


@functools.cache
def _is_known(flag: str, value: str, device: Any) -> bool:
    """Whether the device's compiler knows the flag and this value of it: experimental ones come and go.

    The answer is kept for further processes, of which this may be the only program that JAX would have to lower.
    """
    key = kept_files.key_of(flag, value, device.platform, device.client.platform_version)
    kept = kept_files.read(_KIND, key)
    if kept is None:
        kept = b"known" if _compiles_with(flag, value, device) else b"unknown"
        kept_files.write(_KIND, key, kept)
    return kept == b"known"


def _compiles_with(flag: str, value: str, device: Any) -> bool:
    probe = jax.jit(lambda x: x, compiler_options={flag: value})
    try:
        with nothing_kept(device.platform):
            probe.lower(jax.ShapeDtypeStruct((), np.float32, sharding=SingleDeviceSharding(device))).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


_MATMUL = {"highest": "highest", "high": "high", "medium": "default"}


def matmul_precision(name: str) -> AbstractContextManager[object]:
    """A context in which traced float32 matmuls have torch's precision ``name``.

    ``highest`` is full float32, ``high`` three bfloat16 passes (or TF32), ``medium`` one bfloat16 pass; see
    ``torch.set_float32_matmul_precision``.

    Raises:
        ValueError: another name.
    """
    if name not in _MATMUL:
        raise ValueError(f"float32 matmul precision {name!r}; expected one of {', '.join(_MATMUL)}")
    return jax.default_matmul_precision(_MATMUL[name])
