"""Random numbers and checkpointing: no reference values in torch, but what torch promises about them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.xlatrain.bridge._compare import as_host, assert_same, floats, loss_and_gradients, run_captured
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.lower.recomputation import recomputations
from xlatrain.bridge.tensors.host import as_numpy

Step = Callable[..., torch.Tensor]


def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(x @ w, 0.5).pow(2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputes_the_same_dropout_mask(use_reentrant: bool) -> None:
    def twice(wrapped: bool) -> Step:
        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = dropped(x, w)
            y = checkpoint(dropped, y, w.t(), use_reentrant=use_reentrant) if wrapped else dropped(y, w.t())
            return (F.dropout(y, 0.5) * w.sum()).sum()  # pyright: ignore[reportArgumentType]

        return loss_and_gradients(fn)

    args = floats(40, 3), floats(3, 5, seed=7)
    assert_same(run_captured(twice(wrapped=True), *args), run_captured(twice(wrapped=False), *args))


def test_reentrant_checkpoint_without_differentiable_input_gives_no_gradient() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        inside = checkpoint(lambda x: (x @ w).sum(), x, use_reentrant=True)
        return inside + w.sum()  # pyright: ignore[reportOperatorIssue, reportReturnType]

    x = floats(4, 3, requires_grad=False)
    _, (grad,) = run_captured(loss_and_gradients(fn), x, floats(3, 5))
    assert_same(grad, as_host(torch.ones(3, 5)))


def test_checkpointed_draws_are_recomputed_from_the_same_stream_index() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(dropped, x, w, use_reentrant=False).sum()  # pyright: ignore[reportOptionalMemberAccess]

    graph = capture(loss_and_gradients(fn), floats(4, 3), floats(3, 5)).graph
    indices = [node.args[-1] for node in graph.graph.nodes if node.target is torch.ops.xlatrain.bernoulli.default]
    assert indices and set(indices) == {0}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputes_behind_a_barrier(use_reentrant: bool) -> None:
    def lowered(wrapped: bool) -> str:
        def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (((x @ w).tanh() @ w).tanh() @ w).tanh()

        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = checkpoint(block, x, w, use_reentrant=use_reentrant) if wrapped else block(x, w)
            return y.pow(2).sum()  # pyright: ignore[reportOptionalMemberAccess]

        args = floats(16, 16), floats(16, 16, seed=1)
        run = jax.jit(lower(capture(loss_and_gradients(fn), *args)))
        return run.lower([as_numpy(arg) for arg in args], None).as_text()

    # XLA:CPU drops barriers, TPU and GPU keep them: what we hand to XLA is what can be tested here
    plain, checkpointed = lowered(wrapped=False), lowered(wrapped=True)
    assert plain.count("stablehlo.dot_general") == 9 and "optimization_barrier" not in plain
    assert checkpointed.count("stablehlo.dot_general") == 12 and "optimization_barrier" in checkpointed


def test_a_recomputation_waits_for_the_gradients_before_it() -> None:
    """A recomputation has one barrier for its inputs, the gradients so far and the weight used again; the next one likewise."""

    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: (x @ w).tanh(), x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        x = checkpoint(lambda x: (x @ v).tanh(), x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return x.pow(2).sum()

    args = floats(4, 3), floats(3, 5, seed=1), floats(5, 2, seed=2)
    graph = capture(loss_and_gradients(fn), *args).graph.graph
    shapes = [
        sorted(tuple(node.meta["val"].shape) for node in (*start.barriers, *start.held))
        for start in recomputations(graph).values()
    ]
    # x of layer 2, its weight, the gradient of its result; then x of layer 1, its weight, and layer 2's gradients by x and weight
    assert shapes == [[(4, 2), (4, 5), (5, 2)], [(3, 5), (4, 3), (4, 5), (5, 2)]]


def test_fork_rng_gives_the_same_draw_after_it() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.random.fork_rng(devices=[]):
            inside = torch.rand(5)
        return inside + 0 * x.sum(), torch.rand(5) + 0 * x.sum()

    inside, after = run_captured(fn, floats(2, 2))
    assert_same(inside, after)


def test_manual_seed_inside_a_step_is_refused() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return x * torch.rand(3)

    with pytest.raises(CaptureError, match=r"test_random_and_checkpoint.py:\d+: torch.manual_seed(?s:.*)same random numbers"):
        capture(fn, floats(4, 3))


def test_generator_is_refused() -> None:
    generator = torch.Generator()
    with pytest.raises(CaptureError, match=r"test_random_and_checkpoint.py:\d+: (?s:.*)torch\.Generator was passed"):
        capture(lambda x: x * torch.rand(3, generator=generator), floats(4, 3))
