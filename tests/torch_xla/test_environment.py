"""The environment itself: torch 2.9 with torch_xla, on the CPU devices that the make target asks for."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
import torch_xla
import torch_xla.runtime as xr

from tests.test_private_names import missing, rows
from tests.torch_xla.cuda_stubs import SharedObject, shared_object


def test_devices_compute() -> None:
    assert torch.__version__.startswith("2.9.1")
    assert xr.device_type() == "CPU"
    x = torch.arange(6.0, device=torch_xla.device()).reshape(2, 3)
    assert (x @ x.T).cpu().tolist() == [[5.0, 14.0], [14.0, 50.0]]


def test_private_names_of_torch_xla_are_there() -> None:
    names = [row.name for row in rows() if row.name.startswith("torch_xla.")]
    assert names and list(missing(names)) == []


def test_stubs_are_libraries_that_define_names(tmp_path: Path) -> None:
    """The loader takes them, finds each name, and the file says of itself what was written."""
    names = [f"cuNothing{i}".encode() for i in range(200)]
    (tmp_path / "libnames.so").write_bytes(shared_object("libnames.so", names))
    (tmp_path / "libempty.so").write_bytes(shared_object("libempty.so", needs="libnames.so"))
    library = ctypes.CDLL(str(tmp_path / "libempty.so"))
    assert all(getattr(library, name.decode()) for name in names)
    with pytest.raises(AttributeError):
        _ = library.cuSomething
    assert {name: defined for name, defined in SharedObject(tmp_path / "libnames.so").symbols() if name} == {}
    assert list(SharedObject(tmp_path / "libempty.so").needed()) == []
