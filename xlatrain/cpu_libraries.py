"""Which library runs the convolutions of a program of XLA:CPU.

jaxlib 0.10 gives convolutions, products and reductions to YNNPACK. Its convolutions of large images run on one thread, whatever
the machine has, and its gradients by weight take their threads in turn; Eigen's use all of them. A CNN's step on two cores takes
0.71 of the time with Eigen's convolutions, on one core 0.96 (``docs/design/0014-speed-on-cpu.md``). Products and reductions stay
with YNNPACK, where they are faster.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

_FLAG = "xla_cpu_experimental_ynn_fusion_type"
_WITHOUT_CONVOLUTIONS = {_FLAG: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"}


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """The ``compiler_options`` of :func:`jax.jit` for a program on ``mesh``.

    None where its devices are not CPUs, where the user has set the flag in ``XLA_FLAGS``, or where this jaxlib has no such flag.
    """
    if mesh.devices.flat[0].platform != "cpu" or decided_by_user():
        return {}
    return dict(_WITHOUT_CONVOLUTIONS) if _is_known() else {}


def decided_by_user(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``XLA_FLAGS`` has the flag."""
    return _FLAG in environment.get("XLA_FLAGS", "")


@functools.cache
def _is_known() -> bool:
    """Whether this jaxlib knows the flag and these values of it: experimental ones come and go."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        probe = jax.jit(lambda x: x, compiler_options=_WITHOUT_CONVOLUTIONS)
        try:
            probe.lower(0.0).compile()
        except jax.errors.JaxRuntimeError:
            return False
    return True
