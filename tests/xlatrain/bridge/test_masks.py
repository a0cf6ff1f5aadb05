"""Masks are recognised for what they are, and what is computed stays what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import as_host, assert_same, run_captured, with_gradients
from xlatrain.bridge.capture.attention import float32_attention, fused_attention
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.capture.masks.band import CAUSAL, WHOLE, Band
from xlatrain.bridge.capture.masks.family import Family, family_of

LENGTH = 12
ROWS = torch.arange(LENGTH)[:, None]
COLUMNS = torch.arange(LENGTH)
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2])
Mask = Callable[[torch.Tensor], torch.Tensor]
"""Of whole numbers (2, 12) that come with the batch."""

KNOWN: dict[str, tuple[Mask, str]] = {
    "everything": (lambda _: torch.ones(LENGTH, LENGTH, dtype=torch.bool), "attention"),
    "causal": (lambda _: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), "attention"),
    "causal, from outside": (lambda _: COLUMNS <= ROWS, "attention"),
    "causal, added": (lambda _: torch.full((LENGTH, LENGTH), float("-inf")).triu(1), "attention"),
    "causal, added the smallest": (lambda _: torch.full((LENGTH, LENGTH), torch.finfo().min).triu(1), "attention"),
    "causal of each row": (lambda ids: (COLUMNS <= ROWS).expand(len(ids), 1, -1, -1).clone(), "attention"),
    "window": (lambda _: (COLUMNS <= ROWS) & (COLUMNS > ROWS - 4), "banded_attention"),
    "both sides": (lambda _: (COLUMNS - ROWS).abs() <= 2, "banded_attention"),
    "blocks": (lambda _: DOCUMENTS[:, None] == DOCUMENTS, "banded_attention"),
    "causal blocks": (lambda _: (DOCUMENTS[:, None] == DOCUMENTS) & (COLUMNS <= ROWS), "banded_attention"),
    "padding": (lambda ids: (ids > 1)[:, None, None], "banded_attention"),
    "padding and causal": (lambda ids: (ids > 1)[:, None, None] & (COLUMNS <= ROWS), "banded_attention"),
    "padding and blocks": (lambda ids: (ids > 1)[:, None, None] & (DOCUMENTS[:, None] == DOCUMENTS), "banded_attention"),
    "padding twice": (lambda ids: ((ids > 1) & (COLUMNS > 2))[:, None, None] & (ids < 3)[:, None, None], "banded_attention"),
    "documents": (lambda ids: (ids[:, :, None] == ids[:, None])[:, None], "banded_attention"),
    "causal documents": (lambda ids: ((ids[:, :, None] == ids[:, None]) & (COLUMNS <= ROWS))[:, None], "banded_attention"),
    "documents and padding": (
        lambda ids: (ids[:, None, :, None] == ids[:, None, None]) & (ids > 0)[:, None, None] & (COLUMNS <= ROWS),
        "banded_attention",
    ),
    "padding, added": (
        lambda ids: torch.zeros(ids.shape).masked_fill(ids < 2, float("-inf"))[:, None, None],
        "banded_attention",
    ),
    "padding of heads and causal, added": (
        lambda ids: (
            torch.zeros(ids.shape).masked_fill(ids < 2, float("-inf")).view(2, 1, 1, -1).expand(-1, 4, -1, -1).reshape(8, 1, -1)
            + torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        ).view(2, 4, LENGTH, LENGTH),
        "banded_attention",
    ),
    "documents of all": (lambda ids: ids[0, :, None] == ids[0], "banded_attention"),
}
UNKNOWN: dict[str, Mask] = {
    "a hole": lambda _: COLUMNS != ROWS,
    "of heads": lambda _: torch.arange(4)[:, None, None] <= ROWS - COLUMNS,
    "of each row": lambda ids: torch.stack([COLUMNS <= ROWS, COLUMNS >= ROWS])[:, None],
    "an empty row": lambda _: COLUMNS < ROWS,
    "from the batch": lambda ids: (ids[:, :, None] + ids[:, None] < 5)[:, None],
    "padded queries": lambda ids: (ids > 1)[:, None, :, None],
    "two numberings": lambda ids: ((ids[:, :, None] == ids[:, None]) & ((ids > 1)[:, :, None] == (ids > 1)[:, None]))[:, None],
    "added numbers of keys": lambda ids: ids.float()[:, None, None],
    "the smallest and padding": lambda ids: (
        torch.full((LENGTH, LENGTH), torch.finfo().min).triu(1)
        + torch.zeros(ids.shape).masked_fill(ids < 2, float("-inf"))[:, None, None]
    ),
    "padding of heads": lambda ids: (ids > 1)[None].expand(4, -1, -1).reshape(2, 4, 1, LENGTH),
    "added numbers": lambda _: (COLUMNS - ROWS).float(),
    "other heads": lambda ids: (ids > 1)[:, None, None].expand(-1, 4, -1, -1) & (torch.arange(4) > 1)[:, None, None],
}


def attend(mask: Mask) -> Callable[..., Any]:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask(ids), enable_gqa=True)

    return with_gradients(fn)


def operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3], [2, 2, 2, 1, 1, 1, 1, 3, 3, 3, 0, 0]])
    return [*(torch.randn(2, heads, LENGTH, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)), ids]


def ops_of(mask: Mask) -> list[tuple[str, Any]]:
    """Names of the attention ops, and their fourth last operands of the queries: a mask, or numbers."""
    with fused_attention(), float32_attention():
        nodes = capture(attend(mask), *operands()).graph.graph.nodes
    found = [node for node in nodes if "attention" in str(node.target)]
    return [(str(node.target).split(".")[1], node) for node in found]


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_recognised_has_no_mask(name: str) -> None:
    mask, op = KNOWN[name]
    ops = ops_of(mask)
    assert [found for found, _ in ops] == [op, f"{op}_backward"]
    nodes = [node for _, node in ops]
    assert op != "attention" or (nodes[0].args[3], nodes[1].args[4]) == (None, None)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_recognised_keeps_its_mask(name: str) -> None:
    ops = ops_of(UNKNOWN[name])
    assert [found for found, _ in ops] == ["attention", "attention_backward"]
    assert ops[0][1].args[3] is not None


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_the_result_is_that_of_the_mask(name: str) -> None:
    mask = KNOWN[name][0] if name in KNOWN else UNKNOWN[name]
    with fused_attention(), float32_attention():
        found = run_captured(attend(mask), *operands())
    assert_same(found, as_host(attend(mask)(*operands())), rtol=2e-5, atol=2e-5)


def test_a_mask_of_a_large_batch_is_not_made_to_be_recognised() -> None:
    def fn(q: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(q))[:, None, None, None]
        numbers = torch.zeros(len(q), q.shape[-2], dtype=torch.int64).cumsum(-1)
        places = torch.arange(q.shape[-2])
        same = numbers[rows, places[:, None]] == numbers[rows, places]
        return F.scaled_dot_product_attention(q, q, q, same & (places <= places[:, None]))

    q = torch.empty(512, 2, 2048, 8, dtype=torch.bfloat16, device="meta")  # whose mask would have 2 GiB
    (node,) = [node for node in capture(fn, q).graph.graph.nodes if "attention" in str(node.target)]
    assert node.args[3:5] == (None, True)


def test_transformer_layers_with_padding_have_no_mask() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True)

    def fn(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        causal = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return layer(x, src_mask=causal, src_key_padding_mask=ids < 1)

    args = torch.randn(2, LENGTH, 16, requires_grad=True), operands()[3]
    with fused_attention(), float32_attention():
        names = [str(node.target) for node in capture(fn, *args).graph.graph.nodes if "attention" in str(node.target)]
        found = run_captured(fn, *args)
    assert names == ["xlatrain.banded_attention.default"]
    assert_same(found, as_host(fn(*args)), rtol=2e-5, atol=2e-5)


def test_a_mask_from_outside_still_decides_about_the_program() -> None:
    """A step is captured again where a constant of its graph has changed, so a mask that is no longer read stays one."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    with fused_attention(), float32_attention():
        captured = capture(attend(lambda _: mask), *operands())
    assert not [node for node in captured.graph.graph.nodes if node.op == "get_attr"]
    assert any(one is mask or torch.equal(one, mask) for one in captured.constants.values())


