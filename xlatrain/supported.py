"""The releases of JAX and torch that the packages are made for, as ``pyproject.toml`` has them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

Release = tuple[int, ...]


@dataclass(frozen=True)
class Supported:
    """The releases of a package from ``oldest`` on, up to but without ``end``.

    Release numbers are compared, so that NVIDIA's ``2.13.0a0+nv26.07`` is a 2.13.
    """

    package: str
    oldest: Release
    end: Release

    def __str__(self) -> str:
        return f"{self.package}>={_text(self.oldest)},<{_text(self.end)}"

    def check(self, installed: str | None = None) -> None:
        """Refuse an older release; warn of a newer one, with which nothing was tried: torch's and JAX's internals are used.

        Args:
            installed: the version; None: that of the installed distribution, if there is one.

        Raises:
            ImportError: it is too old.
        """
        try:
            installed = installed or version(self.package)
        except PackageNotFoundError:
            return
        release = Version(installed).release
        if release < self.oldest:
            raise ImportError(f"{self.package} {installed} is installed; xlatrain needs {self}: pip install '{self}'")
        if release >= self.end:
            warnings.warn(
                f"{self.package} {installed} is newer than the versions that xlatrain was tested with: if something fails, "
                f"pip install '{self}', or take a newer xlatrain",
                stacklevel=3,
            )


def how_to_install(extra: str) -> str:
    """The ``pip install`` of the packages that an extra of ours adds.

    Their names, not ours: xlatrain is installed from a folder or from a wheel, and no index need know it.
    """
    try:
        found = [Requirement(text) for text in requires("xlatrain") or ()]
    except PackageNotFoundError:
        found = []
    wanted = [each for each in found if each.marker and each.marker.evaluate({"extra": extra})]
    for each in wanted:
        each.marker = None
    if not wanted:  # imported from a checkout, or one that was installed before the extra was there
        return f"pip install '.[{extra}]' in the folder of xlatrain"
    return "pip install " + " ".join(f"'{each}'" for each in wanted)


def _text(release: Release) -> str:
    return ".".join(map(str, release))


JAX = Supported("jax", (0, 10), (0, 12))
TORCH = Supported("torch", (2, 9, 1), (2, 14))
COMPILED_TORCH: Release = (2, 11)
"""The first torch with which compiled steps are tested; what is older is for strategy='torch_xla'."""
