"""Compiler options with which XLA:CPU compiles our programs, and the precision of float32 products on accelerators.

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

import jax
from jax.sharding import Mesh

from xlatrain.mesh.mesh import platform

_FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
_LIBRARIES = (_FUSIONS, "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE")
_PRODUCTS_ALONE = (_FUSIONS, "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT")
_ORDER = ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")
_SAVING = ("xla_disable_hlo_passes", "cpu-all-reduce-combiner,while-loop-invariant-code-motion")
LARGE = 64 << 20
"""Bytes of gradients from which on memory counts for more than the some ten microseconds of a further collective, or of an op
that is repeated."""


def compiler_options(mesh: Mesh, gradient_bytes: int = 0) -> dict[str, str]:
    """The ``compiler_options`` of :func:`jax.jit` for a program on ``mesh`` that computes so many bytes of gradients, unsharded.

    None where its devices are not CPUs. A flag that the user has set in ``XLA_FLAGS``, or that this jaxlib does not have, is
    left out.
    """
    if platform(mesh) != "cpu":
        return {}
    wanted = [_LIBRARIES]
    if mesh.devices.size > 1:
        wanted = [_PRODUCTS_ALONE, _ORDER, _SAVING] if gradient_bytes >= LARGE else [_LIBRARIES, _ORDER]
    return {flag: value for flag, value in wanted if not decided_by_user(flag) and _is_known(flag, value)}


def decided_by_user(flag: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``XLA_FLAGS`` has the flag."""
    return flag in environment.get("XLA_FLAGS", "")


@functools.cache
def _is_known(flag: str, value: str) -> bool:
    """Whether this jaxlib knows the flag and this value of it: experimental ones come and go."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        probe = jax.jit(lambda x: x, compiler_options={flag: value})
        try:
            probe.lower(0.0).compile()
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
