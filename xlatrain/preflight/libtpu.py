"""The TPU compiler on a machine without TPUs.

libtpu looks for TPUs and for the metadata server of a Google machine when it is loaded, takes a lock so that one process owns the
chips, and prints about all that. None of it is wanted here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement

from xlatrain.host.libtpu_environment import set_environment
from xlatrain.supported import how_to_install


class LibtpuError(RuntimeError):
    """libtpu is missing, or is not the version that this JAX was made for."""


def check() -> str:
    """The version of libtpu.

    Raises:
        LibtpuError: none is installed, or another one than ``jax[tpu]`` of the installed JAX asks for; names the extra.
    """
    wanted = next(
        (found for text in requires("jax") or () if (found := Requirement(text)).name == "libtpu"), Requirement("libtpu")
    )
    try:
        installed = version("libtpu")
    except PackageNotFoundError:
        raise LibtpuError(
            f"compiling for TPUs needs libtpu{wanted.specifier}, which is not installed: {how_to_install('preflight')}"
        ) from None
    if not wanted.specifier.contains(installed, prereleases=True):
        raise LibtpuError(
            f"libtpu {installed} is installed, but jax {version('jax')} wants libtpu{wanted.specifier}: "
            f"{how_to_install('preflight')}"
        )
    return installed


def backend_started() -> bool:
    """Whether JAX has started."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def prepare() -> None:
    """Set what libtpu and JAX read when they start; what the user has set stays. To be called before JAX starts."""
    import jax

    set_environment()
    if not backend_started() and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def describe(name: str, options: Mapping[str, Any]) -> Sequence[Any]:
    """The devices of a topology, as libtpu knows it.

    Raises:
        LibtpuError: see :func:`check`; or libtpu does not take the description.
    """
    check()
    prepare()
    from jax.experimental import topologies

    try:
        with quiet_stderr():
            return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except Exception as error:
        raise LibtpuError(f"libtpu {version('libtpu')} gives no devices for {name!r}: {error}") from error


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drop the text that native code prints to stderr inside of the block: errors come as exceptions."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, ValueError):  # no stderr at all
        yield
        return
    with tempfile.TemporaryFile() as buffer:
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
