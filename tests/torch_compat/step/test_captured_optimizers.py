"""Optimizers that users wrote, and subclasses of torch's: their own ``step`` captured, against that step run eagerly."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.optim import lr_scheduler

from tests.torch_compat.step._optimizer_run import (
    FunctionalSide,
    MakeOptimizer,
    TorchSide,
    assert_close,
    initial_values,
    noise,
    numpy_state,
    place,
)  # fmt: skip
from torch_compat.step.optimizers.captured import CapturedOptimizer
from torch_compat.step.optimizers.forms import functional_form
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError
from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.sharding import like_parameters
from xlatrain.step.state import TrainState
from xlatrain.step.step import StepBuilder, state_shardings

SHAPES = {"weight": (8, 4), "bias": (8,)}
TOLERANCE = 5e-6


class Lion(torch.optim.Optimizer):
    """Chen et al., https://arxiv.org/abs/2302.06675, as users write it: in place, numbers as ``alpha``."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.add_(average.clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_(), alpha=-group["lr"])
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class CountingAdam(torch.optim.Optimizer):
    """Keeps its step count as a Python int, nests its moments, writes to ``p.data``."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                if not state:
                    state.update(step=0, moments=[torch.zeros_like(p.data), torch.zeros_like(p.data)], note="adam")
                state["step"] += 1
                first, second = state["moments"]
                first.mul_(0.9).add_(grad, alpha=0.1)
                second.mul_(0.99).addcmul_(grad, grad, value=0.01)
                denominator = (second / (1 - 0.99 ** state["step"])).sqrt().add_(1e-8)
                p.data.addcdiv_(first, denominator, value=-group["lr"] / (1 - 0.9 ** state["step"]))


class SubclassedAdamW(torch.optim.AdamW):
    """A subclass of torch's own, which may have changed anything."""


class SubclassedRAdam(torch.optim.RAdam):
    """RAdam branches on its step count, unless it is told to be capturable."""


class SubclassedSGD(torch.optim.SGD):
    """Has no ``capturable``."""


CASES: dict[str, MakeOptimizer] = {
    "Lion": lambda p: Lion(p, lr=0.01, weight_decay=0.1),
    "CountingAdam": lambda p: CountingAdam(p, lr=0.01),
    "AdamW-subclass": lambda p: SubclassedAdamW(p, lr=0.01),
    "RAdam-subclass": lambda p: SubclassedRAdam(p, lr=0.01),
    "SGD-subclass": lambda p: SubclassedSGD(p, lr=0.01, momentum=0.9, nesterov=True),
}
TOLERANCES = {"RAdam-subclass": 1e-4, "AdamW-subclass": 1e-5}  # step counts are float32 in the graph, double in eager torch


@pytest.mark.parametrize("case", CASES)
def test_same_update_as_its_own_step(case: str) -> None:
    tolerance = TOLERANCES.get(case, TOLERANCE)
    reference = TorchSide(CASES[case], initial_values(SHAPES))
    ours = FunctionalSide(TorchSide(CASES[case], initial_values(SHAPES)))
    schedulers = [lr_scheduler.ExponentialLR(side.optimizer, 0.97) for side in (reference, ours)]
    for step in range(40):
        reference.step(noise(step, SHAPES))
        ours.step(noise(step, SHAPES))
        for scheduler in schedulers:
            scheduler.step()
    assert_close(ours.values(), reference.values(), tolerance)
    assert ours.program._cache_size() == 2  # the first step makes the state

    exported = ours.functional.export_state(ours.state)
    expected = reference.optimizer.state_dict()["state"]
    assert {k: set(v) for k, v in exported["state"].items()} == {k: set(v) for k, v in expected.items()}
    resumed = TorchSide(CASES[case], ours.values())
    resumed.optimizer.load_state_dict(copy.deepcopy(exported))
    back = FunctionalSide(resumed)
    for step in range(40, 50):
        reference.step(noise(step, SHAPES))
        back.step(noise(step, SHAPES))
    assert_close(back.values(), reference.values(), 2 * tolerance)
    assert back.program._cache_size() == 1


