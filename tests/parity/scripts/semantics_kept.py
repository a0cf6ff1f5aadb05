"""What a step keeps: tensors, objects, containers, averages and counters."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from basics import Regression
from recording import Run, case
from semantics_models import Deep, fit
from torch import Tensor, nn


@case
def tensors_kept_in_containers(run: Run) -> None:
    class Keeping(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Any] = []
            self.by_kind: dict[str, Any] = {"losses": [], "nested": {"last": None}}
            self.recent: deque[Tensor] = deque()
            self.latest: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.kept.append({"loss": loss.detach(), "size": len(batch[0])})
            self.by_kind["losses"].append(loss.detach() * 2)
            self.by_kind["nested"]["last"] = loss.detach() + 1
            self.recent.append(loss.detach() - 1)
            self.latest = (loss.detach(), "note")
            self.columns = batch[0].shape[1:]
            return loss

        def on_train_epoch_end(self) -> None:
            run.note(f"kept {self.current_epoch}", [[one["loss"], one["size"]] for one in self.kept])
            run.note(f"kinds {self.current_epoch}", self.by_kind)
            run.note(f"recent {self.current_epoch}", list(self.recent))
            run.note(f"columns {self.current_epoch}", str(self.columns))
            run.note(f"latest {self.current_epoch}", self.latest)
            self.log("mean_of_kept", torch.stack([one["loss"] for one in self.kept]).mean())
            self.kept.clear()
            self.recent.clear()

    fit(run, Keeping(), n=56)


@case
def tensors_kept_in_submodules_and_callbacks(run: Run) -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []
            self.norm: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x.detach().mean())
            self.norm = x.detach().norm()
            return x * 1.5

    class Collector(pl.Callback):
        def __init__(self) -> None:
            self.values: list[Tensor] = []

    class Probed(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.probe = Probe()

        def forward(self, x: Tensor) -> Tensor:
            return self.probe(self.layer(x))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            collector.values.append(loss.detach())
            return loss

    collector = Collector()
    model = Probed()
    fit(run, model, callbacks=[collector])
    run.note("seen", model.probe.seen)
    run.note("norm", model.probe.norm)
    run.note("values", collector.values)


KEPT_BY_THE_SCRIPT: list[Any] = []


@case
def containers_in_two_places(run: Run) -> None:
    """A list that is there is stored somewhere else, or returned: it stays the very list, also in a tuple."""

    class Storing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.lists: list[list[Any]] = [[], []]
            self.seen: dict[str, Any] = {"all": []}
            self.current: list[Any] = []
            self.counted: tuple[int, tuple[list[int]]] = (0, ([],))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.current = self.lists[batch_idx % 2]
            self.current.append(loss.detach())
            self.seen["last"] = (self.seen["all"], batch_idx)
            self.seen["last"][0].append(batch_idx)
            count, (counts,) = self.counted
            counts.append(count)
            self.counted = count + 1, (counts,)
            return {"loss": loss, "seen": self.seen["all"]}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.current.append(-1.0)
            outputs["seen"].append(len(outputs["seen"]))

    class Exchanging(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.first: list[int] = []
            self.others: list[list[int]] = [[], []]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.first, self.others[0] = self.others[0], self.first
            self.others.append(self.others.pop(0))
            self.first.append(batch_idx)
            return super().training_step(batch, batch_idx)

    storing, exchanging = Storing(), Exchanging()
    fit(run, storing, n=56)
    run.note("stored", [storing.lists, storing.current, storing.seen, storing.counted])
    fit(run, exchanging, n=56)
    run.note("exchanged", [exchanging.first, exchanging.others])


@case
def one_new_object_in_two_places(run: Run) -> None:
    """What a step makes and stores or returns twice is one object, which hooks change in both places; also an empty one."""

    class Twice(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[dict[str, Any]] = []
            self.seen: list[Any] = []
            self.apart = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.first = self.second = []
            self.third = [] if self.apart else self.first
            row = {"loss": loss.detach(), "marks": [loss.detach().clone()]}
            self.rows.extend([row, row])
            self.last = {"row": row, "marks": (row["marks"], {batch_idx})}
            self.ids = self.same_ids = {7}
            self.value, self.values = row["loss"], [row["loss"], 2 * row["loss"]]
            return {"loss": loss, "row": row, "again": (row, row["marks"])}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.first.append(batch_idx)
            self.rows[-1]["seen"] = batch_idx
            self.last["row"]["marks"].append(-1.0)
            outputs["again"][1].append(-2.0)
            self.ids.add(batch_idx)
            self.value.mul_(0)
            same = [self.first is self.second, self.rows[-1] is self.rows[-2], outputs["row"] is self.last["row"]]
            self.seen.append([list(self.second), list(self.third), sorted(outputs["row"]), *same])
            self.seen.append([list(self.last["marks"][0]), sorted(self.same_ids), *self.values])
            self.apart = batch_idx == 1

    model = Twice()
    fit(run, model, n=56)
    run.note("seen", model.seen)
    run.note("rows", model.rows)


@case
def own_tensors_that_a_step_keeps(run: Run) -> None:
    """A parameter, a buffer that is written to, a tensor of the batch: what the step stores is the very one, also detached."""

    class Keeping(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(8))
            self.kept: list[Any] = []
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, w = batch[0], self.layer.weight
            self.before = self.total.clone()
            self.total.add_(x.mean(0))
            self.last, self.weights, self.rows = self.total, {"all": [w], "values": w.data}, (x, x.detach())
            self.kept.append(w)
            loss = super().training_step(batch, batch_idx)
            self.losses = [loss.detach(), loss.detach()]
            return {"loss": loss, "bias": self.layer.bias, "x": x}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            w = self.layer.weight
            own = [self.weights["all"][0] is w, self.kept[-1] is w, outputs["bias"] is self.layer.bias, repr(self.kept)[:10]]
            self.seen.append([*own, self.last is self.total, outputs["x"] is batch[0], self.rows[0] is batch[0]])
            self.last.mul_(0.5)
            self.losses[0].fill_(3.0)
            self.rows[1].zero_()
            self.seen.append([self.total.clone(), self.before, self.weights["values"].clone(), self.losses[1], batch[0].sum()])

    model = Keeping()
    fit(run, model)
    run.note("seen", model.seen)


@case
def views_and_arrays_of_weights_that_are_kept(run: Run) -> None:
    """They show what each step makes of a weight, and what is written through them is the weight's."""

    class Kept(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(8))
            self.shown = {"view": self.layer.weight.data, "array": self.layer.bias.detach().numpy(), "part": self.total[:2]}
            self.seen: list[Any] = []

        def on_train_start(self) -> None:
            self.shown["later"] = self.layer.weight.detach()[:, 0]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.total.add_(batch[0].mean(0))
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append([torch.as_tensor(one).clone() for one in self.shown.values()])
            if batch_idx == 1:
                self.shown["view"].mul_(0.5)
                self.shown["part"].zero_()
                self.shown["array"][0] = 0.25

    model = Kept()
    fit(run, model)
    run.note("seen", model.seen)


