"""What the first step stores where None was, and the steps after it read; windows of losses."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from basics import Classifier, class_data
from recording import Run, case
from torch import Tensor, nn


class Stateful(Classifier):
    """A step whose logits ``self.look`` turns into something else, with what it keeps."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.look(self.net(x), y)
        self.log("loss", loss)
        return loss

    def look(self, z: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


class UnderAKey(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"mean": None, "losses": {"average": None}}

    def look(self, z: Tensor, y: Tensor) -> Tensor:
        before = self.state["mean"]
        self.state["mean"] = z.detach().mean(0) if before is None else 0.5 * before + 0.5 * z.detach().mean(0)
        loss, losses = F.cross_entropy(z - self.state["mean"], y), self.state["losses"]
        losses["average"] = loss.detach() if losses["average"] is None else 0.9 * losses["average"] + 0.1 * loss.detach()
        return loss / losses["average"]


class CenterOfTheFirst(Stateful):
    c: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.c = None

    def look(self, z: Tensor, y: Tensor) -> Tensor:
        if self.c is None:
            self.c = z.mean(0).detach()
        return F.cross_entropy(z, y) + (z - self.c).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = self.net(batch[0])
        self.log("val", z.mean() if self.c is None else (z - self.c).square().mean())


class CenterOfTheLast(CenterOfTheFirst):
    def look(self, z: Tensor, y: Tensor) -> Tensor:
        apart = 0.0 if self.c is None else (z - self.c).square().mean()
        self.c = z.mean(0).detach()
        return F.cross_entropy(z, y) + apart


class EntriesOfAList(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[Any] = [None, None]

    def look(self, z: Tensor, y: Tensor) -> Tensor:
        for index, rate in enumerate((0.5, 0.9)):
            mean, before = z.detach().mean(0), self.means[index]
            self.means[index] = mean if before is None else rate * before + (1 - rate) * mean
        return F.cross_entropy(z - self.means[0] + self.means[1], y)


class HiddenState(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden = nn.LSTMCell(3, 3), None

    def look(self, z: Tensor, y: Tensor) -> Tensor:
        hidden, cell = self.cell(z, self.hidden)
        self.hidden = (hidden.detach(), cell.detach())
        return F.cross_entropy(z + hidden, y)


@case
def stored_by_the_first_step(run: Run) -> None:
    for kind in (UnderAKey, CenterOfTheFirst, CenterOfTheLast, EntriesOfAList, HiddenState):
        torch.manual_seed(1)
        model = kind()
        validation = [run.loader(*class_data(32, 1))] if isinstance(model, CenterOfTheFirst) else []
        run.trainer(max_epochs=3).fit(model, run.loader(*class_data(64)), *validation)
        run.note(kind.__name__, [parameter.detach().clone() for parameter in model.parameters()])
        kept = {name: one for name, one in vars(model).items() if name in ("state", "c", "means", "hidden")}
        run.note(f"{kind.__name__}, kept", kept)


@case
def stored_by_steps_and_replaced_by_hooks(run: Run) -> None:
    class Replaced(Stateful):
        def __init__(self) -> None:
            super().__init__()
            self.c: Any = torch.tensor(1.0)
            self.kept: dict[str, Any] = {"pair": None}

        def look(self, z: Tensor, y: Tensor) -> Tensor:
            c = 2.0 if self.c is None else self.c * 3 if isinstance(self.c, float) else self.c
            pair = self.kept["pair"] or (1.0, 0.5)
            self.c, self.kept["pair"] = z.detach().square().mean(), (z.detach().mean(), 0.25)
            return F.cross_entropy(z, y) * c + pair[0] * pair[1] * z.square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            new = {4: None, 6: 0.25, 8: 0.75, 9: None, 10: torch.tensor(3.0)}
            self.c = new.get(self.global_step, self.c)
            if self.global_step in (3, 5):
                self.kept["pair"] = (self.kept["pair"][0], 1.0 + self.global_step)

    run.fit(Replaced(), run.trainer(max_epochs=3), run.loader(*class_data(64)))


class Window(Stateful):
    def __init__(self, recent: Any) -> None:
        super().__init__()
        self.recent = recent

    def look(self, z: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(z, y)
        self.recent.append(loss.detach())
        self.log("mean", torch.stack(list(self.recent)[-3:]).mean())
        self.log("sum", sum(list(self.recent)[-2:]) / min(len(self.recent), 2))
        return loss + 0.1 * (self.recent[0] - loss).square() if isinstance(self.recent, deque) else loss


class Trimmed(Window):
    def look(self, z: Tensor, y: Tensor) -> Tensor:
        loss = super().look(z, y)
        if len(self.recent) > 3:
            self.recent.pop(0)
        return loss


@case
def windows_of_losses(run: Run) -> None:
    for name, kind, recent in (("deque", Window, deque(maxlen=3)), ("list", Window, []), ("trimmed", Trimmed, [])):
        torch.manual_seed(1)
        model = kind(recent)
        run.trainer(max_epochs=3).fit(model, run.loader(*class_data(64)))
        run.note(name, [one.item() for one in (*model.recent, *[p.detach().sum() for p in model.parameters()])])


class NumbersKept(Stateful):
    """Means of numbers that a deque keeps: logged, or a factor of the loss."""

    def __init__(self, longest: int, factor: float) -> None:
        super().__init__()
        self.recent: deque[float] = deque(maxlen=longest)
        self.factor = factor

    def look(self, z: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(z, y)
        self.recent.append(loss.item())
        mean = sum(self.recent) / len(self.recent)
        self.log("mean", mean, on_step=True, on_epoch=True)
        self.log("above", loss.item() - 0.5 * mean + 1.0)
        return loss * (1 + self.factor * mean) if self.factor else loss


@case
def windows_of_numbers(run: Run) -> None:
    for longest, factor in ((50, 0.0), (2, 0.1)):
        torch.manual_seed(1)
        model = NumbersKept(longest, factor)
        run.trainer(max_epochs=4).fit(model, run.loader(*class_data(64)))
        run.note(f"{longest}", [*model.recent, *[p.detach().sum().item() for p in model.parameters()]])


class Codebook(Classifier):
    """Codes that plain Python and numpy find in the first batch; ``way``: what says that this has been done."""

    def __init__(self, way: str, *, manual: bool = False) -> None:
        super().__init__()
        self.way, self.automatic_optimization = way, not manual
        self.register_buffer("codes", torch.zeros(3, 8))
        self.register_buffer("known", torch.tensor(False))
        self.is_known, self.norm, self.shown = False, nn.BatchNorm1d(8), []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.norm(x)
        known = {"buffer": bool(self.known), "flag": self.is_known, "counter": self.trainer.global_step > 0}[self.way]
        if not known:
            self.find(x)
            self.is_known = True
            self.known.fill_(True)
        apart = (x[:, None] - self.codes).square().sum(2)
        loss = F.cross_entropy(self.net(x), y) + F.cross_entropy(-apart, y)
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def find(self, x: Tensor) -> None:
        rows = x.detach().numpy()
        codes = rows[:3].copy()
        nearest = ((rows[:, None] - codes) ** 2).sum(2).argmin(1)
        for code in range(3):
            if (nearest == code).any():
                codes[code] = rows[nearest == code].mean(0)
        self.codes.copy_(torch.from_numpy(codes))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (batch[0][:, None] - self.codes).square().mean())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.shown.append(all(parameter.grad is None for parameter in self.parameters()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


@case
def initialized_by_the_first_step(run: Run) -> None:
    ways = (("buffer", False, 1), ("flag", False, 2), ("counter", True, 1))
    for way, manual, accumulate in ways:
        torch.manual_seed(2)
        model = Codebook(way, manual=manual)
        data = run.loader(*class_data(64))
        run.trainer(max_epochs=3, accumulate_grad_batches=accumulate).fit(model, data, run.loader(*class_data(32, 1)))
        run.note(way, [parameter.detach().clone() for parameter in model.state_dict().values()])
        run.note(f"{way}, shown", model.shown)


@case
def layers_made_by_the_first_batch(run: Run) -> None:
    class Lazy(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(16, bias=False), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))

    for accumulate, checks in ((1, 0), (2, 2)):
        torch.manual_seed(2)
        model, data = Lazy(), run.loader(*class_data(64))
        trainer = run.trainer(max_epochs=2, accumulate_grad_batches=accumulate, num_sanity_val_steps=checks)
        trainer.fit(model, data, run.loader(*class_data(32, 1)))
        run.note(f"weights {accumulate}", [value.detach().clone() for value in model.state_dict().values()])


@dataclass
class Memory:
    """What a step hands to the next one."""

    mean: Tensor
    parts: list[Any]
    name: str = "memory"


class Slotted:
    __slots__ = ("rows", "value")

    def __init__(self, value: Tensor, rows: int) -> None:
        self.value, self.rows = value, rows


class Encoder(nn.Module):
    """Keeps the distribution of its last batch, for the divergence that is asked of it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.posterior = torch.distributions.Normal(self.mean(x), F.softplus(self.scale(x)))
        return self.posterior.mean + self.posterior.stddev

    def divergence(self) -> Tensor:
        prior = torch.distributions.Normal(torch.zeros_like(self.posterior.mean), 1.0)
        return torch.distributions.kl_divergence(self.posterior, prior).mean()


class MakingObjects(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder()
        self.memory = Memory(torch.zeros(()), [torch.ones(3)])
        self.cache: dict[Any, Any] = {}
        self.kept: list[Any] = []
        self.shown: list[Any] = []

    def look(self, z: Tensor, y: Tensor) -> Tensor:
        self.cache.clear()
        self.cache["logits", 1] = Memory(z.mean(), [{"inner": Memory(z.detach().sum(), [])}])
        self.memory = Memory(0.5 * self.memory.mean + z.detach().mean(), [0.9 * self.memory.parts[0] + z.detach().mean(0)])
        self.kept.append(Slotted(z.detach().mean(0), len(z)))
        loss = F.cross_entropy(z + self.memory.parts[0], y) + 0.1 * self.net.divergence() + self.memory.mean
        return loss + 0.01 * self.cache["logits", 1].mean

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shown += [self.net.posterior.loc.detach().sum(), self.memory.mean, type(self.memory).__name__, self.memory.name]
        self.shown += [[key, one.mean.detach(), one.parts[0]["inner"].mean] for key, one in self.cache.items()]


@case
def objects_made_by_steps(run: Run) -> None:
    model, data = MakingObjects(), run.loader(*class_data(96))
    run.trainer(max_epochs=2).fit(model, data, run.loader(*class_data(32, 1)))
    run.note("shown", model.shown)
    run.note("kept", [[one.value, one.rows] for one in model.kept])
    run.note("weights", [value.detach().clone() for value in model.state_dict().values()])


class WithoutActivations(torch.autograd.Function):
    """Computes its block again in backward, with settings in dicts that both fill."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any, settings: dict[str, Any]) -> Tensor:
        ctx.settings, ctx.block, ctx.x = settings, block, x.detach()
        with torch.no_grad():
            return block(x, **settings)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            y = ctx.block(x, again=True, **ctx.settings)
        torch.autograd.backward(y, gradients[0])
        return x.grad, None, None


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.state = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), None

    def forward(self, x: Tensor, own: dict[str, Any], *, again: bool = False) -> Tensor:
        own["again"] = again
        if not again:
            self.state = torch.get_rng_state()
            return self.inner(x)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            return self.inner(x)


class Reversible(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.net = Layers()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([Again(), Again()]), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = WithoutActivations.apply(x.requires_grad_(), block, {"own": {}})
        return self.last(x)


@case
def calls_of_functions_that_keep_dicts(run: Run) -> None:
    class Kept(Reversible):
        def look(self, z: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(z, y)

    model, data = Kept(), run.loader(*class_data(96))
    run.trainer(max_epochs=2).fit(model, data)
    run.note("weights", [value.detach().clone() for value in model.state_dict().values()])
