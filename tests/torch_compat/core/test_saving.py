"""``load_from_checkpoint`` from stock files, and hyperparameter files."""

from __future__ import annotations

import io
import pickle
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import nn

from torch_compat.checkpoint.checkpoint_dict import save_checkpoint_dict
from torch_compat.core import saving
from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule


class Module(LightningModule):
    def __init__(self, width: int = 2, name: str = "default") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)
        self.loaded: dict[str, Any] | None = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint


class Wider(Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra = nn.Linear(1, 1)


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.state: dict[str, Any] = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


@pytest.fixture
def module() -> Module:
    return Module(width=3, name="saved")


@pytest.fixture
def checkpoint(module: Module) -> dict[str, Any]:
    """The checkpoint that stock Lightning's ``trainer.save_checkpoint`` writes, as far as loading reads it."""
    return {
        "epoch": 1,
        "global_step": 10,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": module.state_dict(),
        "hparams_name": "kwargs",
        "hyper_parameters": dict(module.hparams),
        "datamodule_hparams_name": "kwargs",
        "datamodule_hyper_parameters": {"batch_size": 8},
        "Data": {"position": 5},
    }


@pytest.fixture
def path(checkpoint: dict[str, Any], tmp_path: Path) -> Path:
    torch.save(checkpoint, tmp_path / "model.ckpt")
    return tmp_path / "model.ckpt"


class TestLoadFromCheckpoint:
    def test_a_module_is_made_as_it_was_saved(self, path: Path, module: Module) -> None:
        loaded = Module.load_from_checkpoint(path)
        assert loaded.hparams == {"width": 3, "name": "saved"}
        torch.testing.assert_close(loaded.state_dict(), module.state_dict())
        assert loaded.training
        assert loaded.loaded is not None
        assert loaded.loaded["global_step"] == 10

    def test_from_a_checkpoint_directory(self, checkpoint: dict[str, Any], module: Module, tmp_path: Path) -> None:
        arrays = {name: jnp.asarray(tensor.numpy()) for name, tensor in checkpoint["state_dict"].items()}
        save_checkpoint_dict(tmp_path / "ours.ckpt", {**checkpoint, "state_dict": arrays}, directory=True)
        assert (tmp_path / "ours.ckpt").is_dir()
        loaded = Module.load_from_checkpoint(tmp_path / "ours.ckpt", name="mine")
        assert loaded.hparams == {"width": 3, "name": "mine"}
        torch.testing.assert_close(loaded.state_dict(), module.state_dict())
        for location in ("meta", {"cpu": "meta"}):
            state_dict = saving.read_checkpoint(tmp_path / "ours.ckpt", map_location=location)["state_dict"]
            assert all(tensor.is_meta for tensor in state_dict.values())
        with pytest.raises(TypeError, match="A function as `map_location`"):
            Module.load_from_checkpoint(tmp_path / "ours.ckpt", map_location=lambda storage, location: storage)
        assert Data.load_from_checkpoint(tmp_path / "ours.ckpt").state == {"position": 5}

    def test_map_location(self, path: Path) -> None:
        assert saving.read_checkpoint(path, map_location="meta")["state_dict"]["layer.weight"].is_meta

    def test_from_a_file_object(self, path: Path) -> None:
        assert Module.load_from_checkpoint(io.BytesIO(path.read_bytes())).hparams.width == 3

    def test_arguments_override_saved_ones(self, path: Path) -> None:
        assert Module.load_from_checkpoint(str(path), name="mine").hparams == {"width": 3, "name": "mine"}

    def test_saved_arguments_that_init_does_not_take_are_left_out(self, checkpoint: dict[str, Any], tmp_path: Path) -> None:
        checkpoint["hyper_parameters"]["removed_since"] = 1
        torch.save(checkpoint, tmp_path / "old.ckpt")
        assert Module.load_from_checkpoint(tmp_path / "old.ckpt").hparams == {"width": 3, "name": "saved"}

    def test_hyperparameters_that_were_one_argument(self, checkpoint: dict[str, Any], tmp_path: Path) -> None:
        class Configured(LightningModule):
            def __init__(self, config: dict[str, Any]) -> None:
                super().__init__()
                self.layer = nn.Linear(config["width"], 1)

        checkpoint["hparams_name"] = "config"
        torch.save(checkpoint, tmp_path / "x.ckpt")
        assert Configured.load_from_checkpoint(tmp_path / "x.ckpt").layer.in_features == 3

    def test_hyperparameters_from_a_file(self, path: Path, tmp_path: Path) -> None:
        (tmp_path / "hparams.yaml").write_text("width: 3\nname: from file\n")
        assert Module.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml").hparams.name == "from file"
        with pytest.raises(ValueError, match=r"\.csv, \.yml or \.yaml is required"):
            Module.load_from_checkpoint(path, hparams_file="hparams.json")

    def test_names_that_do_not_match(self, path: Path) -> None:
        with pytest.raises(RuntimeError, match=r"Missing key[^$]*extra\.weight"):
            Wider.load_from_checkpoint(path)
        with pytest.warns(UserWarning, match="in the model state dict but not in the checkpoint: .*extra.weight"):
            Wider.load_from_checkpoint(path, strict=False)

    def test_strict_loading_of_the_module_is_the_default(self, path: Path) -> None:
        class Lenient(Wider):
            @property
            def strict_loading(self) -> bool:
                return False

        with pytest.warns(UserWarning, match=r"extra\.weight"):
            Lenient.load_from_checkpoint(path)

    def test_strict_loading_of_the_module_and_of_the_call_must_agree(self, path: Path) -> None:
        class Lenient(Wider):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.strict_loading = False

        with pytest.raises(ValueError, match=r"strict=True\)` which is in conflict with `.*Lenient.strict_loading=False`"):
            Lenient.load_from_checkpoint(path, strict=True)

    def test_configure_model_makes_the_layers_first(self, checkpoint: dict[str, Any], path: Path) -> None:
        class Late(LightningModule):
            def configure_model(self) -> None:
                self.layer = nn.Linear(3, 1)

        late = Late.load_from_checkpoint(_without_hparams(checkpoint, path))
        torch.testing.assert_close(late.state_dict(), checkpoint["state_dict"])

    def test_a_datamodule(self, path: Path) -> None:
        data = Data.load_from_checkpoint(path)
        assert data.hparams == {"batch_size": 8}
        assert data.state == {"position": 5}

    def test_on_an_instance_it_is_refused(self, path: Path, module: Module) -> None:
        with pytest.raises(TypeError, match=r"classmethod `Module.load_from_checkpoint` cannot be called on an instance"):
            module.load_from_checkpoint(path)

    def test_what_could_run_code_is_not_loaded_unless_trusted(self, checkpoint: dict[str, Any], tmp_path: Path) -> None:
        checkpoint["callbacks"] = {"mine": Namespace(value=1)}
        torch.save(checkpoint, tmp_path / "x.ckpt")
        with pytest.raises(pickle.UnpicklingError, match=r"argparse\.Namespace.*weights_only=False"):
            Module.load_from_checkpoint(tmp_path / "x.ckpt")
        assert Module.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False).hparams.width == 3

    def test_without_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"nothing\.ckpt"):
            Module.load_from_checkpoint(tmp_path / "nothing.ckpt")

    def test_a_file_with_something_else(self, tmp_path: Path) -> None:
        torch.save(torch.zeros(1), tmp_path / "x.ckpt")
        with pytest.raises(TypeError, match="is not a checkpoint: expected a dict, found Tensor"):
            Module.load_from_checkpoint(tmp_path / "x.ckpt")


