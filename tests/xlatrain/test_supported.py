"""Which releases of JAX and torch are taken."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from xlatrain.supported import COMPILED_TORCH, JAX, TORCH, Supported

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("supported", [JAX, TORCH])
def test_the_range_is_that_of_the_package(supported: Supported) -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert str(supported) in dependencies


def test_compiled_steps_need_a_torch_that_is_supported() -> None:
    assert TORCH.oldest < COMPILED_TORCH < TORCH.end


@pytest.mark.parametrize("version", ["2.9.1", "2.11.0a0+nv26.01", "2.13.0+cpu", "2.13.9"])
def test_a_supported_release_is_taken_silently(version: str, recwarn: pytest.WarningsRecorder) -> None:
    TORCH.check(version)
    assert [str(warning.message) for warning in recwarn] == []


def test_an_older_release_is_refused() -> None:
    with pytest.raises(ImportError, match=r"jax 0\.9\.2 is installed; xlatrain needs jax>=0\.10,<0\.12: pip install"):
        JAX.check("0.9.2")


@pytest.mark.parametrize("version", ["0.12.0", "0.12.0.dev20260801", "1.0"])
def test_a_newer_release_is_tried_with_a_warning(version: str) -> None:
    with pytest.warns(
        UserWarning,
        match=rf"jax {version} is newer than the versions that xlatrain was tested with.*pip install 'jax>=0\.10,<0\.12'",
    ):
        JAX.check(version)


def test_what_is_not_installed_is_nobodys_fault() -> None:
    Supported("no-such-package-is-installed", (1,), (2,)).check()
