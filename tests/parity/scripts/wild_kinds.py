"""Kinds of steps that libraries on Lightning have: parameters of a class of their own, validation that decodes in Python."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from basics import Classifier, class_data
from recording import Run, case
from semantics_models import BackwardInTheStep, Reversible, fit
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Exponential(torch.autograd.Function):
    """Saves its result, whose graph holds the context; TabNet's sparsemax does the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, scales: tuple[float, ...]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.dim, ctx.scales = dim, []
        for scale in scales:
            ctx.scales.append(scale)
        result = (x - x.amax(dim, keepdim=True)).exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (result,) = ctx.saved_tensors
        return result * (grad - grad.mean(ctx.dim, keepdim=True)) * ctx.scales[-1], None, None


@case
def backward_passes_in_a_backward(run: Run) -> None:
    class Walking(Classifier):
        retained = False

        def __init__(self) -> None:
            super().__init__()
            self.layers = Reversible()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            out = self.net(self.layers(x))
            if self.retained:
                out.retain_grad()
            loss = F.cross_entropy(out, y)
            self.log("loss", loss)
            return loss

    for index, (shared, retained, accumulate) in enumerate(((False, False, 1), (True, False, 2), (True, True, 1))):
        torch.manual_seed(index)
        model = Walking()
        model.layers.shared, model.retained = shared, retained
        run.fit(model, run.trainer(max_epochs=1, accumulate_grad_batches=accumulate), run.loader(*class_data(64)))
        run.note(f"block {index}", [float(one.detach().square().sum()) for one in model.layers.parameters()])


