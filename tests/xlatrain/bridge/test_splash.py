"""JAX's TPU kernels for attention: interpreted, against torch; and compiled for TPUs by libtpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.xlatrain.bridge._compare import as_host, with_gradients
from xlatrain.bridge.capture.attention import float32_attention, fused_attention
from xlatrain.bridge.capture.capture import Capture, capture
from xlatrain.bridge.capture.masks.band import CAUSAL, WHOLE, Band
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.lower.kernels.choice import SWITCH, Request, Splash, choose
from xlatrain.bridge.lower.kernels.chosen import kernels_of
from xlatrain.bridge.lower.kernels.splash import Blocks
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.host.libtpu_environment import ENVIRONMENT
from xlatrain.mesh.mesh import make_mesh
from xlatrain.preflight import LibtpuError, Topology
from xlatrain.xla.compiler_options import matmul_precision


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)


def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, (columns <= rows) & (columns > rows - 40), enable_gqa=True)


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, (ids > 0)[:, None, None], enable_gqa=True)


def padded_on_the_left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, (ids > 0)[:, None, None] & (columns <= rows), enable_gqa=True)


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    mask = (ids[:, None, :, None] == ids[:, None, None]) & (columns <= rows)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def operands(
    queries: int, keys: int, dtype: torch.dtype = torch.float32, rows: int = 2, heads: tuple[int, int] = (4, 2), width: int = 16
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, heads[0], queries, width), (rows, heads[1], keys, width), (rows, heads[1], keys, 8 + width)]
    ids = torch.arange(keys).expand(rows, -1) // 50 * (torch.arange(keys) >= 20 * torch.arange(rows)[:, None])
    return [*(torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes), ids]


def captured_step(fn: Callable[..., Any], args: list[torch.Tensor]) -> Capture:
    with fused_attention(), float32_attention():
        return capture(with_gradients(fn), *args)


def on_mesh(mesh: Mesh, fn: Callable[..., Any], args: list[torch.Tensor]) -> tuple[str, Any]:
    """The step's jaxpr, and what it gives."""
    captured = captured_step(fn, args)
    axes = tuple(axis for axis in mesh.axis_names if axis not in ("tensor", "context"))
    split = NamedSharding(mesh, PartitionSpec(axes or None))
    arrays = [jax.device_put(jnp.asarray(as_numpy(x.detach()), jax_dtype(x.dtype)), split) for x in args]
    run = jax.jit(lower(captured, mesh=mesh))
    text = str(jax.make_jaxpr(lower(captured, mesh=mesh))(arrays, None))
    return text, captured.unflatten([np.asarray(x) for x in run(arrays, None)])


