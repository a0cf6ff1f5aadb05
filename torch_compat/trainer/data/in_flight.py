"""The states of each process in a checkpoint: the host's random streams, the places in the data, the metrics in flight."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_compat.run.states import RunningStage
from torch_compat.trainer import metric_states
from torch_compat.trainer.data import host_random
from torch_compat.trainer.data.loader_pass import between_passes, set_between_passes
from torch_compat.trainer.data.moved_streams import OfProcesses
from torch_compat.utilities.combined_loader import CombinedLoader
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.cluster.distributed import all_gather_object, world

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

State = dict[str, Any]


def dump(trainer: Trainer) -> State:
    """The state of every process, in the order of their ids; one for all where they are equal. Collective."""
    here: State = {
        "streams": host_random.streams(),
        "train": trainer.fit_loop.data.state(),
        "val": loaders_between(trainer.validate_loop.source.combined),
        "results": trainer.fit_loop.results.state_dict(trainer.lightning_module),
        "metrics": metric_states.states(trainer.lightning_module, _about_to_be_reset(trainer)),
        "logged": trainer.metric_log.state_dict(),
        "val_steps": dict(trainer.validate_loop.step_counts),
    }
    states = all_gather_object(here)
    first = pickle.dumps(states[0])
    equal = all(pickle.dumps(state) == first for state in states)
    return {"processes": len(states), "states": states[:1] if equal else states}


def _about_to_be_reset(trainer: Trainer) -> set[int]:
    """Metrics that were logged as objects, and that the end of the epoch that is ending will reset."""
    ending = [] if trainer.fit_loop.is_inside else [trainer.fit_loop.results]
    if trainer.state.stage == RunningStage.VALIDATING:
        ending.append(trainer.validate_loop.results)
    return {id(metric) for results in ending for metric in results.torchmetrics()}


def load(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Give this process its state; what belongs to loaders and to the epoch waits for these.

    Raises:
        MisconfigurationException: the run had another number of processes, which does not divide the items that were read.
    """
    here, states = world(), list(saved["states"])
    if len(states) < saved["processes"]:
        states *= saved["processes"]
    module = trainer.lightning_module
    if saved["processes"] == here.process_count:
        mine = states[here.process_id]
    else:
        metrics = metric_states.merged(module, [state["metrics"] for state in states], here.process_id)
        train = _moved(states, saved["processes"], here.process_count, trainer)
        mine = {**states[0], "metrics": metrics, "train": train, "val": _of_all([state["val"] for state in states])}
    metric_states.load(module, mine["metrics"])
    trainer.metric_log.load_state_dict(mine["logged"])
    trainer.validate_loop.step_counts.update(mine["val_steps"])
    trainer.fit_loop.resumption.state = mine


def _moved(states: list[State], before: int, now: int, trainer: Trainer) -> State:
    """The places in the data on another number of processes.

    Those of index streams are the same. A loader whose items are each one process's batch is at the same item. Where every
    process has a stream of its own, the loader is asked when it is there (:mod:`.moved_streams`).
    """
    trains = [state["train"] for state in states]
    train = trains[0]
    if "position" not in train:
        return {**train, "loaders": _of_all([one["loaders"] for one in trains])}
    parts = _of_all([one["position"]["loaders"] for one in trains])
    position = {**train["position"], "ahead": [], "loaders": parts}
    if all(part["unit"] == "item" for part in parts):
        trainer.fit_loop.resumption.batches = _whole(train["batches"] * before, now)
        position["loaders"] = [_at_item(part, before, now) for part in parts]
    return {**train, "batches": trainer.fit_loop.resumption.batches, "position": position}


def _of_all(loaders: Sequence[Sequence[State]]) -> list[State]:
    """The state of each loader, as on the first process; where every process has a stream of its own, with the states of all."""
    return [
        {**same[0], "own": OfProcesses([part["own"] for part in same])}
        if same[0]["own"] is not None and same[0]["unit"] == "stream"
        else same[0]
        for same in zip(*loaders, strict=True)
    ]


def _at_item(part: State, before: int, now: int) -> State:
    taken = _whole(part["taken"] * before, now)
    return {**part, "taken": taken, "own": None if part["own"] is None else {"taken": taken}}


def _whole(items: int, processes: int) -> int:
    if items % processes:
        raise MisconfigurationException(
            f"the checkpoint was saved after {items} batches of the loader, and {processes} processes take one each at a time: "
            f"resume on a number of processes that divides {items}"
        )
    return items // processes


def loaders_between(combined: CombinedLoader | None) -> list[State]:
    """The states of the loaders that outlive their passes."""
    return [] if combined is None else [between_passes(loader) for loader in combined.flattened]


def resume_loaders(combined: CombinedLoader | None, states: Sequence[State], name: str) -> None:
    """Give loaders that will begin a pass what theirs had between two; other loaders than those that were saved begin anew."""
    loaders = [] if combined is None else combined.flattened
    if len(loaders) == len(states):
        for loader, state in zip(loaders, states, strict=True):
            set_between_passes(loader, state, name)
