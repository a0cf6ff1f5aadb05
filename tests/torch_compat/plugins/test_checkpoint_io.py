"""Checkpoint plugins: what they are given, and what comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
import torch

from tests.torch_compat.strategies.small import Net, loader, trainer, weights
from torch_compat.callbacks import ModelCheckpoint
from torch_compat.plugins import AsyncCheckpointIO, CheckpointIO, ShardedCheckpointIO, TorchCheckpointIO
from torch_compat.strategies import FSDPStrategy
from torch_compat.utilities.exceptions import MisconfigurationException


class InMemory(CheckpointIO):
    """A user's plugin: keeps checkpoints in a dict."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}
        self.options: Any = None
        self.torn_down = 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.saved[Path(path).name], self.options = checkpoint, storage_options

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return self.saved[Path(path).name]

    def remove_checkpoint(self, path: Any) -> None:
        del self.saved[Path(path).name]

    def teardown(self) -> None:
        self.torn_down += 1


def test_a_plugin_gets_plain_tensors_and_gives_them_back(tmp_path: Path) -> None:
    io, net = InMemory(), Net()
    checkpoints = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=1)
    one = trainer(strategy="fsdp", plugins=[io], callbacks=[checkpoints], enable_checkpointing=True, max_epochs=2)
    one.fit(net, loader())
    assert list(io.saved) == ["epoch=1.ckpt"] and io.torn_down == 1
    leaves = jax.tree.leaves(io.saved["epoch=1.ckpt"]["state_dict"])
    assert {type(leaf) for leaf in leaves} == {torch.Tensor} and not list(tmp_path.iterdir())
    one.save_checkpoint("by hand.ckpt", storage_options={"fast": True})
    assert io.options == {"fast": True}
    again = Net()
    trainer(strategy="fsdp", plugins=[io], max_epochs=2).fit(again, loader(), ckpt_path="elsewhere/epoch=1.ckpt")
    assert torch.equal(weights(again), weights(net))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_file_that_torch_reads(asynchronous: bool, tmp_path: Path) -> None:
    io = AsyncCheckpointIO(TorchCheckpointIO()) if asynchronous else TorchCheckpointIO()
    net = Net()
    one = trainer(strategy=FSDPStrategy(checkpoint_io=io))
    one.fit(net, loader())
    one.save_checkpoint(tmp_path / "deep" / "a.ckpt")
    io.teardown()
    state = torch.load(tmp_path / "deep" / "a.ckpt", weights_only=True)
    assert torch.equal(state["state_dict"]["net.weight"], net.net.weight) and state["global_step"] == 2
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.ckpt"]
    again = Net()
    trainer(max_epochs=1).validate(again, loader(), ckpt_path=tmp_path / "deep" / "a.ckpt", verbose=False)
    assert torch.equal(weights(again), weights(net))
    with pytest.raises(TypeError, match="storage_options"):
        TorchCheckpointIO().save_checkpoint({}, tmp_path / "b.ckpt", storage_options=1)
    one.strategy.remove_checkpoint(tmp_path / "deep" / "a.ckpt")
    io.teardown()
    assert not (tmp_path / "deep" / "a.ckpt").exists()


class Failing(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        raise OSError("the disk is full")


def test_an_error_in_the_background_is_raised_at_the_end() -> None:
    io = AsyncCheckpointIO(Failing())
    io.save_checkpoint({"a": torch.zeros(1)}, "nowhere")
    with pytest.raises(OSError, match="the disk is full"):
        io.teardown()


def test_the_default_inside_an_asynchronous_plugin_is_the_meshs(tmp_path: Path) -> None:
    io = AsyncCheckpointIO()
    one = trainer(plugins=[io])
    one.fit(Net(), loader())
    assert isinstance(one.strategy.checkpoint_io.inner(), TorchCheckpointIO) and io.collective
    one.save_checkpoint(tmp_path / "a.ckpt")
    io.checkpoint_io = ShardedCheckpointIO()
    one.save_checkpoint(tmp_path / "b.ckpt")
    io.teardown()
    assert (tmp_path / "a.ckpt").is_file() and (tmp_path / "b.ckpt").is_dir()


def test_two_checkpoint_plugins_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"checkpoint_io set through both .*InMemory"):
        trainer(strategy=FSDPStrategy(checkpoint_io=TorchCheckpointIO()), plugins=[InMemory()])
    with pytest.raises(MisconfigurationException, match="multiple values for CheckpointIO flags"):
        trainer(plugins=[InMemory(), TorchCheckpointIO()])


def test_a_plugin_of_this_or_of_an_earlier_release_is_called_with_the_arguments_that_it_takes() -> None:
    class Strict(InMemory):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:  # pyright: ignore
            self.saved[Path(path).name] = checkpoint

        def load_checkpoint(self, path: Any, weights_only: bool | None) -> dict[str, Any]:  # pyright: ignore
            return {"asked": weights_only}

    class Earlier(InMemory):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any) -> None:  # pyright: ignore
            self.saved[Path(path).name] = checkpoint

        def load_checkpoint(self, path: Any) -> dict[str, Any]:  # pyright: ignore
            return {"asked": "nothing"}

    for plugin, asked in ((Strict(), None), (Earlier(), "nothing")):
        one = trainer(plugins=plugin, max_steps=1)
        one.fit(Net(), loader())
        one.save_checkpoint("somewhere/kept.ckpt")
        assert list(plugin.saved) == ["kept.ckpt"]
        assert one.strategy.load_checkpoint("somewhere/kept.ckpt") == {"asked": asked}