def assert_near(found: Any, expected: Any, tolerance: float) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        wide, wanted = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert np.linalg.norm(wide - wanted) <= tolerance * np.linalg.norm(wanted)


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Pallas sets as it is first used is taken back."""
    monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", "/usr/local/cuda")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "interpret")


CASES = [
    (causal, 128, 128),
    (causal, 200, 200),
    (whole, 130, 250),
    (window, 256, 256),
    (padded, 150, 150),
    (padded_on_the_left, 200, 200),
    (packed, 256, 256),
]


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fn", "queries", "keys"), CASES)
def test_kernels_give_what_torch_gives(fn: Callable[..., Any], queries: int, keys: int, dtype: torch.dtype) -> None:
    args = operands(queries, keys, dtype)
    text, found = on_mesh(make_mesh({"data": 1}, jax.devices()[:1]), fn, args)
    assert "pallas_call" in text
    exact = [x.detach().float().requires_grad_() if x.is_floating_point() else x for x in args]
    assert_near(found, as_host(with_gradients(fn)(*exact)), 2e-6 if dtype == torch.float32 else 0.02)


MESHES = [{"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}, {"fsdp": 2, "tensor": 4}]


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("fn", [causal, padded_on_the_left])
def test_every_device_computes_its_rows_and_heads(axes: dict[str, int], fn: Callable[..., Any]) -> None:
    args = operands(128, 128, rows=8)
    text, found = on_mesh(make_mesh(axes), fn, args)
    assert "pallas_call" in text and "shard_map" in text
    assert_near(found, as_host(with_gradients(fn)(*args)), 2e-6)


def request(**changes: Any) -> Request:
    shape = (8, 4, 256, 64)
    given = {"queries": shape, "keys": shape, "values": shape, "dtype": jnp.dtype(jnp.bfloat16)}
    return Request(**{**given, "mask": False, "segments": False, "band": CAUSAL, "dropout": False, **changes})


REFUSED = {
    "dropout": {"dropout": True},
    "a mask": {"mask": True, "band": WHOLE},
    "float16": {"dtype": jnp.dtype(jnp.float16)},
    "64 queries": {"queries": (8, 4, 64, 64)},
    "600 features": {"values": (8, 4, 256, 600)},
    "10 rows do not divide": {"queries": (10, 4, 256, 64), "keys": (10, 4, 256, 64)},
    "3 heads do not divide": {"queries": (8, 3, 256, 64), "keys": (8, 3, 256, 64)},
    "see no key": {"band": Band(3, -5)},
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_left_to_xla_says_why(reason: str) -> None:
    found = str(choose(request(**REFUSED[reason]), make_mesh({"fsdp": 4, "tensor": 2})))
    assert found.startswith("XLA: ") and reason in found


def test_kernels_are_for_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    assert str(choose(request(), mesh)) == "XLA: no TPU"
    assert str(choose(request(), None)) == "XLA: no TPU"
    monkeypatch.setenv(SWITCH, "0")
    assert str(choose(request(), mesh)) == f"XLA: {SWITCH}=0"
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(ValueError, match="expected 1"):
        choose(request(), mesh)


def test_names_of_what_is_asked_for() -> None:
    assert str(request()) == "attention bfloat16[8,4,256,64], causal"
    assert str(request(band=WHOLE, segments=True)) == "attention bfloat16[8,4,256,64], segments"
    assert str(request(keys=(8, 2, 256, 64), mask=True, dropout=True)) == (
        "attention bfloat16[8,4,256,64] × [8,2,256,64], a mask and dropout"
    )


@pytest.mark.parametrize(
    ("queries", "blocks"),
    [
        (128, (128, 128)),
        (197, (256, 256)),
        (4096, (1024, 4096)),
        (4100, (512, 4608)),
        (1100, (256, 1280)),
        (32768, (1024, 32768)),
    ],
)
def test_blocks_fill_up_little(queries: int, blocks: tuple[int, int]) -> None:
    found = Blocks.of(queries, queries, 128, 2)
    assert (found.query, found.queries) == (found.key, found.keys) == blocks


def for_tpu(name: str) -> Topology:
    try:
        topology = Topology.parse(name)
        topology.devices()
    except LibtpuError as error:
        pytest.skip(f"no libtpu to compile with: {error}")
    return topology


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_as_for_users")
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    ("fn", "dtype", "width", "precision"),
    [(packed, torch.bfloat16, 128, "highest"), (causal, torch.float32, 256, "high"), (window, torch.bfloat16, 64, "medium")],
)
def test_kernels_compile_for_tpus(
    name: str, fn: Callable[..., Any], dtype: torch.dtype, width: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, for_tpu(name).devices())
    args = operands(2048, 2048, dtype, width=width)
    captured = captured_step(fn, args)
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    arrays = [jax.ShapeDtypeStruct(x.shape, jax_dtype(x.dtype), sharding=split) for x in args]
    with matmul_precision(precision):
        text = jax.jit(lower(captured, mesh=mesh)).lower(arrays, None).compile().as_text()
    assert text is not None and text.count("tpu_custom_call") >= 2


def test_the_report_counts_ops_and_names_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        kept = packed(causal(q, k, k, ids), k, k, ids) + causal(q, k, k, ids)
        return F.scaled_dot_product_attention(kept, k, k, dropout_p=0.5, enable_gqa=True)

    graph = captured_step(two, operands(128, 128, torch.bfloat16, rows=8)).graph.graph
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    shape = "bfloat16[8,4,128,16] × [8,2,128,16]"
    assert all(text.endswith(": XLA: no TPU") for text in kernels_of(graph, mesh))
    monkeypatch.setenv(SWITCH, "interpret")
    kernel = "TPU kernel (splash): rows over fsdp, heads over tensor"
    assert kernels_of(graph, mesh) == [
        f"2 × attention {shape}, causal: {kernel}",
        f"1 × attention {shape}, causal and segments: {kernel}",
        f"1 × attention {shape}, every key and dropout: XLA: dropout, whose draws are the same on any device and in any blocks",
    ]


def test_the_choice_names_how_a_mesh_splits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "interpret")
    found = choose(request(queries=(8, 8, 256, 64)), make_mesh({"fsdp": 1, "tensor": 8}))
    assert isinstance(found, Splash)
    assert (found.heads, found.repeated, found.rows) == ("tensor", 2, ())
    assert str(found) == "TPU kernel (splash): heads over tensor, keys repeated 2 times"