def seen_by(family: Family, queries: int, keys: int) -> torch.Tensor:
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if family.band.left is not None:
        seen &= columns >= rows - family.band.left
    if family.band.right is not None:
        seen &= columns <= rows + family.band.right
    return seen if family.segments is None else seen & (family.segments[0][:, None] == family.segments[1])


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5), (5, 1), (6, 6), (6, 9), (9, 6)])
@pytest.mark.parametrize("left", [None, -2, 0, 3, 8])
@pytest.mark.parametrize("right", [None, -1, 0, 3, 8])
def test_every_band_is_found(queries: int, keys: int, left: int | None, right: int | None) -> None:
    band = Band(left, right)
    seen = seen_by(Family(band), queries, keys)
    assert band.sees_some(queries, keys) == bool(seen.any(-1).all())
    found = family_of(seen)
    assert (found is not None) == band.sees_some(queries, keys)
    assert found is None or torch.equal(seen_by(found, queries, keys), seen)
    for row in range(queries):
        first, last = band.keys_of(row, row + 1, keys)
        assert not seen[row, :first].any() and not seen[row, last:].any()


def test_no_mask_is_taken_for_another() -> None:
    generator = torch.Generator().manual_seed(0)
    for density in (0.3, 0.6, 0.9) * 300:
        queries, keys = (int(n) for n in torch.randint(1, 6, (2,), generator=generator))
        seen = torch.rand(queries, keys, generator=generator) < density
        found = family_of(seen)
        assert found is None or torch.equal(seen_by(found, queries, keys), seen)


def test_names_of_bands() -> None:
    assert [str(band) for band in (WHOLE, CAUSAL, Band(3, 0))] == ["every key", "causal", "keys from -3 to +0"]
