"""Gradients of modules, whose parameters are passed in, as a compiled step does, equal torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless

from tests.xlatrain.bridge._compare import assert_matches_eager, floats, run_captured


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
