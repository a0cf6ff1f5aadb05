"""Checkpoint dicts to sharded directories and back, and stock single-file checkpoints."""

from __future__ import annotations

import collections
import copy
import enum
import io
import os
import pathlib
import pickle
import textwrap
import warnings
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

from tests import warm
from torch_compat.checkpoint import checkpoint_dict as checkpoint_dict
from torch_compat.checkpoint.checkpoint_dict import load_checkpoint_dict, restore_arrays, save_checkpoint_dict
from torch_compat.checkpoint.untrusted import UntrustedValueError
from xlatrain import checkpoint as sharded
from xlatrain.bridge.tensors.host import from_numpy
from xlatrain.bridge.tensors.lazy import lazy_tensor
from xlatrain.mesh.mesh import make_mesh


class Colour(enum.Enum):
    RED = 1


class Custom:
    """A user's own class among the hyperparameters."""

    def __init__(self) -> None:
        self.values = [1, 2]


@pytest.fixture
def mesh():
    return make_mesh({"data": 2, "fsdp": 4})


def on_mesh(values, mesh, *spec) -> jax.Array:
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))


def asked(shape, dtype, mesh, *spec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


WEIGHT = np.arange(32, dtype=np.float32).reshape(8, 4)


def stock_layout(mesh) -> dict:
    """The dict that a trainer dumps, with parameters and optimizer state on the mesh."""
    weight = on_mesh(WEIGHT, mesh, "fsdp")
    state_dict = collections.OrderedDict({"fc.weight": weight, "tied.weight": weight, "bn.running_mean": torch.ones(3)})
    state_dict._metadata = {"": {"version": 1}}
    moments = {"step": torch.tensor(7.0), "exp_avg": on_mesh(WEIGHT * 2, mesh, "fsdp"), "exp_avg_sq": on_mesh(WEIGHT * 3, mesh)}
    return {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": state_dict,
        "loops": {"fit_loop": {"epoch_progress": {"current": {"ready": 4}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "a.ckpt", "best_k_models": {}}},
        "optimizer_states": [{"state": {0: moments}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]}],
        "lr_schedulers": [{"last_epoch": 3, "_last_lr": [0.1]}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"hidden": 4, "name": "x"},
        "mine": (torch.arange(3), [on_mesh(jnp.ones(3, jnp.bfloat16), mesh)]),
    }


def test_whole_read_gives_the_stock_layout(tmp_path, mesh):
    saved = stock_layout(mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint_dict(tmp_path / "a.ckpt", saved)
    loaded = load_checkpoint_dict(tmp_path / "a.ckpt")

    assert list(loaded) == list(saved)
    assert isinstance(loaded["state_dict"], collections.OrderedDict)
    assert loaded["state_dict"]._metadata == {"": {"version": 1}}
    assert type(loaded["state_dict"]["fc.weight"]) is torch.Tensor
    assert loaded["state_dict"]["fc.weight"] is loaded["state_dict"]["tied.weight"]
    np.testing.assert_array_equal(loaded["state_dict"]["fc.weight"], WEIGHT)
    moments = loaded["optimizer_states"][0]["state"][0]
    np.testing.assert_array_equal(moments["exp_avg"], WEIGHT * 2)
    np.testing.assert_array_equal(moments["exp_avg_sq"], WEIGHT * 3)
    assert moments["step"] == 7.0
    assert loaded["optimizer_states"][0]["param_groups"] == saved["optimizer_states"][0]["param_groups"]
    assert isinstance(loaded["mine"], tuple) and loaded["mine"][1][0].dtype == torch.bfloat16
    for key in ("epoch", "global_step", "loops", "callbacks", "lr_schedulers", "hyper_parameters", "hparams_name"):
        assert loaded[key] == saved[key]
    assert isinstance(saved["state_dict"]["fc.weight"], jax.Array)  # the caller's dict is as it was


def test_arrays_are_stored_sharded_once_and_by_name(tmp_path, mesh):
    save_checkpoint_dict(tmp_path / "a.ckpt", stock_layout(mesh))
    assert set(sharded.open_checkpoint(tmp_path / "a.ckpt").array_metadata()) == {
        "state_dict/fc.weight",
        "optimizer_states/0/state/0/exp_avg",
        "optimizer_states/0/state/0/exp_avg_sq",
        "mine/1/0",
    }


def test_restores_onto_shards_of_another_mesh(tmp_path, mesh):
    save_checkpoint_dict(tmp_path / "a.ckpt", stock_layout(mesh))
    other = make_mesh({"fsdp": 2, "tensor": 4})
    loaded = load_checkpoint_dict(tmp_path / "a.ckpt", lazy=True)
    moments = ("optimizer_states", 0, "state", 0)
    templates = {
        ("state_dict", "fc.weight"): asked((8, 4), jnp.float32, other, "tensor", "fsdp"),
        ("state_dict", "tied.weight"): asked((8, 4), jnp.bfloat16, other),
        ("state_dict", "bn.running_mean"): asked((3,), jnp.float32, other),
        (*moments, "exp_avg"): asked((8, 4), jnp.float32, other, "fsdp"),
        (*moments, "step"): asked((), jnp.float32, other),
    }
    restored = restore_arrays(loaded, templates)
    assert list(restored) == list(templates)
    for path, template in templates.items():
        assert restored[path].sharding == template.sharding and restored[path].dtype == template.dtype
    np.testing.assert_array_equal(restored["state_dict", "fc.weight"], WEIGHT)
    np.testing.assert_array_equal(restored["state_dict", "tied.weight"].astype(np.float32), WEIGHT)
    np.testing.assert_array_equal(restored[(*moments, "exp_avg")], WEIGHT * 2)
    assert restored[(*moments, "step")] == 7.0


def test_lazy_tensors_are_read_when_used_and_a_hooks_changes_count(tmp_path, mesh):
    save_checkpoint_dict(tmp_path / "a.ckpt", stock_layout(mesh))
    loaded = load_checkpoint_dict(tmp_path / "a.ckpt", lazy=True)
    weight = loaded["state_dict"]["fc.weight"]
    assert weight.shape == (8, 4) and weight.dtype == torch.float32
    weight.mul_(10)  # on_load_checkpoint
    loaded["state_dict"]["renamed"] = loaded["state_dict"].pop("tied.weight")
    loaded["optimizer_states"][0]["state"][0]["exp_avg"] = torch.full((8, 4), 5, dtype=torch.float64)
    path = ("optimizer_states", 0, "state", 0, "exp_avg")
    restored = restore_arrays(
        loaded,
        {
            ("state_dict", "fc.weight"): asked((8, 4), jnp.float32, mesh, "data"),
            ("state_dict", "renamed"): asked((8, 4), jnp.float32, mesh, "data"),
            path: asked((8, 4), jnp.float32, mesh, "fsdp"),
        },
    )
    np.testing.assert_array_equal(restored["state_dict", "fc.weight"], WEIGHT * 10)
    np.testing.assert_array_equal(restored["state_dict", "renamed"], WEIGHT * 10)  # tied: one tensor
    assert bool((restored[path] == 5).all())


@pytest.mark.parametrize("assign", [False, True])
def test_lazy_tensors_load_into_modules_and_optimizers(tmp_path, mesh, assign):
    module = torch.nn.Linear(4, 8)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    array = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: on_mesh(t.detach().numpy(), mesh), optimizer.state_dict())
    weights = {name: on_mesh(value.numpy(), mesh) for name, value in module.state_dict().items()}
    save_checkpoint_dict(tmp_path / "a.ckpt", {"state_dict": weights, "optimizer_states": [array]})

    loaded = load_checkpoint_dict(tmp_path / "a.ckpt", lazy=True)
    other = torch.nn.Linear(4, 8)
    other.load_state_dict(loaded["state_dict"], assign=assign)
    other_optimizer = torch.optim.Adam(other.parameters())
    other_optimizer.load_state_dict(loaded["optimizer_states"][0])
    for model, optim in ((module, optimizer), (other, other_optimizer)):
        optim.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optim.step()
    torch.testing.assert_close(other.weight, module.weight, rtol=0, atol=0)
    assert isinstance(other.weight, torch.nn.Parameter)


def test_damage_found_while_weights_are_loaded_names_the_array(tmp_path, mesh):
    values = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    path = tmp_path / "a.ckpt"
    save_checkpoint_dict(path, {"state_dict": {"fc.weight": on_mesh(values, mesh, "fsdp")}})
    module = torch.nn.ModuleDict({"fc": torch.nn.Linear(64, 64, bias=False)})
    data = max(path.rglob("d/*"), key=lambda file: file.stat().st_size)
    data.write_bytes(bytes(byte ^ (index % 50 == 49) for index, byte in enumerate(data.read_bytes())))
    template = asked((64, 64), np.float32, mesh, None, "fsdp")
    for load in (module.load_state_dict, lambda state: restore_arrays({"fc": state}, {("fc", "fc.weight"): template})):
        lazily = load_checkpoint_dict(path, lazy=True)["state_dict"]
        with pytest.raises(sharded.CorruptCheckpointError) as caught, checkpoint_dict.raising_damage():
            load(lazily)
        where = f"{path}: the array 'state_dict/fc.weight' cannot be read (in {data.relative_to(path)}): "
        assert str(caught.value).startswith(where) and f"xlatrain ckpt verify {path}" in str(caught.value)
    with pytest.raises(RuntimeError, match=r"size mismatch"), checkpoint_dict.raising_damage():  # all else as it was
        module.load_state_dict({"fc.weight": torch.ones(2)})


def test_placed_arrays_do_not_share_memory_with_the_dict(mesh):
    weight = torch.ones(64, 64)
    single = make_mesh({"data": 1}, devices=jax.devices()[:1])
    restored = restore_arrays({"w": weight}, {("w",): asked((64, 64), jnp.float32, single)})["w",]
    weight.zero_()
    assert bool((restored == 1).all())


def test_tensors_that_live_on_the_mesh_are_stored_from_their_arrays(tmp_path, mesh):
    array = on_mesh(jnp.arange(3, dtype=jnp.int32), mesh)

    def never() -> torch.Tensor:
        raise AssertionError("the whole tensor was brought to the host")

    count = lazy_tensor((3,), torch.int64, never)
    save_checkpoint_dict(tmp_path / "a.ckpt", {"state_dict": {"n": count, "host": torch.ones(2)}}, on_mesh={count: array}.get)
    loaded = load_checkpoint_dict(tmp_path / "a.ckpt")["state_dict"]
    assert loaded["n"].dtype == torch.int64 and loaded["n"].tolist() == [0, 1, 2]
    assert loaded["host"].tolist() == [1, 1]


def test_host_parameters_of_the_module_are_plain_tensors(tmp_path):
    module = torch.nn.Linear(2, 2)
    mine = torch.nn.Parameter(torch.ones(2))
    save_checkpoint_dict(tmp_path / "a.ckpt", {"state_dict": module.state_dict(keep_vars=True), "mine": mine})
    loaded = load_checkpoint_dict(tmp_path / "a.ckpt")
    assert type(loaded["state_dict"]["weight"]) is torch.Tensor and not loaded["state_dict"]["weight"].requires_grad
    assert torch.equal(loaded["state_dict"]["weight"], module.weight)
    assert isinstance(loaded["mine"], torch.nn.Parameter)


def test_mismatches_are_listed_together(tmp_path, mesh):
    save_checkpoint_dict(tmp_path / "a.ckpt", stock_layout(mesh))
    loaded = load_checkpoint_dict(tmp_path / "a.ckpt", lazy=True)
    with pytest.raises(sharded.CheckpointMismatchError) as caught:
        restore_arrays(
            loaded,
            {
                ("state_dict", "fc.weight"): asked((8, 5), jnp.float32, mesh),
                ("state_dict", "nowhere"): asked((1,), jnp.float32, mesh),
                ("optimizer_states", 1, "state"): asked((1,), jnp.float32, mesh),
            },
        )
    text = str(caught.value)
    assert "checkpoint['state_dict']['fc.weight']: expected shape (8, 5), found (8, 4)" in text
    assert "checkpoint['state_dict']['nowhere'] is missing" in text
    assert "checkpoint['optimizer_states'][1]['state'] is missing" in text


def test_keys_that_only_differ_in_type(tmp_path, mesh):
    arrays = {0: on_mesh(jnp.zeros(2), mesh), "0": on_mesh(jnp.ones(2), mesh)}
    save_checkpoint_dict(tmp_path / "a.ckpt", {"x": arrays})
    loaded = load_checkpoint_dict(tmp_path / "a.ckpt")["x"]
    assert loaded[0].tolist() == [0, 0] and loaded["0"].tolist() == [1, 1]


def test_reserved_key(tmp_path):
    with pytest.raises(ValueError, match=r"'xlatrain\.array', which is reserved"):
        save_checkpoint_dict(tmp_path / "a.ckpt", {"mine": {"xlatrain.array": 3}})


class TestSafety:
    @pytest.fixture
    def path(self, tmp_path) -> pathlib.Path:
        with pytest.warns(UserWarning, match="weights_only=False") as caught:
            hparams = {"lr": 0.1, "colour": Colour.RED, "nested": [1, Custom()]}
            save_checkpoint_dict(tmp_path / "a.ckpt", {"hyper_parameters": hparams, "epoch": 2})
        text = str(caught[0].message)
        assert "checkpoint['hyper_parameters']['colour'] (Colour)" in text
        assert "checkpoint['hyper_parameters']['nested'][1] (Custom)" in text
        assert "['lr']" not in text
        return tmp_path / "a.ckpt"

    def test_trusted(self, path):
        loaded = load_checkpoint_dict(path, weights_only=False)
        assert loaded["hyper_parameters"]["colour"] is Colour.RED
        assert loaded["hyper_parameters"]["nested"][1].values == [1, 2]

    @pytest.mark.parametrize("weights_only", [True, None])
    def test_the_rest_is_read_safely_and_use_of_what_is_not_raises(self, path, weights_only):
        loaded = load_checkpoint_dict(path, weights_only)
        assert loaded["epoch"] == 2 and loaded["hyper_parameters"]["lr"] == 0.1
        colour = loaded["hyper_parameters"]["colour"]
        for use in (
            lambda: colour.value,
            lambda: colour == Colour.RED,
            lambda: bool(colour),
            lambda: colour(),
            lambda: colour + 1,
        ):
            with pytest.raises(UntrustedValueError, match=r"checkpoint\['hyper_parameters'\]\['colour'\] was not loaded"):
                use()
        assert "not loaded" in repr(colour)

    def test_torchs_environment_variable(self, path, monkeypatch):
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        assert load_checkpoint_dict(path, None)["hyper_parameters"]["colour"] is Colour.RED

    def test_nothing_is_unpickled(self, tmp_path):
        """A pickle that would run code: the file is made by an attacker, not by us."""

        class Attack:
            def __reduce__(self):
                return (pathlib.Path.touch, (tmp_path / "owned",))

        with pytest.warns(UserWarning, match="Attack"):
            save_checkpoint_dict(tmp_path / "a.ckpt", {"x": Attack(), "epoch": 1})
        torch.save({"x": Attack()}, tmp_path / "stock.ckpt")
        assert load_checkpoint_dict(tmp_path / "a.ckpt")["epoch"] == 1
        with pytest.raises(pickle.UnpicklingError):
            load_checkpoint_dict(tmp_path / "stock.ckpt")
        assert not (tmp_path / "owned").exists()

    def test_common_harmless_values_need_no_trust(self, tmp_path):
        values = {
            "path": pathlib.Path("a/b"),
            "array": np.arange(3),
            "scalar": np.float32(2),
            "counter": collections.Counter("aab"),
            "range": range(3),
            "set": {1, 2},
            "dtype": torch.bfloat16,
            "complex": np.complex64(1j),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save_checkpoint_dict(tmp_path / "a.ckpt", values)
        loaded = load_checkpoint_dict(tmp_path / "a.ckpt")
        assert loaded.pop("array").tolist() == values.pop("array").tolist()
        assert loaded == values

    def test_what_cannot_be_pickled_is_named_and_nothing_is_saved(self, tmp_path):
        with pytest.raises(TypeError, match=r"checkpoint\['hyper_parameters'\]\['fn'\] cannot be saved"):
            save_checkpoint_dict(tmp_path / "a.ckpt", {"hyper_parameters": {"fn": lambda: 0, "lr": 1}})
        assert not sharded.is_checkpoint(tmp_path / "a.ckpt")


class TestStockFiles:
    def test_file_stream_and_url(self, tmp_path):
        import fsspec

        state = {"epoch": 1, "state_dict": {"w": torch.ones(2)}}
        torch.save(state, tmp_path / "stock.ckpt")
        data = (tmp_path / "stock.ckpt").read_bytes()
        with fsspec.open("memory://run/stock.ckpt", "wb") as file:
            file.write(data)
        for source in (tmp_path / "stock.ckpt", str(tmp_path / "stock.ckpt"), io.BytesIO(data), "memory://run/stock.ckpt"):
            loaded = load_checkpoint_dict(source)
            assert loaded["epoch"] == 1 and loaded["state_dict"]["w"].tolist() == [1, 1]

    def test_file_written_with_numpy_1(self, tmp_path):
        torch.save({"best": np.float64(0.5), "history": np.arange(3)}, tmp_path / "new.ckpt")
        with zipfile.ZipFile(tmp_path / "new.ckpt") as new, zipfile.ZipFile(tmp_path / "old.ckpt", "w") as old:
            for name in new.namelist():
                old.writestr(name, new.read(name).replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
        loaded = load_checkpoint_dict(tmp_path / "old.ckpt")
        assert loaded["best"] == 0.5 and loaded["history"].tolist() == [0, 1, 2]

    def test_unsafe_file_names_the_classes(self, tmp_path):
        torch.save({"hyper_parameters": {"colour": Colour.RED}}, tmp_path / "stock.ckpt")
        with pytest.raises(pickle.UnpicklingError, match=r"stock\.ckpt holds .*Colour.*weights_only=False"):
            load_checkpoint_dict(tmp_path / "stock.ckpt")
        assert load_checkpoint_dict(tmp_path / "stock.ckpt", weights_only=False)["hyper_parameters"]["colour"] is Colour.RED

    def test_restored_onto_shards(self, tmp_path, mesh):
        torch.save({"state_dict": {"w": from_numpy(WEIGHT)}}, tmp_path / "stock.ckpt")
        loaded = load_checkpoint_dict(tmp_path / "stock.ckpt", lazy=True)
        restored = restore_arrays(loaded, {("state_dict", "w"): asked((8, 4), jnp.bfloat16, mesh, "fsdp")})
        np.testing.assert_array_equal(restored["state_dict", "w"].astype(np.float32), WEIGHT)

    def test_export(self, tmp_path, mesh):
        save_checkpoint_dict(tmp_path / "a.ckpt", stock_layout(mesh))
        checkpoint_dict.export_checkpoint_file(tmp_path / "a.ckpt", tmp_path / "stock.ckpt")
        loaded = torch.load(tmp_path / "stock.ckpt", weights_only=True)
        np.testing.assert_array_equal(loaded["state_dict"]["fc.weight"], WEIGHT)
        assert loaded["epoch"] == 3

    def test_export_refuses_to_leave_something_out(self, tmp_path):
        with pytest.warns(UserWarning):
            save_checkpoint_dict(tmp_path / "a.ckpt", {"colour": Colour.RED})
        with pytest.raises(UntrustedValueError, match="colour"):
            checkpoint_dict.export_checkpoint_file(tmp_path / "a.ckpt", tmp_path / "stock.ckpt")
        checkpoint_dict.export_checkpoint_file(tmp_path / "a.ckpt", tmp_path / "stock.ckpt", weights_only=False)
        assert torch.load(tmp_path / "stock.ckpt", weights_only=False)["colour"] is Colour.RED


def test_engine_checkpoint_is_refused_by_name(tmp_path):
    sharded.save(tmp_path / "a.ckpt", {"w": np.ones(3)}, wait=True)
    with pytest.raises(sharded.ForeignPathError, match=r"has no host\.pt"):
        load_checkpoint_dict(tmp_path / "a.ckpt")


STOCK_RUN = """
    import pathlib, sys
    import torch
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    class Model(pl.LightningModule):
        def __init__(self, hidden=4, where=pathlib.Path("x")):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(3, hidden)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch[0]).pow(2).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    epochs, folder, resumed_from = int(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None
    callbacks = [pl.callbacks.ModelCheckpoint(folder, monitor="loss", save_last=True), pl.callbacks.EarlyStopping("loss")]
    torch.manual_seed(0)
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=callbacks, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(1))), 2)
    trainer.fit(Model(), data, ckpt_path=resumed_from, weights_only=False if resumed_from else None)
    print("finished", trainer.current_epoch, trainer.global_step)
"""


@pytest.mark.parity
@pytest.mark.slow
def test_stock_lightning_resumes_from_what_passed_through_a_mesh(tmp_path, mesh):
    """A stock file read safely, placed on a mesh, saved as a directory and exported is the stock run's checkpoint still."""

    def stock(*args) -> str:
        command = ["-c", textwrap.dedent(STOCK_RUN), *map(str, args)]
        done = warm.run(warm.STOCK, command, env=os.environ, timeout=300, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert "finished 1 4" in stock(1, tmp_path / "stock")
    original = load_checkpoint_dict(tmp_path / "stock" / "last.ckpt")
    templates = {("state_dict", "layer.weight"): asked((4, 3), jnp.float32, mesh, "fsdp")}
    for name in ("exp_avg", "exp_avg_sq"):
        templates["optimizer_states", 0, "state", 0, name] = asked((4, 3), jnp.float32, mesh, "fsdp")
    placed = copy.deepcopy(original)
    for path, array in restore_arrays(original, templates).items():
        holder = placed
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = array
    save_checkpoint_dict(tmp_path / "ours.ckpt", placed)
    checkpoint_dict.export_checkpoint_file(tmp_path / "ours.ckpt", tmp_path / "exported.ckpt")

    stock(2, tmp_path / "straight", tmp_path / "stock" / "last.ckpt")
    assert "finished 2 8" in stock(2, tmp_path / "through", tmp_path / "exported.ckpt")
    straight = load_checkpoint_dict(tmp_path / "straight" / "last.ckpt")["state_dict"]
    through = load_checkpoint_dict(tmp_path / "through" / "last.ckpt")["state_dict"]
    for name in straight:
        torch.testing.assert_close(through[name], straight[name], rtol=0, atol=0)