def _without_hparams(checkpoint: dict[str, Any], path: Path) -> Path:
    torch.save({"state_dict": checkpoint["state_dict"]}, path)
    return path


class TestHyperparameterFiles:
    def test_yaml(self, tmp_path: Path) -> None:
        hparams = {"rate": 0.1, "layers": (1, 2), "name": "x", "nested": {"on": True}, "nothing": None}
        saving.save_hparams_to_yaml(tmp_path / "h.yaml", Namespace(**hparams))
        assert saving.load_hparams_from_yaml(tmp_path / "h.yaml") == hparams

    def test_yaml_leaves_out_what_it_cannot_write(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="Skipping 'lock' parameter"):
            saving.save_hparams_to_yaml(tmp_path / "h.yaml", {"lock": threading.Lock(), "rate": 1})
        assert saving.load_hparams_from_yaml(tmp_path / "h.yaml") == {"rate": 1}

    def test_csv(self, tmp_path: Path) -> None:
        hparams = {"rate": 0.1, "on": True, "name": "x", "layers": [1, 2]}
        saving.save_hparams_to_tags_csv(tmp_path / "h.csv", hparams)
        assert saving.load_hparams_from_tags_csv(tmp_path / "h.csv") == hparams

    def test_missing_files_and_folders(self, tmp_path: Path) -> None:
        with pytest.warns(RuntimeWarning, match="Missing Tags"):
            assert saving.load_hparams_from_yaml(tmp_path / "h.yaml") == {}
        with pytest.warns(RuntimeWarning, match="Missing Tags"):
            assert saving.load_hparams_from_tags_csv(tmp_path / "h.csv") == {}
        with pytest.raises(RuntimeError, match="Missing folder"):
            saving.save_hparams_to_yaml(tmp_path / "no" / "h.yaml", {})
        with pytest.raises(TypeError, match="hparams must be dictionary, found list"):
            saving.save_hparams_to_yaml(tmp_path / "h.yaml", [1])

    def test_update(self) -> None:
        hparams = {"a": {"b": 1, "c": 2}, "d": 3}
        saving.update_hparams(hparams, {"a": {"c": 5}, "d": {"e": 1}})
        assert hparams == {"a": {"b": 1, "c": 5}, "d": {"e": 1}}