@dataclasses.dataclass
class Marks:
    number: int = 0


@case
def new_objects_that_hooks_change(run: Run) -> None:
    """An array, a generator, an object that a step makes is another one in each step, as it has made it."""

    class Making(Regression):
        def __init__(self, make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
            super().__init__()
            self.make, self.change = make, change
            self.kept: list[Any] = []
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.last = self.make()
            self.kept.append(self.make())
            return {"loss": super().training_step(batch, batch_idx), "made": [self.make()], "set": {9}}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            outputs["set"].add(batch_idx)
            self.seen.append([self.change(one) for one in (self.last, self.kept[-1], outputs["made"][0])])
            self.seen.append([len(set(map(id, self.kept))), sorted(outputs["set"])])

    def add(array: np.ndarray) -> Any:
        array += 1
        return array.tolist()

    def count(marks: Marks) -> int:
        marks.number += 1
        return marks.number

    def lengthen(held: Any) -> Any:
        held.append(len(held))
        return list(held)

    kinds: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "array": (functools.partial(np.zeros, 2), add),
        "bytes": (functools.partial(bytearray, 1), lengthen),
        "generator": (functools.partial(np.random.default_rng, 4), lambda one: one.random()),
        "object": (Marks, count),
    }
    for name, (make, change) in kinds.items():
        model = Making(make, change)
        fit(run, model, n=64)
        run.note(name, model.seen)


COMPUTED: list[Any] = []


@functools.cache
def computed_once(number: int) -> float:
    COMPUTED.append(number)
    return 1.0 + number % 2