@case
def modules_moved_to_where_they_are(run: Run) -> None:
    class Moving(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.net.to(batch[0].device).float().cpu()
            weight = torch.linspace(0.5, 1.5, 3)
            loss = nn.CrossEntropyLoss(weight).to(batch[0])(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

    run.fit(Moving(), run.trainer(max_epochs=1), run.loader(*class_data(64)))


@case
def a_backward_pass_in_the_step(run: Run) -> None:
    fit(run, BackwardInTheStep())


class Scaled(nn.Parameter):
    """A parameter of a class of its own, as manifolds' are."""

    scale: float

    def __new__(cls, data: Tensor, scale: float) -> Scaled:
        made = torch.Tensor._make_subclass(cls, data, True)
        made.scale = scale
        return made


class ScaledSGD(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * (p.scale if isinstance(p, Scaled) else getattr(p, "slower", 1.0)))
        return loss


@case
def parameters_of_another_class_with_attributes(run: Run) -> None:
    class Weighted(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.shift = Scaled(torch.zeros(8), 3.0)
            self.net[0].bias.slower = 0.5  # pyright: ignore[reportAttributeAccessIssue]
            self.classes: list[str] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            if not self.classes:
                self.classes = [type(self.shift).__name__, type(self.net[0].weight).__name__]
            penalty = sum(p.square().sum() * getattr(p, "decay", 0.0) for p in self.parameters() if isinstance(p, nn.Parameter))
            loss = F.cross_entropy(self.net(x + self.shift), y) + penalty
            self.log("loss", loss)
            return loss

        def on_train_epoch_end(self) -> None:
            self.shift.decay = 0.1 * (self.current_epoch + 1)  # pyright: ignore[reportAttributeAccessIssue]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return ScaledSGD(self.parameters(), 0.1)

    model = Weighted()
    run.fit(model, run.trainer(max_epochs=3), run.loader(*class_data(64)))
    run.note("classes", model.classes)


@torch.jit.script
def sized(x: Tensor, classes: int) -> Tensor:
    found = torch.zeros(classes)
    for number in range(classes):
        found[number] = x[:, number].square().sum()
    return found


@torch.jit.script
def score(out: Tensor, y: Tensor, average: str = "macro", part: float = 1.0) -> Tensor:
    """As a metric's library writes it: sizes of what masks select, a branch by a value, another scripted function."""
    chosen = out.argmax(1)
    right = torch.zeros(3).scatter_(0, y[chosen == y], 1.0, reduce="add")
    right = right * torch.ones(3).scatter(0, y[chosen != y], 0.5)
    count = torch.zeros(3).scatter_add_(0, y, torch.ones(y.shape[0]))
    if average == "macro":
        there = count != 0
        right, count = right[there], count[there]
    if bool((out > 50.0).any()):
        out = out * 0.5
    return (right / count).mean() + 0.01 * sized(out, 3).mean() * torch.full((3,), part).mean()


@torch.jit.script
def share(right: Tensor, of: int) -> Tensor:
    return right / of


class Doubled(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@case
def scripted_functions(run: Run) -> None:
    """Also of what steps have stored, and nobody has read before."""

    class Scored(Classifier):
        right, last, twice = torch.tensor(0), torch.tensor(0.0), [torch.jit.script(Doubled())]

        def on_train_epoch_end(self) -> None:
            self.log("share", share(self.right, 64))
            self.log("twice", self.twice[0](self.last))
            self.right = torch.tensor(0)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            out = self.net(x)
            self.right = self.right + (out.argmax(1) == y).sum()
            self.last = out.detach().mean()
            self.log("score", score(out, y, part=2))
            return F.cross_entropy(out, y) + score(out, y, "micro", 2)

    run.fit(Scored(), run.trainer(max_epochs=2), run.loader(*class_data(64)))


class OnSphere(torch.Tensor):
    """A point whose class leaves torch's functions as they are, and has methods of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    radius = 2.0

    def project_(self) -> Tensor:
        return self.mul_(self.radius / self.norm(dim=-1, keepdim=True))

    def dist(self, other: Tensor, p: Any = 2) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.angle_of((self * other).sum(-1) / self.radius**2) if p == "g" else torch.dist(self, other)

    @staticmethod
    def angle_of(cosine: Tensor) -> Tensor:
        return cosine.clamp(-0.99, 0.99).acos()

    @classmethod
    def scaled(cls, value: Tensor) -> Tensor:
        return value * cls.radius


class PointOnSphere(OnSphere, nn.Parameter):
    def __new__(cls, data: Tensor) -> PointOnSphere:
        return torch.Tensor._make_subclass(cls, data, True)


class SphereSGD(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
                if isinstance(p, PointOnSphere):
                    p.project_()
        return loss


@case
def parameters_whose_class_has_methods(run: Run) -> None:
    class OnASphere(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.point = PointOnSphere(torch.linspace(-1, 1, 8)[None])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x + self.point[0]), y) + self.point.dist(F.normalize(x), p="g").mean()
            loss = loss + 0.1 * self.point.dist(x[:1]) + self.point.scaled(self.point).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return SphereSGD(self.parameters(), 0.1)

    model = OnASphere()
    run.fit(model, run.trainer(max_epochs=2), run.loader(*class_data(64)))
    run.note("class", type(model.point).__name__)


@case
def attributes_of_parameters_that_hooks_change(run: Run) -> None:
    class Warmed(Classifier):
        def __init__(self, *, manual: bool = False) -> None:
            super().__init__()
            self.shift = Scaled(torch.zeros(8), 3.0)
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x + self.shift), y)
            self.log("loss", loss)
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.shift.scale = 3.0 / (batch_idx + 1)
            if batch_idx == 1:
                self.net[0].bias.slower = 0.5  # pyright: ignore[reportAttributeAccessIssue]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return ScaledSGD(self.parameters(), 0.1)

    class WarmedLate(Warmed):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.shift.scale = self.shift.scale + 0.5

    for name, model in (("warmed", Warmed()), ("late", WarmedLate()), ("manual", Warmed(manual=True))):
        run.trainer(max_epochs=2).fit(model, run.loader(*class_data(64)))
        run.note(name, [parameter.detach().clone() for parameter in model.parameters()])


@case
def layers_in_another_order_for_each_batch(run: Run) -> None:
    """Steps with the same ops in the same order, on parameters of the same shapes: which ones tells them apart."""

    class Shuffled(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def loss(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            for index in random.Random(batch_idx).sample(range(3), 3):
                x = self.layers[index](x).tanh()
            return F.cross_entropy(self.net(x), y)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch, batch_idx))

    model, data = Shuffled(), run.loader(*class_data(64))
    run.note("before", run.trainer(num_sanity_val_steps=0).validate(model, data, verbose=False))
    run.fit(model, run.trainer(max_epochs=2), data, data)
    run.note("after", run.trainer().validate(model, data, verbose=False))


@case
def functions_that_save_their_results(run: Run) -> None:
    class Saving(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(Exponential.apply(self.net(x), 1, (0.5, 2.0)), y)  # pyright: ignore[reportArgumentType]
            self.log("loss", loss)
            return loss

    run.fit(Saving(), run.trainer(max_epochs=2), run.loader(*class_data(64)))


@case
def validation_that_decodes_in_python(run: Run) -> None:
    """Texts of what is predicted, letter by letter; a buffer, a list and a number of the module change meanwhile."""

    class Decoding(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.texts: list[str] = []
            self.longest = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.step(batch, "train") * (1 + 0.01 * self.longest + 0.001 * self.seen)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            logits = self.net(x)
            text, before = "", -1
            for found in logits.argmax(1).tolist():
                if found != before:
                    text += "abcdefgh"[found]
                before = found
            self.texts.append(text)
            self.longest = max(self.longest, len(text))
            self.seen += len(y)
            self.log("val_loss", F.cross_entropy(logits, y))
            self.log("length", float(len(text)))

    model = Decoding()
    run.fit(model, run.trainer(max_epochs=3, num_sanity_val_steps=1), run.loader(*class_data(64)), run.loader(*class_data(32, 1)))
    run.note("texts", model.texts)
    run.note("seen", model.seen.item())


@case
def tensors_carried_under_keys_and_in_attributes(run: Run) -> None:
    """Moving averages that the loss depends on, which a hook replaces; a table that is made once for each number of rows."""

    class Balanced(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.averages = {"loss": torch.tensor(1.0), "size": torch.tensor(1.0)}
            self.before: Tensor | None = None
            self.tables: dict[int, Tensor] = {}
            self.kept: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self.net(x)
            loss = F.cross_entropy(logits, y)
            if len(x) not in self.tables:
                self.tables[len(x)] = torch.linspace(0.5, 1.0, len(x))
            self.averages["loss"] = 0.9 * self.averages["loss"] + 0.1 * loss.detach()
            self.averages["size"] = 0.9 * self.averages["size"] + 0.1 * logits.detach().square().mean()
            mean = logits.mean(0)
            apart = 0.0 if self.before is None else (mean - self.before).square().sum()
            self.before = mean.detach()
            total = loss / self.averages["loss"] + self.averages["size"] * apart + (self.tables[len(x)] * logits[:, 0]).mean()
            self.log_dict({"total": total, "average": self.averages["loss"]})
            return total

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.kept.append(self.averages["size"])
            if self.global_step == 5:
                self.averages["loss"] = torch.tensor(2.0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Balanced()
    run.fit(model, run.trainer(max_epochs=3), run.loader(*class_data(72)))
    run.note("averages", [value.item() for value in (*model.averages.values(), *model.kept)])


@case
def arrays_drawn_by_numpy(run: Run) -> None:
    class Drawing(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(5)
            self.last: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            share = torch.as_tensor(np.random.random((x.size(0), 1)), dtype=x.dtype, device=x.device)
            shuffled = x[np.random.permutation(len(x))]
            weights = np.clip(1 + 0.1 * self.rng.normal(0, 1, len(x)), 0.5, 1.5)
            wrong = torch.from_numpy(np.random.randint(0, 3, len(x)))
            some = torch.tensor(random.choices(range(3), k=len(x)))
            logits = self.net(share * x + (1 - share) * shuffled)
            each = F.cross_entropy(logits, y, reduction="none") * torch.as_tensor(weights, dtype=x.dtype)
            loss = each.mean() - 0.01 * F.cross_entropy(logits, wrong) + 0.01 * F.cross_entropy(logits, some)
            noise = torch.from_numpy(np.random.normal(0, 1, x.shape).astype(np.float32)).mul_(0.1)
            loss = loss + 0.1 * F.cross_entropy(self.net(x + noise), y)
            alpha = torch.autograd.Variable(torch.Tensor(np.random.random((x.size(0), 1))))
            labels = torch.LongTensor(np.asarray(np.random.randint(0, 3, len(x))))
            loss = loss + 0.01 * F.cross_entropy(self.net(alpha * x), labels)
            mixed = np.random.beta(0.4, 0.4, 3)
            if mixed[0] > 0.5:
                loss = loss * float(mixed[1])
            self.last = mixed
            self.log("loss", loss)
            self.log("mean", weights.mean())
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.note(f"streams {self.current_epoch} {batch_idx}", [float(np.random.random()), random.random()])
            run.note(f"last {self.current_epoch} {batch_idx}", self.last.tolist())

    np.random.seed(3)
    random.seed(4)
    model = Drawing()
    run.fit(model, run.trainer(max_epochs=3), run.loader(*class_data(64)))


@case
def arrays_drawn_by_numpy_that_tensors_share(run: Run) -> None:
    class Drawing(Classifier):
        def __init__(self, way: str) -> None:
            super().__init__()
            self.way = way

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            drawn = np.random.normal(0, 1, x.shape).astype(np.float32)
            if self.way == "again":
                torch.from_numpy(drawn).mul_(0.1)
                noise = torch.from_numpy(drawn.reshape(x.shape))
            elif self.way == "before":
                noise = torch.from_numpy(drawn)
                torch.from_numpy(drawn).mul_(0.1)
            else:
                drawn *= 0.1
                noise = torch.from_numpy(drawn)
            return F.cross_entropy(self.net(x + noise), y)

    for way in ("again", "before", "array"):
        np.random.seed(3)
        model = Drawing(way)
        run.initialise(model)
        run.trainer(max_epochs=1).fit(model, run.loader(*class_data(32)))
        run.note(way, [parameter.detach().clone() for parameter in model.parameters()])
        run.note(f"{way}, stream", float(np.random.random()))


class Grid(nn.Module):
    """Adds coordinates that the first call has made, a tensor for each dim, as neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: dict[str, Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        if self.dims is None or self.dims["of"] != size:
            self.dims = {"of": size, "dims": [torch.linspace(0, 1, size), torch.linspace(1, 2, size)[None]]}
        first, second = self.dims["dims"]
        return x + first * second


@case
def cache_of_several_tensors(run: Run) -> None:
    class Placed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.grid = Grid()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(self.grid(batch[0])), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", F.cross_entropy(self.net(self.grid(batch[0])), batch[1]))

    for checked in (0, 2):
        model = Placed()
        trainer = run.trainer(max_epochs=2, num_sanity_val_steps=checked)
        run.fit(model, trainer, run.loader(*class_data(32)), run.loader(*class_data(32)))
        assert model.grid.dims is not None
        run.note(f"grid {checked}", [one.flatten().tolist() for one in model.grid.dims["dims"]])


@case
def setting_of_a_backend_that_the_step_reads(run: Run) -> None:
    class Asking(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            return loss * 2 if torch.backends.mkldnn.enabled else loss  # pyright: ignore[reportAttributeAccessIssue]

    run.fit(Asking(), run.trainer(max_epochs=2), run.loader(*class_data(32)))


@case
def tensors_of_a_module_that_the_step_walks(run: Run) -> None:
    class Walking(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            found = [name for one in self.modules() for name, held in one._parameters.items() if held is not None]
            found += [name for one in self.modules() for name in one.__dict__["_buffers"]]
            norm = sum(held.square().sum() for one in self.modules() for held in one._parameters.values() if held is not None)
            return F.cross_entropy(self.net(batch[0]), batch[1]) * len(found) + 0.1 * norm

    model = Walking()
    run.fit(model, run.trainer(max_epochs=2), run.loader(*class_data(32)))
    run.note("parameters", [type(one).__name__ for one in model.parameters()])


class Neuron(nn.Module):
    """Keeps a state that gets its shape from the first batch; snntorch's neurons do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mem", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mem.shape != x.shape:
            self.mem = torch.zeros_like(x)
        spike = (self.mem > 0.1).to(x.dtype)
        self.mem = 0.9 * self.mem.detach() + x - 0.1 * spike
        return self.mem


class Spiking(Classifier):
    def __init__(self, *, resets: bool = False, through: bool = False) -> None:
        super().__init__()
        self.neuron, self.resets, self.through = Neuron(), resets, through
        self.shapes: list[tuple[int, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.resets:
            self.neuron.mem = torch.zeros_like(self.neuron.mem)
        loss = F.cross_entropy(sum(self.neuron(self.net(batch[0])) for _ in range(2)), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.neuron(self.net(batch[0])), batch[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shapes.append(tuple(self.neuron.mem.shape))
        if self.through and batch_idx == 1:
            self.neuron.mem = torch.zeros(1)


@case
def buffers_that_get_their_shape_from_the_batch(run: Run) -> None:
    for name, options in (("kept", {}), ("reset", {"resets": True}), ("by a hook", {"through": True})):
        model = Spiking(**options)
        before = model.neuron.mem
        run.fit(model, run.trainer(max_epochs=2), run.loader(*class_data(56)), run.loader(*class_data(24)))
        run.note(f"{name}: state", [model.shapes, model.neuron.mem.tolist(), tuple(before.shape)])


@dataclasses.dataclass(slots=True)
class Sample:
    """Without a ``__dict__``; darts' samples and batches are such."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None


@dataclasses.dataclass(slots=True)
class NamedSample(Sample):
    name: str = "sample"


@case
def batches_of_dataclasses_with_slots(run: Run) -> None:
    class Model(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch.weight = batch.x.abs().mean(1)
            loss = (F.cross_entropy(self.net(batch.x), batch.y, reduction="none") * batch.weight).mean()
            self.log("loss", loss)
            self.losses.append(loss.detach())
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.note(f"{batch.name} {batch_idx}", float(batch.weight.sum()))

        def on_train_epoch_end(self) -> None:
            self.log("mean", torch.tensor(self.losses).mean())  # a list of tensors of no dimension

    def collate(rows: list[Any]) -> NamedSample:
        return NamedSample(*(torch.stack(column) for column in zip(*rows, strict=True)))

    rows = list(zip(*class_data(32), strict=True))
    run.fit(Model(), run.trainer(max_epochs=2), DataLoader(rows, batch_size=run.batch_size, collate_fn=collate))  # pyright: ignore[reportArgumentType]
