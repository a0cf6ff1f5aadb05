"""An nnx module inside of torch: gradients through both sides, eagerly and captured; what it keeps; what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.nnx_module import NnxModule, jax_module
from xlatrain.bridge.tensors.host import as_numpy


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x: Any, power: int = 1) -> Any:
        return {"out": self.dropout(self.norm(self.linear(x))) ** power, "rows": x.shape[0]}


class Linear(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


def mixed() -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """The same model, once with an nnx layer in it and once all of torch."""
    torch.manual_seed(0)
    ported = jax_module(Linear())
    theirs = torch.nn.Linear(4, 3)
    with torch.no_grad():
        theirs.weight.copy_(ported.get_parameter("linear.kernel").T)
        theirs.bias.copy_(ported.get_parameter("linear.bias"))
    before, after = torch.nn.Linear(5, 4), torch.nn.Linear(3, 1)
    return torch.nn.Sequential(before, ported, after), copy.deepcopy(torch.nn.Sequential(before, theirs, after))


def test_gradients_are_those_of_the_layer_in_torch() -> None:
    ours, theirs = mixed()
    x, y = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    y = x.detach().clone().requires_grad_()
    ours(x).pow(2).sum().backward()
    theirs(y).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(ours[1].linear.kernel.grad, theirs[1].weight.grad.T)
    torch.testing.assert_close(ours[0].weight.grad, theirs[0].weight.grad)


def test_a_captured_step_has_the_function_in_its_program() -> None:
    ours, theirs = mixed()
    params = dict(ours.named_parameters())
    x = torch.randn(6, 5)

    def step(values: dict[str, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        loss = torch.func.functional_call(ours, values, x).pow(2).mean()
        return list(torch.autograd.grad(loss, list(values.values())))

    traced = {name: param.detach().requires_grad_() for name, param in params.items()}
    graph = capture(lambda values, x: step({n: v.requires_grad_() for n, v in values.items()}, x), traced, x)
    arrays = [as_numpy(param.detach()) for param in params.values()]
    found = jax.jit(lambda *given: lower(graph)(given, None))(*arrays, as_numpy(x))  # without compiler_options: a test
    theirs(x).pow(2).mean().backward()
    expected = {name: param.grad for name, param in theirs.named_parameters()}
    named = dict(zip(params, found, strict=True))
    np.testing.assert_allclose(named["1.linear.kernel"], expected["1.weight"].T, rtol=1e-5)
    np.testing.assert_allclose(named["0.weight"], expected["0.weight"], rtol=1e-5)


def test_state_follows_the_mode_and_is_in_the_state_dict() -> None:
    layer = jax_module(Layer())
    x = torch.randn(6, 4)
    first = layer(x)
    assert first["rows"].item() == 6
    assert layer.dropout.rngs.count.item() == 1 and layer.norm.mean.abs().sum() > 0
    twin = NnxModule(Layer())
    twin.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x)["out"], twin(x)["out"], rtol=0, atol=0)
    layer.eval()
    torch.testing.assert_close(layer(x)["out"], layer(x)["out"], rtol=0, atol=0)
    torch.testing.assert_close(layer(x, power=2)["out"], layer(x)["out"] ** 2)
    module = layer.sync()
    module.eval()
    np.testing.assert_allclose(module(x.numpy())["out"], layer(x)["out"].detach(), rtol=1e-6)


def test_copies_and_pickles_are_modules_of_their_own() -> None:
    layer = jax_module(Layer()).eval()
    x = torch.randn(6, 4)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(twin(x)["out"], layer(x)["out"])
        with torch.no_grad():
            twin.linear.kernel.zero_()
        assert not torch.equal(twin(x)["out"], layer(x)["out"])


def test_what_cannot_be_is_refused() -> None:
    layer = jax_module(Linear())
    x = torch.randn(6, 4, requires_grad=True)
    with pytest.raises(CaptureError, match="create_graph=True"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(TypeError, match="neither a tensor nor a hashable constant"):
        layer(np.zeros((6, 4)))

    class Text(nnx.Module):
        def __init__(self) -> None:
            self.counts = nnx.Param(np.zeros(3, np.int32))

    with pytest.raises(TypeError, match=r"Text.counts is a parameter of dtype int32"):
        jax_module(Text())