@case
def what_cached_functions_do_besides(run: Run) -> None:
    """A body runs at new arguments alone: what it appends, counts and draws comes once for each."""

    class Cached(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.counted: list[int] = []

        @functools.lru_cache(maxsize=2)  # noqa: B019
        def factor(self, number: int, validates: bool) -> float:
            self.counted.append(number)
            return 1 + validates + random.random()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * computed_once(batch_idx % 3)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("factor", self.factor(batch_idx // 2, True))

    COMPUTED.clear()
    computed_once.cache_clear()
    random.seed(3)
    model = Cached()
    fit(run, model, n=56, val=True)
    run.note("computed", COMPUTED)
    run.note("counted", model.counted)


@case
def tensors_kept_outside_of_the_module(run: Run) -> None:
    class Keeping(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            KEPT_BY_THE_SCRIPT.append(loss.detach())
            kept["last"] = loss.item()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append([len(KEPT_BY_THE_SCRIPT), kept["last"]])

    KEPT_BY_THE_SCRIPT.clear()
    kept: dict[str, float] = {}
    found: list[Any] = []
    fit(run, Keeping())
    run.note("kept", KEPT_BY_THE_SCRIPT)
    run.note("found", found)


@case
def moving_average_in_an_attribute(run: Run) -> None:
    class Averaging(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.average: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.average = loss.detach() if self.average is None else 0.9 * self.average + 0.1 * loss.detach()
            self.log("average", self.average)
            return loss

    model = Averaging()
    fit(run, model)
    run.note("average", model.average)


@case
def moving_average_in_a_buffer(run: Run) -> None:
    class Buffered(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(()))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.average.mul_(0.9).add_(0.1 * loss.detach())
            self.count += 1
            self.log("average", self.average)
            return loss * (1 + 0.01 * self.count)

    fit(run, Buffered())


@case
def buffers_made_in_forward(run: Run) -> None:
    """A cache in a buffer that is None at first, anew for each batch size; and a buffer that the first step registers."""

    class Lazy(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ramp", None, persistent=False)
            self.size = -1

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) != self.size:
                self.ramp = torch.linspace(0, 1, len(batch[0])) + 0 * batch[0].detach().mean()
                self.size = len(batch[0])
            if not hasattr(self, "scale"):
                self.register_buffer("scale", 1 + batch[0].detach().mean().abs())
            return super().training_step(batch, batch_idx) * (1 + self.ramp.mean()) * self.scale

    model = Lazy()
    fit(run, model)
    run.note("ramp", list(model.ramp.shape))
    run.note("scale", model.scale)


@case
def counted_in_python(run: Run) -> None:
    class Counting(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.sizes: dict[int, int] = defaultdict(int)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.calls += 1
            self.sizes[len(batch[0])] += 1
            return super().training_step(batch, batch_idx) * (1 + 0.01 * self.calls)

    model = Counting()
    fit(run, model)
    run.note("calls", model.calls)
    run.note("sizes", model.sizes)


@case
def numbers_that_come_and_go(run: Run) -> None:
    """The step deletes and sets an attribute in turns; a hook makes another."""

    class Turning(Regression):
        flag: int
        epochs: int

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if hasattr(self, "flag"):
                del self.flag
                loss = loss * 0.5
            else:
                self.flag = 1
            return loss * (1 + 0.1 * getattr(self, "epochs", 0))

        def on_train_epoch_end(self) -> None:
            self.epochs = getattr(self, "epochs", 0) + 1

    fit(run, Turning(), n=80, max_epochs=4)


@case
def an_attribute_that_is_none_or_not_there(run: Run) -> None:
    class Fallback(Regression):
        scale: Any = 3.0

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.penalty = None, None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            scale = 1.0 if self.scale is None else self.scale
            scale += 0.0 if getattr(self, "penalty", 1) is None else 0.5
            self.log("scale", scale)
            return scale * super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            at = self.current_epoch, batch_idx
            if at == (1, 0):
                del self.scale
            elif at == (1, 2):
                del self.penalty
            elif at == (2, 1):
                self.scale = self.penalty = None

    fit(run, Fallback(), max_epochs=3)


@case
def counters_kept(run: Run) -> None:
    class Keeping(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.indices: list[int] = []
            self.last: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.indices.append(batch_idx)
            self.last = {"epoch": self.current_epoch, "next": self.global_step + 1}
            return {"loss": super().training_step(batch, batch_idx), "index": batch_idx, "half": batch_idx / 2}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append([outputs["index"], outputs["half"], self.last["epoch"], self.last["next"]])

    found: list[Any] = []
    model = Keeping()
    fit(run, model)
    run.note("indices", [int(i) for i in model.indices])
    run.note("found", [[float(x) for x in row] for row in found])


@case
def values_read_in_the_step(run: Run) -> None:
    class Reading(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.values: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.values.append(loss.item())
            return loss

    model = Reading()
    fit(run, model, val=True, accumulate_grad_batches=2, gradient_clip_val=0.5)
    run.note("values", model.values)
