"""Losses whose logits are never whole: found in graphs, computed as torch computes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding, PartitionSpec

from tests.xlatrain.bridge._compare import as_host, assert_same, run_captured
from tests.xlatrain.bridge.test_index_checks import found
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.capture.vocabulary import ENVIRONMENT, losses_of
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.lower.lowerings.vocabulary import _Stretches
from xlatrain.bridge.lower.work import model_flops
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.mesh.mesh import make_mesh

WORDS, FEATURES = 300, 16
Loss = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "2000")  # of 24 × 300: three stretches, the last of 44 words


def mean(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight).view(-1, WORDS), labels.view(-1))


def with_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight, bias).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=3)


def by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy((x @ weight.T).flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * torch.arange(losses.numel())).sum()


def mixed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.nll_loss(F.log_softmax(F.linear(x, weight, bias).flatten(0, 1).float(), -1), labels.flatten())


def of_transformers(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(F.linear(x, weight), labels, WORDS)


def frozen_head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return mean(x, weight.detach(), bias, labels) + weight.sum()


LOSSES = {one.__name__: one for one in (mean, with_bias, by_row, mixed, of_transformers, frozen_head)}


def smoothed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def weighted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    of_words = torch.arange(WORDS).float()
    return F.cross_entropy(F.linear(x, weight, bias).flatten(0, 1), labels.flatten(), of_words)


def read_twice(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, weight).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten()) + logits.square().mean()


def operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 3, FEATURES), (WORDS, FEATURES), (WORDS,))
    labels = torch.randint(0, WORDS, (8, 3), generator=generator)
    labels[0, 1], labels[2, 0], labels[7, 2] = -100, 3, WORDS - 1
    return [*(torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes), labels]


def differentiated(loss: Loss) -> Callable[..., Any]:
    def fn(*args: torch.Tensor) -> Any:
        value = loss(*args)
        return value, torch.autograd.grad(value, args[:3], allow_unused=True)

    return fn


def labelled(name: str) -> list[torch.Tensor]:
    args = operands()
    if name == "with_bias":  # which ignores another label
        args[3] = args[3].clamp(min=0)
    return args


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_all_logits(name: str) -> None:
    loss, args = LOSSES[name], labelled(name)
    captured = capture(differentiated(loss), *args)
    assert len(losses_of(captured.graph.graph)) == 1
    assert not [node for node in captured.graph.graph.nodes if getattr(node.meta.get("val"), "shape", ()) == (24, WORDS)]
    tolerance = 2e-2 if name == "mixed" else 1e-4
    assert_same(
        run_captured(differentiated(loss), *args), as_host(differentiated(loss)(*args)), rtol=tolerance, atol=tolerance / 10
    )


@pytest.mark.parametrize("loss", [smoothed, read_twice, weighted])
def test_logits_that_something_else_reads_stay_whole(loss: Loss) -> None:
    captured = capture(differentiated(loss), *operands())
    assert losses_of(captured.graph.graph) == []
    assert_same(run_captured(differentiated(loss), *operands()), as_host(differentiated(loss)(*operands())), rtol=1e-5)


def test_small_losses_and_the_switch_leave_a_graph_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "7200"):
        monkeypatch.setenv(ENVIRONMENT, value)
        assert losses_of(capture(differentiated(mean), *operands()).graph.graph) == []
    monkeypatch.setenv(ENVIRONMENT, "many")
    with pytest.raises(ValueError, match="XLATRAIN_LOGITS='many': expected how many"):
        capture(differentiated(mean), *operands())


def test_a_loss_without_gradients() -> None:
    captured = capture(mean, *operands())
    assert losses_of(captured.graph.graph) == ["loss of 24 rows over 300 words: at most 2000 logits of a device at a time"]
    assert_same(run_captured(mean, *operands()), as_host(mean(*operands())), rtol=1e-5)


def test_a_label_that_is_no_word_gives_nan_and_is_found() -> None:
    args = operands()
    args[3][1, 1] = WORDS
    assert np.isnan(run_captured(mean, *args))
    said = found(capture(mean, *args), *args)
    assert isinstance(said, IndexError) and str(said) == f"Target {WORDS} is out of bounds."
    assert found(capture(mean, *operands()), *operands()) is None


@pytest.mark.parametrize("axes", [{"fsdp": 4, "context": 1}, {"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}])
def test_a_loss_on_a_mesh_is_that_of_one_device(axes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "600")  # several stretches on a device
    mesh = make_mesh(axes, jax.devices()[:4])
    fn, args = differentiated(with_bias), labelled("with_bias")
    captured = capture(fn, *args)
    run = jax.jit(lower(captured, platform="cpu", partitioned=True, mesh=mesh))  # without compiler_options: numbers alone matter
    rows, words = (NamedSharding(mesh, PartitionSpec(spec)) for spec in (("data", "fsdp") if "data" in axes else "fsdp", "fsdp"))
    places = [rows, words, words, rows]
    given = [jax.device_put(as_numpy(arg.detach()), place) for arg, place in zip(args, places, strict=True)]
    program = run.lower(given, None).compile()
    if axes["fsdp"] == 4:  # 75 words of each device are gathered as 96: what stretches are cut from without a copy
        gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", program.as_text())
        assert {dims for dims in gathered if dims.endswith(f",{FEATURES}")} == {f"4,96,{FEATURES}"}, gathered
    actual = captured.unflatten([np.asarray(one) for one in program(given, None)])
    assert_same(actual, as_host(fn(*args)), rtol=1e-4, atol=1e-5)


def test_stretches() -> None:
    def cut(rows: int, words: int, limit: int, parts: int = 1) -> tuple[int, ...]:
        found = _Stretches.of(rows, words, limit, parts)
        return found.count, found.size, found.part, found.filled

    assert cut(4096, 128256, 1 << 27) == (6, 21376, 128256, 128256)  # equal, of whole lanes
    assert cut(4096, 50257, 1 << 26) == (5, 10112, 50257, 50560)  # the last has fewer
    assert cut(24, 300, 7200) == (1, 300, 300, 300)
    assert cut(1 << 20, 300, 2000) == (3, 128, 300, 384)
    assert cut(4096, 128256, 1 << 27, 256) == (4, 32256, 501, 504)  # parts of whole tiles
    assert cut(4096, 32768, 1 << 25, 16) == (4, 8192, 2048, 2048)
    assert cut(4096, 50257, 1 << 26, 8) == (5, 10112, 50257, 50560)  # whose parts are none
    assert cut(4096, 128256, 1 << 30, 256) == (1, 128256, 501, 501)


def test_words_are_found_again_where_their_parts_are_filled_up() -> None:
    stretches = _Stretches.of(64, 300, 7000, 4)
    assert (stretches.part, stretches.filled, stretches.count) == (75, 96, 3)
    words = jnp.arange(300) + 1
    cut = stretches.cut(stretches.fill(words))
    np.testing.assert_array_equal(stretches.joined(cut), words)
    np.testing.assert_array_equal(cut.ravel()[stretches.place(words - 1)], words)
    np.testing.assert_array_equal(stretches.is_word(jnp.arange(cut.size)), cut.ravel() > 0)


def test_the_arithmetic_of_a_loss_is_that_of_its_products() -> None:
    graph = capture(differentiated(mean), *operands()).graph.graph
    assert model_flops(graph) == 3 * 2 * 24 * WORDS * FEATURES
