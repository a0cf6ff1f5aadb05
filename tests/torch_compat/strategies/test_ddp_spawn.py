"""DDPSpawnStrategy of 1.6: runs in processes that it starts, and brings everything back."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from typing import Any

import jax
import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from tests.torch_compat.strategies.small import Net, loader, trainer, weights
from tools.conformance import resolve
from torch_compat.callbacks import Callback
from torch_compat.strategies import DDPSpawnStrategy, DDPStrategy
from torch_compat.utilities.exceptions import MisconfigurationException


class Counting(Callback):
    """Counts batches, in its state."""

    batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class Queued(Net):
    """Sends something of its own back, as 1.5 documents it."""

    received: Any = None

    def add_to_queue(self, queue: Any) -> None:
        queue.put(("from process", jax.process_index(), jax.process_count(), self.trainer.world_size))

    def get_from_queue(self, queue: Any) -> None:
        self.received = queue.get()


class Spawning(DDPSpawnStrategy):
    """A user's subclass with 1.6's signatures; what it does happens in the processes, and is logged."""

    def optimizer_step(self, optimizer: Any, opt_idx: int, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        assert opt_idx == 0 and jax.process_count() == 2
        return super().optimizer_step(optimizer, opt_idx, closure, model, **kwargs)

    def training_step_end(self, output: Any) -> Any:
        return output * 2


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_fit_in_processes_equals_one_in_this_process() -> None:
    net, counting = Queued(lr=0.05), Counting()
    one = trainer(strategy=Spawning(find_unused_parameters=False), devices=2, callbacks=[counting], max_epochs=2)
    assert one.world_size == 2
    one.fit(net, loader(), loader())
    plain, expected = trainer(devices=2, max_epochs=2), Net(lr=0.1)
    plain.fit(expected, loader(), loader())
    torch.testing.assert_close(weights(net), weights(expected))
    assert net.received == ("from process", 0, 2, 2)
    assert (counting.batches, one.global_step, one.current_epoch) == (16, 16, 2)
    assert set(one.callback_metrics) == {"loss", "val"} and isinstance(one.callback_metrics["val"], torch.Tensor)
    torch.testing.assert_close(one.callback_metrics["val"], plain.callback_metrics["val"])
    assert one.state.status == plain.state.status and multiprocessing.active_children() == []


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise RuntimeError("this step cannot be computed")


class Told(Callback):
    def __init__(self) -> None:
        self.exceptions: list[BaseException] = []

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.exceptions.append(exception)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_childs_exception_comes_back_with_its_traceback() -> None:
    told = Told()
    one = trainer(strategy="ddp_spawn", devices=2, callbacks=[told])
    with pytest.raises(ProcessRaisedException, match="this step cannot be computed") as caught:
        one.fit(Fails(), loader())
    assert "-- Process" in str(caught.value) and "in training_step" in str(caught.value)
    assert multiprocessing.active_children() == [] and one.state.status == "interrupted"
    assert told.exceptions == [caught.value]


def with_index(process_idx: int, value: int) -> list[int]:
    return [process_idx, value, jax.process_count()]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_spawn_returns_the_output_of_process_0() -> None:
    strategy = DDPSpawnStrategy(parallel_devices=[torch.device("cpu")] * 2)
    assert strategy.num_processes == 2 and strategy.get_mp_spawn_kwargs() == {"nprocs": 2}
    assert strategy.spawn(with_index, 7) == [0, 7, 2]


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(MisconfigurationException, match=r"ddp_comm_hook=….*XLA chooses"):
        DDPSpawnStrategy(ddp_comm_hook=print)
    with pytest.raises(MisconfigurationException, match="starts processes on this machine only"):
        trainer(strategy="ddp_spawn", devices=2, num_nodes=2)
    with pytest.raises(TypeError, match="unexpected arguments"):
        DDPSpawnStrategy(nonsense=1)
    assert resolve("pytorch_lightning.strategies.DDPSpawnStrategy") is DDPSpawnStrategy


def test_a_timeout_is_the_collectives() -> None:
    assert DDPStrategy(timeout=timedelta(seconds=7)).timeout_s == 7