def test_python_number_in_the_state_stays_one() -> None:
    ours = FunctionalSide(TorchSide(CASES["CountingAdam"], initial_values(SHAPES)))
    for step in range(3):
        ours.step(noise(step, SHAPES))
    state = ours.functional.export_state(ours.state)["state"][0]
    assert state["step"] == 3
    assert type(state["step"]) is int
    assert state["note"] == "adam"
    assert [moment.shape for moment in state["moments"]] == [(8, 4), (8, 4)]


def test_parameter_without_gradient_is_skipped() -> None:
    reference = TorchSide(CASES["CountingAdam"], initial_values(SHAPES))
    ours = FunctionalSide(TorchSide(CASES["CountingAdam"], initial_values(SHAPES)))
    for step in range(6):
        without = ["bias"] if step < 3 else []  # its state begins later than the other's
        reference.step(noise(step, SHAPES), without)
        ours.step(noise(step, SHAPES), without)
    assert_close(ours.values(), reference.values(), TOLERANCE)
    exported = ours.functional.export_state(ours.state)["state"]
    assert [exported[index]["step"] for index in (0, 1)] == [6, 3]


def test_scheduled_betas_become_inputs() -> None:
    def make(p: list[torch.nn.Parameter]) -> Lion:
        return Lion(p, lr=0.01)

    reference, ours = TorchSide(make, initial_values(SHAPES)), FunctionalSide(TorchSide(make, initial_values(SHAPES)))
    for step in range(20):
        for side in (reference, ours):
            side.optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * step, 0.99)
        reference.step(noise(step, SHAPES))
        ours.step(noise(step, SHAPES))
    assert_close(ours.values(), reference.values(), TOLERANCE)
    assert len(ours.keys) == 2


class LateBranch(CountingAdam):
    """Branches on its step count, which only from the second step on is a tensor."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step()
        for state in self.state.values():
            if state["step"] > 5:
                state["moments"][0].zero_()


def test_later_step_that_cannot_be_captured_is_refused_before_the_first() -> None:
    side = TorchSide(lambda p: LateBranch(p, lr=0.1), initial_values(SHAPES))
    with pytest.raises(UnsupportedOptimizerError, match=r"(?s)LateBranch.step cannot be captured.*XLATRAIN_EXECUTOR=eager"):
        functional_form(side.optimizer, side.names)


class Damped(Lion):
    """Reads an attribute that users set between steps."""

    damping = 1.0

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1 * self.damping)


def test_attribute_that_the_step_reads_is_part_of_the_key() -> None:
    side = TorchSide(lambda p: Damped(p), initial_values(SHAPES))
    functional = functional_form(side.optimizer, side.names)
    key = functional.static_key()
    side.optimizer.damping = 0.5  # pyright: ignore[reportAttributeAccessIssue]
    assert functional.static_key() != key


class Scaled(Lion):
    """Reads attributes of parameters, of an object and of itself, and a tensor of its own, as layer-wise rates do."""

    damping = 1.0

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.warmth = torch.tensor(1.0)
        self.config = {"factors": [1.0, 2.0]}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                rate = group["lr"] * getattr(p, "lr_scale", 1.0) * self.damping * self.config["factors"][0]
                if getattr(p, "steps", 0) > 2:
                    rate = rate / 2
                if hasattr(p, "manifold"):
                    rate = rate * p.manifold.curvature
                p.add_(p.grad * self.warmth, alpha=-rate)


class Manifold:
    curvature = 0.5


def _replace_factor(side: Any) -> None:
    side.optimizer.config["factors"][0] = 0.25


def _set(**attributes: Any) -> Callable[[Any], None]:
    def change(side: Any) -> None:
        for param in side.optimizer.param_groups[0]["params"][:1]:
            vars(param).update(attributes)

    return change


CHANGES: dict[str, Callable[[Any], None]] = {
    "an attribute of a parameter": _set(lr_scale=0.25),
    "a whole number": _set(steps=3),
    "an object of a parameter": _set(manifold=Manifold()),
    "its own attribute": lambda side: setattr(side.optimizer, "damping", 0.5),
    "an entry": _replace_factor,
    "a tensor in place": lambda side: side.optimizer.warmth.fill_(0.5),
    "a tensor past torch": lambda side: side.optimizer.warmth.data.mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_step_reads_is_as_it_is_now(change: str) -> None:
    def make(p: list[torch.nn.Parameter]) -> Scaled:
        return Scaled(p, lr=0.1)

    reference, ours = TorchSide(make, initial_values(SHAPES)), FunctionalSide(TorchSide(make, initial_values(SHAPES)))
    for step in range(4):
        if step == 2:
            for side in (reference, ours):
                CHANGES[change](side)
        reference.step(noise(step, SHAPES))
        ours.step(noise(step, SHAPES))
    assert_close(ours.values(), reference.values(), TOLERANCE)


def test_numbers_of_parameters_that_change_become_inputs() -> None:
    def make(p: list[torch.nn.Parameter]) -> Scaled:
        return Scaled(p, lr=0.1)

    reference, ours = TorchSide(make, initial_values(SHAPES)), FunctionalSide(TorchSide(make, initial_values(SHAPES)))
    for step in range(12):
        for side in (reference, ours):
            _set(lr_scale=1 / (step + 1))(side)
        reference.step(noise(step, SHAPES))
        ours.step(noise(step, SHAPES))
        ours.functional.check()
    assert_close(ours.values(), reference.values(), TOLERANCE)
    assert len(ours.keys) == 3  # as it was made, with another constant, and with an input


def test_constant_that_changes_all_the_time_is_refused_before_a_step() -> None:
    ours = FunctionalSide(TorchSide(lambda p: Scaled(p, lr=0.1), initial_values(SHAPES)))
    with pytest.raises(
        UnsupportedOptimizerError, match=r"Scaled.step reads manifold of a parameter.*changes from step to step.*param_groups"
    ):
        for step in range(12):
            _set(manifold=Manifold())(ours)
            ours.step(noise(step, SHAPES))
            ours.functional.check()


class SquareRootRate(Lion):
    """Needs its learning rate as a Python number."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-math.sqrt(group["lr"]))


