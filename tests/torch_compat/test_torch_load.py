"""``torch.load`` on checkpoint directories."""

from __future__ import annotations

import pytest
import torch

from torch_compat.checkpoint.checkpoint_dict import save_checkpoint_dict
from torch_compat.checkpoint.torch_load import patch_torch_load, unpatch_torch_load


@pytest.fixture(autouse=True)
def patched():
    unpatch_torch_load()  # a Trainer of an earlier test may have patched it
    original = torch.load
    patch_torch_load()
    patch_torch_load()
    yield
    unpatch_torch_load()
    assert torch.load is original


@pytest.fixture
def path(tmp_path):
    save_checkpoint_dict(tmp_path / "best.ckpt", {"epoch": 1, "state_dict": {"w": torch.arange(3)}}, directory=True)
    return tmp_path / "best.ckpt"


@pytest.mark.parametrize(
    "options", [{}, {"map_location": "cpu"}, {"weights_only": True}, {"mmap": True}, {"map_location": {"cpu": "cpu"}}]
)
def test_directory(path, options):
    loaded = torch.load(str(path), **options)
    assert loaded["epoch"] == 1 and loaded["state_dict"]["w"].tolist() == [0, 1, 2]


def test_map_location_moves_the_tensors(path):
    assert torch.load(path, map_location="meta")["state_dict"]["w"].is_meta
    assert torch.load(path, map_location=torch.device("meta"))["state_dict"]["w"].is_meta


def test_files_go_to_torch(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    with open(tmp_path / "w.pt", "rb") as file:
        assert torch.load(file, "cpu", weights_only=True)["w"].tolist() == [1, 1]
    assert torch.load(tmp_path / "w.pt", "cpu")["w"].tolist() == [1, 1]
    with pytest.raises(FileNotFoundError):
        torch.load(tmp_path / "missing.pt")
    with pytest.raises(IsADirectoryError):
        torch.load(tmp_path)


def test_what_a_directory_cannot_honour_is_refused(path):
    import pickle

    with pytest.raises(TypeError, match=r"best\.ckpt'\): pickle_module cannot be used"):
        torch.load(path, pickle_module=pickle)
    with pytest.raises(TypeError, match="encoding cannot be used"):
        torch.load(path, encoding="latin1")
