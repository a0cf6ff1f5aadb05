"""Installed packages: their versions, and whether they fit each other. Nothing is imported: metadata says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from xlatrain.doctor.finding import Finding
from xlatrain.supported import how_to_install

PACKAGES = (
    "xlatrain", "torch", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "ml-dtypes", "torchmetrics",
    "jsonargparse", "libtpu", "libtpu-nightly", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch-xla", "torch-tpu",
    "lightning", "pytorch-lightning",
)  # fmt: skip
_JAX_EXTRAS = ("", "tpu", "cuda12", "cuda13")


def installed_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Package → version, None where it is not installed."""
    return {name: _version(name) for name in names}


def check_versions(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    """Packages that are missing, outside the range that we or JAX require, or that exclude each other."""
    yield from _unmet("xlatrain", ("",), missing_is_fault=True)
    # JAX's extras pin what drives an accelerator: a plugin of another release is refused at run time, or crashes.
    yield from _unmet("jax", _JAX_EXTRAS, missing_is_fault=False)
    if versions.get("libtpu") and versions.get("libtpu-nightly"):
        yield Finding(
            "fault",
            "libtpu",
            f"libtpu {versions['libtpu']} and libtpu-nightly {versions['libtpu-nightly']} are both installed, into one folder",
            f"pip uninstall -y libtpu libtpu-nightly && {how_to_install('tpu')}",
        )
    if versions.get("jax-cuda12-plugin") and versions.get("jax-cuda13-plugin"):
        yield Finding(
            "fault",
            "jax-cuda-plugin",
            "the plugins for CUDA 12 and CUDA 13 are both installed",
            "uninstall the one that does not fit the driver (nvidia-smi shows its CUDA version)",
        )
    torch, torch_xla = versions.get("torch"), versions.get("torch-xla")
    if torch and torch_xla and Version(torch).release[:2] != Version(torch_xla).release[:2]:
        yield Finding(
            "warning",
            "torch-xla",
            f"torch_xla {torch_xla} cannot be imported with torch {torch}: it needs the same minor version",
            "pip uninstall torch_xla; only strategy='torch_xla' needs it, in an environment of its own (docs/pods.md)",
        )


def _unmet(package: str, extras: tuple[str, ...], *, missing_is_fault: bool) -> Iterator[Finding]:
    seen: set[tuple[str, str]] = set()
    for text in _requires(package):
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name, found = canonicalize_name(requirement.name), _version(requirement.name)
        if (name, str(requirement.specifier)) in seen:
            continue
        seen.add((name, str(requirement.specifier)))
        wanted = f"{name}{requirement.specifier}"
        if found is None and missing_is_fault:
            yield Finding("fault", name, f"not installed; {package} needs {wanted}", f"pip install '{wanted}'")
        elif found is not None and not requirement.specifier.contains(found, prereleases=True):
            owner = f"{package} {_version(package)}"
            yield Finding("fault", name, f"{found} is installed; {owner} needs {wanted}", f"pip install '{wanted}'")


def _requires(package: str) -> list[str]:
    try:
        return requires(package) or []
    except PackageNotFoundError:
        return []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
