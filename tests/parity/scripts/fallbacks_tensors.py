"""Batches with tensors of classes of their own, as torchvision's images, masks and boxes are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from basics import Regression, regression_data
from recording import Run, case
from torch import Tensor
from torch.utils.data import DataLoader


class Labelled(Tensor):
    """A tensor that is one of its class until an op has computed another of it, but for ``clone`` and ``to``."""

    @classmethod
    def made(cls, tensor: Tensor, **attributes: Any) -> Any:
        made = tensor.as_subclass(cls)
        vars(made).update(attributes)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func in (Tensor.clone, Tensor.to):
            return cls.made(found, **{name: value for name, value in vars(args[0]).items() if name == "size_"})
        return found.as_subclass(Tensor) if isinstance(found, cls) else found

    def spread(self) -> Tensor:
        return self * self.size_[0]

    size_: tuple[int, int]


class Area(Labelled):
    """One of a subclass."""


@dataclass
class Rows:
    """A batch."""

    x: Area
    y: Labelled


class Telling(Regression):
    """Computes by class and attributes of what it is given."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch.x, batch.y.clone()
        if isinstance(x, Area) and isinstance(x, Labelled) and not isinstance(y, Area):
            x = x.spread()
        told = [isinstance(one, Labelled) for one in (x, y, y * 1, batch.x)]
        assert told == [False, True, False, True], told
        loss = (self(x) - y / y.size_[1]).square().mean()
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch.x.clone(), self(batch.x), batch.y


def _loader(run: Run, sizes: tuple[tuple[int, int], ...]) -> Any:
    met: list[int] = []

    def collate(rows: list[Any]) -> Rows:
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        size = sizes[len(met) % len(sizes)]
        met.append(0)
        return Rows(Area.made(x, size_=size), Labelled.made(y, size_=size))

    rows = list(zip(*regression_data(), strict=True))
    return DataLoader(rows, batch_size=run.batch_size, collate_fn=collate)  # pyright: ignore[reportArgumentType]


@case
def tensors_of_own_classes_with_attributes_in_a_dataclass(run: Run) -> None:
    run.fit(Telling(), run.trainer(max_epochs=2), _loader(run, ((2, 4), (3, 5))))


@case
def an_attribute_of_a_tensor_of_the_batch_is_set(run: Run) -> None:
    class Setting(Telling):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch.x.size_ = (batch.x.size_[0] + 1, 1)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append(list(batch.x.size_))

    found: list[Any] = []
    run.fit(Setting(), run.trainer(max_epochs=1), _loader(run, ((2, 4),)))
    run.note("sizes", found)


@case
def a_step_gives_tensors_of_own_classes(run: Run) -> None:
    class Giving(Telling):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "x": batch.x.clone(), "y": batch.y}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append([type(outputs[name]).__name__ for name in ("loss", "x", "y")])
            found.append(list(outputs["x"].size_))

    found: list[Any] = []
    run.fit(Giving(), run.trainer(max_epochs=1), _loader(run, ((2, 4),)))
    run.note("classes", found)


@case
def a_step_gives_the_tensors_of_own_classes_of_the_batch(run: Run) -> None:
    class Giving(Telling):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "y": batch.y, "batch": batch}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append([type(outputs["y"]).__name__, list(outputs["y"].size_), type(outputs["batch"].x).__name__])

    found: list[Any] = []
    run.fit(Giving(), run.trainer(max_epochs=1), _loader(run, ((2, 4),)))
    run.note("classes", found)


@case
def predictions_of_own_classes(run: Run) -> None:
    model, trainer = Telling(), run.trainer(max_epochs=1)
    run.initialise(model)
    found: Any = trainer.predict(model, _loader(run, ((2, 4),)))
    run.note("predictions", [[(type(one).__name__, one.tolist()) for one in batch] for batch in found])


@case
def classes_of_tensors_are_asked_for(run: Run) -> None:
    """With ``type``, which is what it is whatever stands for a tensor while a step is captured."""

    class Asking(Telling):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            asked = (batch.x, batch.y, batch.y * 1, loss, self.layer.weight)
            factors = {Area: 2.0, Labelled: 3.0, Tensor: 0.5}
            for one in asked:
                loss = loss * factors.get(type(one), 0.7)
            kinds = [*map(type, asked)]
            assert kinds == [Area, Labelled, Tensor, Tensor, torch.nn.Parameter] and type(loss) is Tensor, kinds
            return loss

    run.fit(Asking(), run.trainer(max_epochs=1), _loader(run, ((2, 4),)))
