"""A program for inputs of several sizes gives torch's numbers for each, whatever is in the arrays behind the tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from xlatrain.bridge.capture.bounds import Bounds, GraphNumbers
from xlatrain.bridge.capture.capture import Capture, capture
from xlatrain.bridge.errors import LoweringError
from xlatrain.bridge.lower.index_checks import IndexFindings, finding, index_checks
from xlatrain.bridge.lower.interpret import lower

BOUNDS = {"n": 16, "e": 24}
SIZES = ({"n": 5, "e": 9}, {"n": 13, "e": 7}, {"n": 4, "e": 23})


def _with_gradient(f: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """``f`` and its gradient by the first input, of a sum that weighs its elements differently."""

    def both(x: torch.Tensor, *others: torch.Tensor) -> Any:
        y = f(x, *others)
        weights = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()
        return y, torch.autograd.grad((y * weights).sum(), x)

    return both


def _of(shape: Sequence[int | str], sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(sizes[one] if isinstance(one, str) else one for one in shape)


def _inputs(specs: Sequence[Any], sizes: dict[str, int], seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    found = []
    for shape, *below in specs:
        size = _of(shape, sizes)
        if below:
            found.append(torch.randint(0, sizes[below[0]] if isinstance(below[0], str) else below[0], size, generator=made))
        else:
            found.append(torch.randn(size, generator=made).requires_grad_(not found))
    return found


def _poisoned(x: torch.Tensor, shape: tuple[int, ...]) -> np.ndarray:
    value = x.detach().numpy()
    padded = np.full(shape, np.nan if value.dtype.kind == "f" else 1000 - 2**30, value.dtype)
    padded[tuple(slice(size) for size in value.shape)] = value
    return padded


def bounded(
    f: Callable[..., Any], specs: Sequence[Any], samples: Sequence[dict[str, int]] = SIZES
) -> tuple[Capture, list[Capture]]:
    exact = [capture(f, *_inputs(specs, sizes)) for sizes in samples]
    padded = capture(f, *_inputs(specs, BOUNDS))
    bounds = Bounds.of(padded, [GraphNumbers.of(one) for one in exact])
    assert bounds is not None
    return dataclasses.replace(padded, bounds=bounds), exact


def arguments(graph: Capture, exact: Capture, given: Sequence[torch.Tensor]) -> tuple[list[jax.Array], Any]:
    assert graph.bounds is not None
    found = graph.bounds.values(GraphNumbers.of(exact))
    assert found is not None
    arrays = [jnp.asarray(_poisoned(x, spec.shape)) for x, spec in zip(given, graph.inputs, strict=True)]
    return arrays, (jnp.asarray(found[0], jnp.int32), jnp.asarray(found[1], jnp.float32))


N, E = "n", "e"
NODES, EDGES = ((N, 3),), ((E, 3),)
GRAPH = ((N, 3), (2, E))


def gcn(x: torch.Tensor, edges: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    source, target = edges
    degree = torch.zeros(x.size(0)).scatter_add(0, target, torch.ones(edges.size(1)))
    norm = degree.clamp(min=1).pow(-0.5)
    message = (x @ weight)[source] * (norm[source] * norm[target]).unsqueeze(-1)
    return torch.zeros(x.size(0), weight.size(1)).index_add(0, target, message)


def pooled(x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    totals = torch.zeros(4, x.size(1)).scatter_add(0, groups.view(-1, 1).expand(-1, x.size(1)), x)
    largest = torch.full((4, x.size(1)), -9.0).scatter_reduce(0, groups.view(-1, 1).expand(-1, x.size(1)), x, "amax")
    return totals / torch.zeros(4).index_add(0, groups, torch.ones(groups.size(0))).clamp(min=1).view(-1, 1) + largest


def norms(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.batch_norm(x, None, None, training=True), (3,))


def attention(x: torch.Tensor) -> torch.Tensor:
    q, k, v = x.view(2, -1, 2, 3).transpose(1, 2).chunk(3, dim=-1)
    scores = q @ k.transpose(-1, -2) + torch.triu(torch.full((x.size(1), x.size(1)), float("-inf")), 1)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, x.size(1), 2)


CASES: dict[str, tuple[Callable[..., torch.Tensor], Sequence[Any]]] = {
    "sum, mean and maximum": (lambda x: x.sum(0) + x.mean(0) + x.amax(0) + x.max(0).values + x.prod(0), (((N, 3),),)),
    "mean of all, times a size": (lambda x: x.mean() * x.size(0) + x.sum() / len(x.shape) + x.std(), (((N, 3),),)),
    "variance": (lambda x: x.var(0) + x.std(0, correction=0) + torch.linalg.vector_norm(x, dim=0), (((N, 3),),)),
    "extremes": (lambda x: x * (x.argmax(0) + x.min(0).indices) + x.logsumexp(0), (((N, 3),),)),
    "softmax over what changes": (lambda x: x.softmax(0) * x.log_softmax(1) + x.log_softmax(0), (((N, 3),),)),
    "batch and layer norm": (norms, (((N, 3),),)),
    "matrix products": (lambda x, y: x.T @ (x @ y) @ (x.T @ x), (((N, 3),), ((3, 3),))),
    "pairs of rows": (lambda x: (x[:, None] - x[None]).pow(2).sum(-1).add(1).sqrt().mean(1), (((N, 3),),)),
    "distances": (lambda x: torch.cdist(x, x.detach() + 1), (((N, 3),),)),
    "graph convolution": (gcn, (((N, 3),), ((2, E), N), ((3, 4),))),
    "pooling by groups": (pooled, (((N, 3),), ((N,), 4))),
    "rows by index, from the end": (lambda x, i: x[i - x.size(0)] + x[i], (((N, 3),), ((E,), N))),
    "one row": (lambda x: x[0] + x[-1] + x[-2:].sum(0), (((N, 3),),)),
    "slices": (lambda x: x[1:] * x[:-1] + x[-1:], (((N, 3),),)),
    "steps": (lambda x: torch.cat([x[::2], x[1::2]]), (((N, 3),),)),
    "joined": (lambda x, y: torch.cat([x, y, x]) * 2, (((N, 3),), ((E, 3),))),
    "joined along a row": (lambda x, y: torch.cat([x, y.T, x], 1), (((3, N),), ((E, 3),))),
    "views of rows": (lambda x: x.reshape(-1).view(-1, 3).unflatten(-1, (3, 1)).flatten(), (((N, 3),),)),
    "views across rows": (lambda x: x.reshape(-1, 2).cumsum(0), (((3, N, 2),),)),
    "views back": (lambda x: x.reshape(-1, 2).view(x.shape).flip(1) + x.flatten().view(3, -1, 2), (((3, N, 2),),)),
    "permuted": (lambda x: x.permute(1, 2, 0).reshape(-1, 3) @ torch.ones(3, 2), (((3, N, 2),),)),
    "attention with a mask": (attention, (((2, N, 6),),)),
    "positions": (lambda x: x * torch.arange(x.size(0))[:, None] + torch.eye(x.size(0)) @ x, (((N, 3),),)),
    "one hot": (lambda x, i: F.one_hot(i, 3) * x, (((N, 3),), ((N,), 3))),
    "embedding": (lambda x, i: F.embedding(i, x, padding_idx=0), (((7, 3),), ((2, N), 7))),
    "cross entropy": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), (((N, 3),), ((N,), 3))),
    "cross entropy of sequences": (
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=1),
        (((2, N, 3),), ((2, N), 3)),
    ),
    "losses": (
        lambda x, y: F.mse_loss(x, y) + F.l1_loss(x, y) + F.smooth_l1_loss(x, y) + F.huber_loss(x, y),
        (((N, 3),), ((N, 3),)),
    ),
    "binary cross entropy": (lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), (((N, 3),), ((N, 3),))),
    "activations": (lambda x: F.gelu(x) + F.leaky_relu(x) + F.elu(x) + F.silu(x) + F.softplus(x) + F.hardtanh(x), (((N, 3),),)),
    "convolution of sequences": (lambda x, w: F.conv1d(x, w, padding=1, stride=2).relu().mean(-1), (((2, 3, N),), ((4, 3, 3),))),
    "padded": (lambda x: F.pad(x, (1, 2), value=0.5).mean(-1), (((2, 3, N),),)),
    "written in place": (
        lambda x, i: torch.zeros(x.shape).index_put((i,), x[: i.size(0)] if False else x[i] * 2),
        (((N, 3),), ((N,), N)),
    ),
    "masked fill": (lambda x: x.masked_fill(x > 0, -1.0).where(x < 0.5, x * 3).sum(1), (((N, 3),),)),
}


ONE = {"n": 1, "e": 1}
NOT_FOR_ONE = {  # which are other ops then, or have no rows
    "slices",
    "steps",
    "one row",
    "sum, mean and maximum",
    "batch and layer norm",
    "pairs of rows",
    "attention with a mask",
}


@pytest.mark.parametrize("name", CASES)
def test_the_true_part_of_a_result_is_torchs(name: str) -> None:
    f, specs = CASES[name]
    both = _with_gradient(f)
    samples = SIZES if name in NOT_FOR_ONE else (*SIZES, ONE)
    graph, exact = bounded(both, specs, samples)
    run = jax.jit(lower(graph))
    for seed, (sizes, one) in enumerate(zip(samples, exact, strict=True)):
        given = _inputs(specs, sizes, seed)
        arrays, numbers = arguments(graph, one, given)
        expected = [*both(*given)[:1], *both(*given)[1]]
        for found, value in zip(run(arrays, None, None, numbers), expected, strict=True):
            true = np.asarray(found)[tuple(slice(size) for size in value.shape)]
            np.testing.assert_allclose(true, value.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_rows_that_are_repeated_where_there_is_one_are_no_true_part_of_larger_ones() -> None:
    """With as many bounds of either, a sum of the arrays would look like one of rows."""
    specs = (((N, 3),), ((E, 3),))

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    padded = capture(f, *_inputs(specs, {"n": 24, "e": 24}))
    bounds = Bounds.of(padded, [GraphNumbers.of(capture(f, *_inputs(specs, {"n": 1, "e": 5})))])
    assert bounds is not None
    graph = dataclasses.replace(padded, bounds=bounds)
    with pytest.raises(LoweringError, match="repeated where its size is 1"):
        lower(graph)([jnp.zeros((24, 3))] * 2, None, None, (jnp.zeros(9, jnp.int32), jnp.zeros(0)))


def test_another_graph_has_no_numbers_for_this_one() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sum(0) if len(x) < 10 else x.mean(0)

    small, large = (GraphNumbers.of(capture(f, torch.zeros(size, 3))) for size in (5, 13))
    assert Bounds.of(capture(f, torch.zeros(16, 3)), [small]) is None
    bounds = Bounds.of(capture(f, torch.zeros(16, 3)), [large])
    assert bounds is not None
    assert bounds.values(small) is None


def test_ops_without_a_rule_are_named() -> None:
    graph, (exact, *_) = bounded(lambda x: x.sort(0).values, (((N, 3),),))
    arrays, numbers = arguments(graph, exact, [torch.zeros(5, 3)])
    with pytest.raises(LoweringError, match=r"aten.sort.* of tensors whose sizes change: it has no rule"):
        lower(graph)(arrays, None, None, numbers)


@pytest.mark.parametrize(
    ("index", "message"), [([0, -5, 4], None), ([0, 5, 1], "index 5 is out"), ([0, -6, 1], "index -6 is out")]
)
def test_an_index_beyond_the_true_size_is_found(index: list[int], message: str | None) -> None:
    """But nothing behind the tensor, whatever is there."""
    graph, (exact, *_) = bounded(lambda x, i: x[i], (((N, 3),), ((E,), N)), ({"n": 5, "e": 3}, {"n": 13, "e": 7}))
    given = [torch.randn(5, 3), torch.tensor(index)]
    arrays, numbers = arguments(graph, exact, given)
    found = IndexFindings(index_checks(graph))
    lower(graph)(arrays, None, found, numbers)
    packed, _ = found.packed()
    error = finding(index_checks(exact), np.asarray(packed))
    assert error is None if message is None else message in str(error[1]) and "size 5" in str(error[1])  # pyright: ignore


@pytest.mark.parametrize("shape", [(N, 3), (2, N, 3)])
def test_what_is_drawn_does_not_depend_on_the_size_of_the_array(shape: tuple[int | str, ...]) -> None:
    graph, exacts = bounded(lambda x: F.dropout(x, 0.4, training=True) + torch.rand_like(x) + torch.randn_like(x), ((shape,),))
    key = jax.random.key(3)
    for sizes, exact in zip(SIZES, exacts, strict=True):
        given = _inputs(((shape,),), sizes)
        arrays, numbers = arguments(graph, exact, given)
        (found,), (value,) = lower(graph)(arrays, key, None, numbers), lower(exact)([given[0].detach().numpy()], key)
        np.testing.assert_array_equal(np.asarray(found)[tuple(map(slice, value.shape))], value)