def test_number_that_must_be_a_number_is_a_constant() -> None:
    def make(p: list[torch.nn.Parameter]) -> SquareRootRate:
        return SquareRootRate(p, lr=0.01)

    reference, ours = TorchSide(make, initial_values(SHAPES)), FunctionalSide(TorchSide(make, initial_values(SHAPES)))
    for step in range(5):
        reference.step(noise(step, SHAPES))
        ours.step(noise(step, SHAPES))
    assert_close(ours.values(), reference.values(), TOLERANCE)
    key = ours.functional.static_key()
    ours.optimizer.param_groups[0]["lr"] = 0.02
    assert ours.functional.static_key() != key
    for step in range(20):
        ours.optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
        ours.functional.hyper()
    with pytest.raises(UnsupportedOptimizerError, match=r"SquareRootRate.step needs its options as Python numbers.*eager"):
        ours.functional.check()


class Restless(Lion):
    """Counts in an attribute."""

    calls = 0

    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.calls += 1
        super().step()


class GroupCounter(Lion):
    """Counts in a param group."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        super().step()


class Noisy(Lion):
    """Draws random numbers."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.add_(torch.randn_like(p), alpha=0.01)


class Branching(Lion):
    """Branches on a gradient."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad.sum() > 0:
                p.data.zero_()


class NeedsClosure(Lion):
    """Evaluates its closure, as SAM does."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is not None, "sharpness-aware minimisation requires a closure"


