"""Objects, tables and functions outside of the module that hooks change, or that the step itself changes."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import types
from typing import Any, ClassVar

import numpy as np
import torch
from basics import Regression, regression_data
from lightning_utilities.core.apply_func import apply_to_collection
from recording import Run, case
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from tqdm import tqdm
from transformers import PretrainedConfig

CONFIG = PretrainedConfig(alpha=1.0)
LARGE = [1.0] * 2000
LARGE_ARRAY = np.ones(40_000, np.float32)
SCALES = {"plain": lambda loss: loss, "scaled": lambda loss: loss * FACTOR}
FACTOR = 1.0


class Named:
    alpha_plain = 1.0


class Meter:
    """A meter as many projects write it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.value = self.sum = self.count = self.average = 0.0

    def update(self, value: float, n: int = 1) -> None:
        self.value = value
        self.sum += value * n
        self.count += n
        self.average = self.sum / self.count


class Leaving:
    def __exit__(self, *_: Any) -> None:
        """Nothing is left to be done."""


METER, LAST = Meter(), argparse.Namespace()
SPACE = types.SimpleNamespace(smooth=0.0)
FOREIGN = PretrainedConfig(seen=0)


class Following(Regression):
    change: Any = None
    other_name = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * CONFIG.alpha * LARGE[0] * torch.from_numpy(LARGE_ARRAY)[0]
        for kind in ("plain", "scaled"):
            loss = SCALES[kind](loss)
        for name in ("alpha", "other"):
            loss = loss * (getattr(Named, f"{name}_plain", None) or getattr(self, f"{name}_name"))
        self.log("train_loss", loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.change(self.trainer.global_step)


def fit_changing(run: Run, change: Any) -> None:
    model = Following()
    model.change = change
    run.fit(model, run.trainer(max_epochs=2), run.loader(*regression_data(64)))


@case
def what_is_followed_outside(run: Run) -> None:
    def change(step: int) -> None:
        global FACTOR
        if step == 1:
            CONFIG.alpha = 0.5
        elif step == 2:
            LARGE.insert(0, 3.0)
        elif step == 3:
            FACTOR = 0.5
        elif step == 4:
            Named.alpha_plain = 2.0
        elif step == 5:
            Following.other_name = 0.25

    fit_changing(run, change)


@case
def meters_outside(run: Run) -> None:
    class Metered(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            METER.update(loss.item(), n=len(batch[0]))
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("meter", METER.average)
            METER.reset()

    METER.reset()
    run.fit(Metered(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))


@case
def values_kept_outside(run: Run) -> None:
    class Keeping(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            LAST.loss = loss.detach()
            FOREIGN.seen += 1
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log_dict({"last": LAST.loss, "seen": float(FOREIGN.seen)})

    FOREIGN.seen = 0
    run.fit(Keeping(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))


class Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.layer(x))


@case
def modules_that_libraries_call(run: Run) -> None:
    """Modules in a tuple of a class, of which a step sees only that a function of a library gets them."""

    class Calling(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            one, two, three, four = self.parts
            x = checkpoint(one, x, use_reentrant=False)
            x = checkpoint_sequential([two, three], 2, x, use_reentrant=False)
            (x,) = map(four, [x])
            return super().training_step((x, y), batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log_dict({f"calls_{place}": float(one[-1].calls) for place, one in enumerate(self.parts)})

    Calling.parts = tuple(torch.nn.Sequential(Counted()).requires_grad_(False) for _ in range(4))
    run.fit(Calling(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))


@case
def smoothed_in_a_namespace(run: Run) -> None:
    class Smoothing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            SPACE.smooth = 0.9 * SPACE.smooth + 0.1 * loss.item()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("smooth", SPACE.smooth)

    SPACE.smooth = 0.0
    run.fit(Smoothing(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))


@case
def filled_objects_of_pythons_library(run: Run) -> None:
    """Their methods are Python: a ChainMap has its entries in the first dict of a list, an ExitStack in a deque."""
    settings, exits, leaving = collections.ChainMap[str, Any]({}, {"last": -1}), contextlib.ExitStack(), Leaving()

    class Filling(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            settings["last"] = batch_idx
            settings["text"] = f"{loss * 0:.2f} in {batch_idx}"
            exits.push(leaving)
            with contextlib.ExitStack() as stack:
                stack.callback(self.left.append, batch_idx)
            return loss

    Filling.left = []
    run.fit(Filling(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))
    run.note("kept", [dict(settings), len(exits._exit_callbacks), Filling.left])


@case
def methods_of_containers_that_libraries_call(run: Run) -> None:
    class Kept:
        counts, seen, last, table = [], set(), collections.deque(maxlen=2), {}

    class Giving(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            apply_to_collection([batch_idx], int, Kept.counts.append)
            tree_map(Kept.seen.add, {"a": batch_idx})
            with contextlib.ExitStack() as stack:
                stack.callback(Kept.last.appendleft, batch_idx)
                stack.callback(Kept.table.update, last=batch_idx)
            return super().training_step(batch, batch_idx)

    run.fit(Giving(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))
    run.note("kept", [Kept.counts, sorted(Kept.seen), list(Kept.last), Kept.table])


@case
def changed_in_place_by_augmented_assignments(run: Run) -> None:
    class Table(dict):
        """A dict with attributes."""

    class Kept:
        rows, table, last, counts, own = [], {}, collections.deque(maxlen=2), collections.Counter(), Table()

    class Adding(Regression):
        seen: ClassVar[list[int]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            Kept.rows += [batch_idx]
            Kept.table |= {"last": batch_idx}
            Kept.last += [batch_idx]
            Kept.counts += collections.Counter(batches=1)
            Kept.own.steps = Kept.own.steps + 1 if hasattr(Kept.own, "steps") else 0
            Kept.own["steps"] = Kept.own.steps
            self.seen += [batch_idx]
            return super().training_step(batch, batch_idx)

    run.fit(Adding(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))
    found = [Kept.rows, Kept.table, list(Kept.last), dict(Kept.counts), dict(Kept.own), vars(Kept.own), Adding.seen]
    run.note("kept", found)


@case
def a_bar_of_the_users_own_that_a_step_moves(run: Run) -> None:
    """It holds a lock: a capture ends before the bar has moved, and the step is eager."""
    bar = tqdm(total=100, file=io.StringIO(), mininterval=0)

    class Moving(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            bar.update(1)
            return super().training_step(batch, batch_idx)

    run.fit(Moving(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))
    run.note("moved", bar.n)
