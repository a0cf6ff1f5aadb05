"""A torch module as a JAX function: its values and gradients are torch's, under jit and vmap; draws, buffers, refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from xlatrain.bridge import to_jax
from xlatrain.bridge.errors import CaptureError


class Model(torch.nn.Module):
    """Has what JAX alone would differentiate otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.out = torch.nn.Linear(4, 3)
        self.frozen = torch.nn.Linear(4, 3).requires_grad_(False)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.embed(tokens).mean(1))
        with torch.no_grad():
            offset = self.out(x)
        return {"logits": self.out(x).tanh() * weights + offset + self.frozen(x).detach(), "tokens": tokens.sum(1)}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, 11, (6, 5)), torch.randn(6, 3)


def test_values_and_gradients_are_torchs() -> None:
    torch.manual_seed(0)
    model = Model().eval()
    tokens, weights = inputs()
    params, apply = to_jax(model, tokens, weights)
    leaf = weights.clone().requires_grad_()
    expected = model(tokens, leaf)
    expected["logits"].pow(2).sum().backward()

    def loss(params: Any, weights: Any) -> jax.Array:
        return (apply(params, tokens.numpy(), weights)["logits"] ** 2).sum()

    found = jax.jit(apply)(params, tokens.numpy(), weights.numpy())  # without compiler_options: a test
    np.testing.assert_allclose(found["logits"], expected["logits"].detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    grads, by_weights = jax.jit(jax.grad(loss, (0, 1)))(params, weights.numpy())  # without compiler_options: a test
    np.testing.assert_allclose(by_weights, leaf.grad, rtol=1e-5, atol=1e-6)
    for name, param in model.named_parameters():
        grad = np.zeros(param.shape) if param.grad is None else param.grad
        np.testing.assert_allclose(grads[name], grad, rtol=1e-4, atol=1e-5, err_msg=name)


class Again(torch.autograd.Function):
    """Runs the block again in its backward, and that one's backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: torch.nn.Module) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        ctx.block = block
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), grad)
        return x.grad, None


class Reversible(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Again.apply(self.first(x), self.block) + self.block(x)  # pyright: ignore[reportOperatorIssue]


def test_gradients_of_a_backward_inside_of_the_backward_are_added() -> None:
    torch.manual_seed(0)
    model, x = Reversible(), torch.randn(3, 4)
    _, apply = to_jax(model, x)
    with torch.no_grad():  # the values that are given count, also in the backward
        for param in model.parameters():
            param.mul_(2)
    model(x).pow(2).sum().backward()
    params = {name: param.detach().numpy() for name, param in model.named_parameters()}
    grads = jax.grad(lambda params: (apply(params, x.numpy()) ** 2).sum())(params)
    for name, param in model.named_parameters():
        np.testing.assert_allclose(grads[name], param.grad, rtol=1e-5, atol=1e-6, err_msg=name)


def test_it_is_mapped_over_rows_and_over_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    x = torch.randn(5, 4)
    params, apply = to_jax(model, x)
    rows = jax.vmap(lambda row: apply(params, row))(x.numpy())
    np.testing.assert_allclose(rows, model(x).detach(), rtol=1e-5, atol=1e-6)
    per_row = jax.vmap(jax.grad(lambda p, row: apply(p, row).sum()), (None, 0))(params, x.numpy())
    model(x).sum().backward()
    np.testing.assert_allclose(per_row["0.weight"].sum(0), model[0].weight.grad, rtol=1e-4, atol=1e-5)  # pyright: ignore
    several = jax.tree.map(lambda one: jnp.stack([one, 2 * one]), params)
    assert jax.vmap(apply, (0, None))(several, x.numpy()).shape == (2, 5, 2)


def test_draws_need_a_key_and_gradients_draw_the_same() -> None:
    params, apply = to_jax(torch.nn.Dropout(0.5), torch.zeros(64))
    with pytest.raises(ValueError, match=r"pass key=jax.random.key\(seed\)"):
        apply(params, np.ones(64, np.float32))
    key = jax.random.key(0)
    value, pullback = jax.vjp(lambda x: apply(params, x, key=key), jnp.ones(64))
    assert set(np.unique(value)) == {0.0, 2.0}
    np.testing.assert_array_equal(pullback(jnp.ones(64))[0], value)
    assert not np.array_equal(value, apply(params, jnp.ones(64), key=jax.random.key(1)))


def test_what_cannot_be_is_refused() -> None:
    model = Model()
    with pytest.raises(CaptureError, match=r"Model writes into its buffers \(norm.running_mean"):
        to_jax(model, *inputs())
    params, apply = to_jax(model.eval(), *inputs())
    with pytest.raises(ValueError, match=r"differ in \['out.bias'\]"):
        apply({name: value for name, value in params.items() if name != "out.bias"}, *inputs())
