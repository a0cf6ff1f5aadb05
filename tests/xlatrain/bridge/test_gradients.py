"""The table of gradient semantics: loss and every gradient through the bridge equal torch's, None where torch gives None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import stateless
from torch.utils.checkpoint import checkpoint

from tests.xlatrain.bridge._compare import as_host, assert_matches_eager, assert_same, floats, run_captured
from xlatrain.bridge.capture import capture
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.host import as_numpy
from xlatrain.bridge.interpret import lower
from xlatrain.bridge.recomputation import recomputations

Step = Callable[..., torch.Tensor]


def loss_and_gradients(fn: Step) -> Callable[..., Any]:
    def step(*args: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        loss = fn(*args)
        return loss, torch.autograd.grad(loss, [arg for arg in args if arg.requires_grad], allow_unused=True)

    return step


class Sign(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class Reverse(torch.autograd.Function):
    """Gradient reversal, with a saved tensor and an argument that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.strength = strength
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return -ctx.strength * grad * x.abs(), None


def no_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = (x @ w).relu()
    return ((x @ w) * target).sum()


def inference_mode(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        scale = (x @ w).abs().mean()
    return (x @ w).pow(2).sum() * scale.clone()


def enable_grad_inside_no_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        a = x @ w
        with torch.enable_grad():
            b = x @ w
    return (a * b).sum()


def detach(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return (y * y.detach()).sum()


def data(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return (y * y.data).sum() + (w.data.sum() * w).sum()


def data_set(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w) * 2
    before = y.view(-1)
    y.data = y.data.clamp(min=0)
    y.data.add_(1)
    return y.pow(2).sum() + before.pow(3).sum()


def data_set_of_an_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    loss = (x @ w).pow(2).sum()
    w.data = w.data.clamp(-0.1, 0.1)
    return loss + (x @ w).sum()


def straight_through(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (Sign.apply(x @ w) * (x @ w)).sum()  # pyright: ignore[reportOperatorIssue]


def gradient_reversal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return Reverse.apply(x @ w, 0.7).pow(2).sum()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


def tensor_hook(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    y.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
    y.register_hook(lambda grad: grad * 3)
    return y.pow(2).sum()


def removed_hook(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    y.register_hook(lambda grad: grad * 3).remove()
    return y.pow(2).sum()


def leaf_hook(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    handle = w.register_hook(lambda grad: grad.sign())
    loss = (x @ w).pow(2).sum()
    (grad,) = torch.autograd.grad(loss, w, create_graph=True)
    handle.remove()
    return grad.pow(3).sum() + loss


def retained_graph(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).tanh()
    (first,) = torch.autograd.grad(y.sum(), w, retain_graph=True)
    return (y * y).sum() + (first.detach() * w).sum()


def gradient_penalty(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).tanh().pow(2).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    return y + (grad.norm(dim=1) - 1).pow(2).mean()


def in_place_on_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).clone()
    y.t()[0].add_(y[:, 1] * 2)
    y.view(-1)[3:5].mul_(w[0, 0])
    return y.pow(2).sum()


def slice_assignment(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = torch.zeros(4, 12) + w.sum()
    z[:, :5] = x @ w
    z[1::2, -3:] = 2.0
    z[0] *= 3
    return z.pow(2).sum()


def masked_assignment(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    y[y > 0] = 0.5
    y[torch.tensor([0, 2, 0]), torch.tensor([1, 1, 3])] = w[0, :3]
    return (y * x.sum()).pow(2).sum()


def diagonal_write(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.t() @ x
    y.diagonal().copy_(w.flatten()[: y.shape[0]])
    y.fill_diagonal_(1.0) if y.shape[0] > 99 else y.diagonal(1).zero_()
    return y.pow(3).sum()


def written_before_use(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(2, 4, 5)
    torch.mul(x @ w, 2, out=buffer[0]) if not torch.is_grad_enabled() else buffer[0].copy_((x @ w) * 2)
    buffer[1] = buffer[0].sigmoid()
    return buffer.sum(0).pow(2).sum()


def reused_after_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    before = y * 1
    y.mul_(w[0]).add_(before).mul_(0.5)
    return y.exp_().sum()


def max_ties(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).round().clamp(-1, 1)
    flat = (y - y.detach()) + y.detach().sign()
    return flat.amax(dim=1).sum() + flat.max() * 2 + flat.max(dim=0).values.pow(2).sum() + flat.amin(dim=0).sum() + flat.min()


def max_of_two_ties(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).relu()
    return (torch.maximum(y, y * 0) * 3 + torch.minimum(y, y.detach()) + y.clamp(min=0) + y.clamp(0, 0.5)).sum()


def relu_and_abs_at_zero(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    zero = y - y.detach()
    parts = [
        zero.relu(),
        zero.abs(),
        F.hardtanh(zero, 0, 1),
        F.leaky_relu(zero, 0.1),
        F.relu6(zero),
        zero.clamp(min=0),
        zero.sign(),
    ]
    return (torch.stack(parts) * torch.arange(1.0, 8.0).view(-1, 1, 1)).sum()


def sort_and_topk(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    values, indices = y.topk(2, dim=1)
    return (values * indices).sum() + (y.sort(dim=0).values * torch.arange(4.0)[:, None]).sum() + y.median()


def unused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum()


def only_through_detached(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.sum() + w.detach().sum()


def zero_times(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.sum() + 0 * w.sum()


def norm_at_zero(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    zero = y - y.detach()
    return zero.norm() + zero.norm(dim=0).sum() + F.normalize(zero, dim=1).sum() + zero.pow(2).sum()


def where_does_not_stop_nan(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).relu()
    return torch.where(y > 0, y.sqrt(), torch.zeros(())).sum()


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = checkpoint(lambda x, w: (x @ w).tanh().pow(2), x, w, use_reentrant=False)
    return y.sum()


def loop_over_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(5)
    for row in x:
        state = torch.tanh(row @ w + state)
    return state.sum()


def stacked_and_expanded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.stack([x @ w, (x @ w).flip(0)]).unbind(1)
    return sum((one.expand(3, 2, 5) * (i + 1)).pow(2).sum() for i, one in enumerate(y))  # pyright: ignore[reportReturnType]


def complex_numbers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x @ w, (x @ w).sin())
    return (z * z.conj()).real.sum() + z.abs().sum() + torch.view_as_real(z * 1j).pow(3).sum()


def jvp_free_functions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    grad = torch.func.grad(lambda w: (x @ w).tanh().sum())(w)
    return (grad * w).sum()


CASES: list[Step] = [
    no_grad,
    inference_mode,
    enable_grad_inside_no_grad,
    detach,
    data,
    data_set,
    data_set_of_an_input,
    straight_through,
    gradient_reversal,
    tensor_hook,
    removed_hook,
    leaf_hook,
    retained_graph,
    gradient_penalty,
    in_place_on_view,
    slice_assignment,
    masked_assignment,
    diagonal_write,
    written_before_use,
    reused_after_in_place,
    max_ties,
    max_of_two_ties,
    relu_and_abs_at_zero,
    sort_and_topk,
    unused,
    only_through_detached,
    zero_times,
    norm_at_zero,
    where_does_not_stop_nan,
    checkpointed,
    loop_over_rows,
    stacked_and_expanded,
    complex_numbers,
    jvp_free_functions,
]


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_gradients(fn: Step) -> None:
    assert_matches_eager(loss_and_gradients(fn), floats(4, 3), floats(3, 5, seed=7), rtol=2e-5, atol=2e-6)


# Modules: parameters are passed in, as a compiled step does.


def module_step(module: nn.Module, loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def step(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        with stateless._reparametrize_module(module, parameters, tie_weights=True):
            loss = loss_of(module, x)
            trained = {name: p for name, p in parameters.items() if p.requires_grad}
            return loss, dict(zip(trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True), strict=True))

    return step


def assert_module_matches(module: nn.Module, loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    parameters = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    assert_matches_eager(module_step(module, loss_of), parameters, floats(4, 3, requires_grad=False), rtol=2e-5, atol=2e-6)


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def test_module_full_backward_hook() -> None:
    net = small_net()
    net[0].register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 2,))
    net[2].register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] + grad_output[0].sum(),))
    assert_module_matches(net, lambda net, x: net(x).pow(2).sum())


def test_module_forward_hooks() -> None:
    net = small_net()
    net[0].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    net[1].register_forward_hook(lambda module, args, output: output + args[0].detach())
    assert_module_matches(net, lambda net, x: net(x).pow(2).sum())


def test_frozen_parameters_get_no_gradient() -> None:
    net = small_net()
    net[0].requires_grad_(False)
    assert_module_matches(net, lambda net, x: net(x).pow(2).sum())


def test_unused_parameter_gets_none() -> None:
    net = small_net()
    _, grads = run_captured(
        module_step(net, lambda net, x: net[0](x).pow(2).sum()), dict(net.named_parameters()), floats(4, 3, requires_grad=False)
    )
    assert {name for name, grad in grads.items() if grad is None} == {"2.weight", "2.bias"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x.argmax(dim=1)) + x)


def test_tied_parameters_sum_their_gradients() -> None:
    torch.manual_seed(0)
    net = Tied()
    assert [name for name, _ in net.named_parameters()] == ["embed.weight"]
    assert_module_matches(net, lambda net, x: net(x).pow(2).sum())


def test_parametrized_module() -> None:
    net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    assert_module_matches(net, lambda net, x: net(x).pow(2).sum())


def test_double_backward_through_module() -> None:
    def penalty(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return (grad.norm(dim=1) - 1).pow(2).mean()

    assert_module_matches(small_net(), penalty)


# Random numbers and checkpointing: no reference values in torch, but what torch promises about them.


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
    indices = [node.args[-1] for node in graph.graph.nodes if node.target is torch.ops.xlatrain.uniform.default]
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
    """One barrier for its inputs, the gradients computed so far and the weight that it uses again; the next one likewise."""

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

    with pytest.raises(CaptureError, match=r"test_gradients.py:\d+: torch.manual_seed(?s:.*)same random numbers"):
        capture(fn, floats(4, 3))


def test_generator_is_refused() -> None:
    generator = torch.Generator()
    with pytest.raises(CaptureError, match=r"test_gradients.py:\d+: (?s:.*)torch\.Generator was passed"):
        capture(lambda x: x * torch.rand(3, generator=generator), floats(4, 3))


# Autocast: which ops run in bfloat16 is torch's decision, visible in the graph.


def autocast_loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, w.t())
        z = torch.softmax(y, dim=-1)
        with torch.autocast("cpu", enabled=False):
            exact = y.float() @ w.t()
        return F.mse_loss(z, torch.zeros_like(z)) + F.layer_norm(y, (5,)).sum() + exact.pow(2).sum()


def test_autocast_matches() -> None:
    assert_matches_eager(loss_and_gradients(autocast_loss), floats(4, 3), floats(3, 5, seed=7), rtol=3e-2, atol=3e-2)


def test_autocast_op_lists() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = x @ w
            return [
                product,
                product.relu(),
                product + 1.0,
                torch.softmax(product, -1),
                F.mse_loss(product, product * 0),
                product.pow(2),
            ]

    args = floats(4, 3), floats(3, 5)
    dtypes = [spec.dtype for spec in capture(fn, *args).outputs]
    assert dtypes == [output.dtype for output in fn(*args)]
    assert torch.bfloat16 in dtypes and torch.float32 in dtypes


def test_autocast_from_outside_is_seen() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = capture(lambda x, w: x @ w, floats(4, 3), floats(3, 5))
    assert captured.outputs[0].dtype == torch.bfloat16
