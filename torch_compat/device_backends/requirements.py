"""Checks of the packages that drive torch's devices: whether they are installed, and for which torch they were built."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.supported import how_to_install

_NOT_NEEDED = "The default strategy needs none of it: leave strategy out, and JAX drives the devices."


def require_torch_xla(strategy: str) -> None:
    """Check that torch_xla can be imported.

    Raises:
        MisconfigurationException: it is not installed, or was built for another torch.
    """
    found, torch = installed("torch_xla"), installed("torch")
    if found is None:
        raise MisconfigurationException(
            f"{strategy} needs torch_xla, which is not installed. Its last release is 2.9.0, which needs torch 2.9 (here is "
            f"torch {torch}), so give it an environment of its own: {how_to_install('torch-xla')}. {_NOT_NEEDED}"
        )
    if torch is None or Version(torch).release[:2] != Version(found).release[:2]:
        raise MisconfigurationException(
            f"{strategy}: torch_xla {found} cannot be imported with torch {torch}: it needs the same minor version. In an "
            f"environment of its own: {how_to_install('torch-xla')}. {_NOT_NEEDED}"
        )


def require_torch_tpu(strategy: str) -> None:
    """Check that torch_tpu is installed.

    Raises:
        MisconfigurationException: it is not.
    """
    if installed("torch_tpu") is None:
        raise MisconfigurationException(
            f"{strategy} needs torch_tpu, which is not installed: pip install torch_tpu, on a TPU VM. {_NOT_NEEDED}"
        )


def installed(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
