"""Our loop counters in the layout of stock Lightning's checkpoints, so that stock continues where we stopped, and back.

Layout: ``checkpoint["loops"]`` of Lightning 2.6, as its ``ModelCheckpoint`` writes it in ``on_train_batch_end`` (inside an epoch:
the last batch is processed, but not completed) and in ``on_train_epoch_end``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_compat.utilities.exceptions import MisconfigurationException

REWRITE = (
    "rewrite it once with stock Lightning, `python -m lightning.pytorch.utilities.upgrade_checkpoint FILE`; or take its weights "
    "only, by Module.load_from_checkpoint"
)
"""What to do with a checkpoint of Lightning 1.x."""

_STAGES = ("ready", "completed", "started", "processed")


def is_ours(loops: Mapping[str, Any]) -> bool:
    """Whether ``checkpoint["loops"]`` has our counters rather than stock's, or among them, as earlier releases wrote it."""
    return "global_step" in loops.get("fit_loop", {})


def read(state: Mapping[str, Any], ours: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Our counters of ``checkpoint["loops"]["fit_loop"]``: stock's, if ours are missing or somebody changed those.

    Args:
        state: in stock's layout; of earlier releases of ours, with our counters among stock's.
        ours: ``"counters"``, ours, and ``"written"``, stock's, as they were when the checkpoint was saved.
    """
    if ours is None:
        if not is_ours({"fit_loop": state}):
            return from_stock(state)
        ours = {"counters": state, "written": to_stock({"fit_loop": state})["fit_loop"]}
    changed = any(name in state and state[name] != value for name, value in ours["written"].items())
    return from_stock(state) if changed else ours["counters"]


def from_stock(state: Mapping[str, Any]) -> dict[str, Any]:
    """Our counters of what stock's fit loop saved, ``checkpoint["loops"]["fit_loop"]``.

    Raises:
        MisconfigurationException: of Lightning before 2.0, which counted otherwise.
    """
    if "epoch_loop.automatic_optimization.optim_progress" not in state:
        raise MisconfigurationException(
            "the checkpoint's loop counters are not those of Lightning 2.x (there is no "
            f"'epoch_loop.automatic_optimization.optim_progress', but {', '.join(map(repr, sorted(state)))}): {REWRITE}"
        )
    batches = state["epoch_loop.batch_progress"]
    epochs = state["epoch_progress"]["current"]
    steps = (
        state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
        or state["epoch_loop.manual_optimization.optim_step_progress"]["total"]["completed"]
    )
    # In the hooks at the end of a batch, and in the validation after it, the batch is processed, but neither need be completed,
    # nor is the epoch of the last batch processed.
    inside = epochs["started"] > epochs["processed"]
    ended = inside and batches["is_last_batch"]
    return {
        "epoch": epochs["processed"] + ended,
        "unfinished_epoch": inside or epochs["ready"] > epochs["processed"],
        "ended_epoch": epochs["processed"] > epochs["completed"],
        "inside": inside and not ended,
        "shown_batches": batches["current"]["processed"],
        "batch": batches["current"]["processed"] if inside and not ended else 0,
        "total_batch": batches["total"]["processed"],
        "global_step": steps,
        "logged_step": state["epoch_loop.state_dict"].get("_batches_that_stepped", steps),
        "validation_pending": False,
        "scheduler_steps": state["epoch_loop.scheduler_progress"]["total"]["completed"],
    }


def to_stock(loops: Mapping[str, Any]) -> dict[str, Any]:
    """``checkpoint["loops"]`` as stock Lightning reads it."""
    state = loops["fit_loop"]
    epochs, batch, total, steps = (state[name] for name in ("epoch", "batch", "total_batch", "global_step"))
    inside = batch > 0
    ended = not inside and epochs > 0
    current = batch if inside else (total // epochs if ended else 0)
    begun = epochs + inside
    no_batches = _batches(0, 0, inside=False)
    epoch_progress = {"ready": begun, "completed": max(begun - 1, 0), "started": begun, "processed": epochs}
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": state["logged_step"] - inside if steps else 0},
        "epoch_loop.batch_progress": {
            **_batches(total, current, inside=inside),
            "is_last_batch": ended or state.get("is_last_batch", False),
        },
        "epoch_loop.scheduler_progress": _counted(state.get("scheduler_steps", 0), 0),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": _counted(steps, current),
                "zero_grad": {part: {**value, "started": value["ready"]} for part, value in _counted(steps, current).items()},
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": _counted(0, 0),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {**no_batches, "is_last_batch": False},
        "epoch_progress": {part: dict(epoch_progress) for part in ("total", "current")},
    }
    evaluation = {"state_dict": {}, "batch_progress": {**no_batches, "is_last_batch": False}}
    return {
        "fit_loop": fit,
        "validate_loop": evaluation,
        "test_loop": evaluation,
        "predict_loop": {"state_dict": {}, "batch_progress": no_batches},
    }


def _batches(total: int, current: int, *, inside: bool) -> dict[str, dict[str, int]]:
    return {
        part: {stage: count - (inside and stage == "completed") for stage in _STAGES}
        for part, count in (("total", total), ("current", current))
    }


def _counted(total: int, current: int) -> dict[str, dict[str, int]]:
    return {part: {"ready": count, "completed": count} for part, count in (("total", total), ("current", current))}