class Lookahead(Lion):
    """Wraps another optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.inner.step()


class Caching(Lion):
    """Reaches its parameters by a list of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.everything = [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for p in self.everything:
            p.data.add_(p.grad, alpha=-0.1)


class Forgetful(Lion):
    """Does nothing with gradients."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.mul_(0.9)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Lookahead, r"Lookahead wraps another optimizer \(self.inner\).*XLATRAIN_EXECUTOR=eager"),
        (Caching, r"Caching keeps parameters in self.everything.*self.param_groups"),
        (Forgetful, r"Forgetful.step makes no use of the gradients of weight, bias"),
        (Restless, r"Restless.step changes self.calls, which a compiled step would do only once.*self.state\[p\]"),
        (GroupCounter, r"GroupCounter.step changes param_groups\[0\]\['k'\]"),
        (Noisy, r"Noisy.step draws random numbers.*XLATRAIN_EXECUTOR=eager"),
        (Branching, r"(?s)Branching.step cannot be captured.*test_captured_optimizers.py:\d+.*XLATRAIN_EXECUTOR=eager"),
        (NeedsClosure, r"(?s)NeedsClosure.step cannot be captured.*requires a closure.*XLATRAIN_EXECUTOR=eager"),
    ],
)
def test_step_that_cannot_be_captured_is_refused(kind: type[Lion], message: str) -> None:
    side = TorchSide(lambda p: kind(p, lr=0.1), initial_values(SHAPES))
    attributes = {**vars(side.optimizer)}
    with pytest.raises(UnsupportedOptimizerError, match=message):
        functional_form(side.optimizer, side.names)
    after = {key: value for key, value in vars(side.optimizer).items() if key != "_opt_called"}
    assert after == attributes  # the user's optimizer is as it was


def test_capturing_leaves_the_users_optimizer_alone() -> None:
    side = TorchSide(CASES["Lion"], initial_values(SHAPES))
    params, groups = dict(side.params), side.optimizer.param_groups
    ours = FunctionalSide(side)
    ours.step(noise(0, SHAPES))
    assert side.optimizer.param_groups is groups
    assert groups[0]["params"][0] is params["weight"]
    assert groups[0]["lr"] == 0.01
    assert not side.optimizer.state
    np.testing.assert_array_equal(params["weight"].detach().numpy(), initial_values(SHAPES)["weight"])
    assert numpy_state(side.optimizer, side.names) == {}


def test_overridden_step_of_an_instance_is_captured() -> None:
    side = TorchSide(lambda p: torch.optim.SGD(p, lr=0.1), initial_values(SHAPES))
    original = side.optimizer.step

    def doubled() -> None:
        original()
        original()

    side.optimizer.step = doubled  # pyright: ignore[reportAttributeAccessIssue]
    ours = FunctionalSide(side)
    ours.step(noise(0, SHAPES))
    expected = {n: v - 2 * 0.1 * (v + noise(0, SHAPES)[n]) for n, v in initial_values(SHAPES).items()}
    assert_close(ours.values(), expected, TOLERANCE)


def test_state_made_in_the_first_step_is_split_like_its_parameter() -> None:
    """Through the engine's program: the state's structure changes with the first step, its shardings follow."""
    side = TorchSide(CASES["CountingAdam"], initial_values(SHAPES))
    functional = functional_form(side.optimizer, side.names)
    assert isinstance(functional, CapturedOptimizer)
    mesh = make_mesh({"fsdp": 8})
    params = place(initial_values(SHAPES), 8)
    shardings: dict[str, Any] = {name: value.sharding for name, value in params.items()}
    whole = NamedSharding(mesh, PartitionSpec())
    state = TrainState(
        params, {}, functional.init(params), {}, jax.device_put(np.int32(0), whole), jax.device_put(np.zeros(2, np.uint32), whole)
    )
    opt_shardings = like_parameters(state.opt_state, params, shardings, mesh)
    builder = StepBuilder(
        mesh,
        lambda grads, opt_state, params, hyper: (*functional.update(grads, opt_state, params, hyper), ()),
        state_shardings(state, shardings, opt_shardings, mesh),
    )
    program = builder.apply()
    for step in range(3):
        grads = {
            name: jax.device_put(np.asarray(state.params[name]) + value, shardings[name])
            for name, value in noise(step, SHAPES).items()
        }
        side.step(noise(step, SHAPES))
        state, _ = program(state, grads, functional.hyper())
    assert_close({name: np.asarray(value) for name, value in state.params.items()}, side.values(), TOLERANCE)
    for name in SHAPES:
        assert state.opt_state[name]["moments.0"].sharding.is_equivalent_to(shardings[name], len(SHAPES[name]))
        assert state.opt_state[name]["step"].is_fully_replicated
