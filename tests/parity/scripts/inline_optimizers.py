"""Optimizers whose own Python is part of a step: they wrap another one, evaluate a closure twice, or count."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from basics import Regression, regression_data
from recording import Run, case, main
from torch import Tensor


class SharpnessAware(torch.optim.Optimizer):
    """SAM (Foret et al., https://arxiv.org/abs/2010.01412): a step up, with the gradients there a step of the inner optimizer."""

    def __init__(self, params: Any, inner: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.inner = inner(self.param_groups, **options)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def up(self) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def back(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.inner.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.up()
        closure()
        self.back()
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


class Lookahead(torch.optim.Optimizer):
    """Zhang et al., https://arxiv.org/abs/1907.08610, without ``super().__init__()``: its state is the inner optimizer's."""

    def __init__(self, inner: torch.optim.Optimizer, every: int) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state, self.defaults = defaultdict(dict), inner.defaults
        for group in self.param_groups:
            group.update(every=every, count=0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = self.inner.step(closure)
        for group in self.param_groups:
            group["count"] += 1
            if group["count"] % group["every"] == 0:
                for p in group["params"]:
                    state = self.inner.state[p]
                    if "slow" not in state:
                        state["slow"] = torch.empty_like(p).copy_(p)
                    p.copy_(state["slow"].add_(p - state["slow"], alpha=0.5))
        return loss

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class Rectified(torch.optim.Optimizer):
    """RAdam (Liu et al., https://arxiv.org/abs/1908.03265): its count is a number of Python's, on which it branches."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["step"] += 1
                count, decayed = state["step"], two ** state["step"]
                state["mean"].mul_(one).add_(p.grad, alpha=1 - one)
                state["square"].mul_(two).addcmul_(p.grad, p.grad, value=1 - two)
                longest = 2 / (1 - two) - 1
                length = longest - 2 * count * decayed / (1 - decayed)
                rate = group["lr"] / (1 - one**count)
                if length < 5:
                    p.add_(state["mean"], alpha=-rate)
                else:
                    rate *= math.sqrt((1 - decayed) * (length - 4) / (longest - 4) * (length - 2) / length)
                    p.addcdiv_(state["mean"], state["square"].sqrt() + 1e-8, value=-rate)
        return loss


class Optimized(Regression):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.make(self.parameters())


def _resumed(run: Run, make: Callable[[], Optimized]) -> None:
    path, data = run.root / "mid.ckpt", run.loader(*regression_data())
    first = run.trainer(max_epochs=2)
    run.fit(make(), first, data)
    first.save_checkpoint(path)
    model, second = make(), run.trainer(max_epochs=4)
    second.fit(model, data, ckpt_path=path)
    run.finish(model, second)


@case
def closure_evaluated_twice(run: Run) -> None:
    def make(params: Any) -> Any:
        optimizer = SharpnessAware(params, torch.optim.SGD, lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    _resumed(run, lambda: Optimized(make))


@case
def two_halves_of_a_step_by_hand(run: Run) -> None:
    class Manual(Optimized):
        def __init__(self) -> None:
            super().__init__(lambda params: SharpnessAware(params, torch.optim.AdamW, lr=0.05))
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer: Any = self.optimizers()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.up()
            self.manual_backward(self.loss(batch))
            optimizer.back()
            self.log("train_loss", loss)
            return loss

    run.fit(Manual(), run.trainer(max_epochs=2), run.loader(*regression_data()))


@case
def slow_weights_in_the_state_of_another(run: Run) -> None:
    _resumed(run, lambda: Optimized(lambda params: Lookahead(Rectified(params, 0.05), 3)))


class Averaging(torch.optim.Optimizer):
    """Gradient descent on weights beside those of the module, which has their mean while it is validated (schedule-free)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "trains": True})

    @torch.no_grad()
    def trains(self, trains: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["trains"] != trains else ():
                if "fast" in self.state[p]:
                    p.lerp_(self.state[p]["fast"], 0.1 if trains else 1 - 1 / 0.9)
            group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if "fast" not in self.state[p]:
                    self.state[p]["fast"] = p.clone()
                fast = self.state[p]["fast"]
                p.lerp_(fast, 1 / group["count"]).sub_(p.grad, alpha=0.1 * group["lr"])
                fast.sub_(p.grad, alpha=group["lr"])
        return loss


@case
def other_weights_while_validated(run: Run) -> None:
    """The first validation comes when there is state, and hooks use it."""

    class Validated(Optimized):
        def on_validation_epoch_start(self) -> None:
            self.optimizers().trains(False)  # pyright: ignore[reportAttributeAccessIssue]

        def on_validation_epoch_end(self) -> None:
            self.optimizers().trains(True)  # pyright: ignore[reportAttributeAccessIssue]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.log("val", self.loss(batch))
            self.log("lr", optimizer.param_groups[0]["lr"])

    data = run.loader(*regression_data())
    run.fit(Validated(lambda params: Averaging(params, 0.05)), run.trainer(max_epochs=2, num_sanity_val_steps=0), data, data)


class FindsItsRate(torch.optim.Optimizer):
    """Its rate grows with how far the weights went along their gradients; all that it knows of it are options of its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "rate": 1e-3, "along": 0, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            rate, along, size = group["rate"], 0.9 * group["along"], 0.0
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(start=p.clone(), sum=torch.zeros_like(p))
                along += rate * group["lr"] * torch.dot(p.grad.flatten(), (state["start"] - p).flatten()).item()
                state["sum"].mul_(0.9).add_(p.grad, alpha=rate * group["lr"])
                size += state["sum"].abs().sum().item()
            if size == 0:
                continue
            found = 20 * along / size
            rate = max(rate, found)
            group.update(along=along, found=found, rate=rate, both=(found, rate), steps=group["steps"] + 1)
            for p in group["params"]:
                p.sub_(p.grad, alpha=rate * group["lr"])
        return loss


@case
def options_that_the_optimizer_computes(run: Run) -> None:
    class Watched(Optimized):
        def on_train_batch_end(self, *_: Any) -> None:
            group = self.optimizers().param_groups[0]  # pyright: ignore[reportAttributeAccessIssue]
            run.record.setdefault("options", []).append(
                [group["rate"], group["found"], group["along"], group["steps"], *group["both"]]
            )

    _resumed(run, lambda: Watched(FindsItsRate))


@case
def rate_that_the_step_computes(run: Run) -> None:
    """It is set behind the optimizer's step, and is that of the next."""

    class Manual(Optimized):
        def __init__(self) -> None:
            super().__init__(lambda params: torch.optim.SGD(params, 0.1, momentum=0.9))
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.log("lr", optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.param_groups[0]["lr"] = min(0.1, 0.05 * loss.item())
            return loss

    run.fit(Manual(), run.trainer(max_epochs=2), run.loader(*regression_data()))


@case
def weights_assigned_through_the_groups(run: Run) -> None:
    class Clipped(Optimized):
        def __init__(self) -> None:
            super().__init__(lambda params: torch.optim.SGD(params, 0.1))
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.data = p.data.clamp(-0.2, 0.2)
            return loss

    run.fit(Clipped(), run.trainer(max_epochs=2), run.loader(*regression_data()))


if __name__ == "__main__":
    main()
