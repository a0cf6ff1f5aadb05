"""Which rule decides, what becomes of dims that do not divide, and what is said about rules that match nothing."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.sharding import PlannedSplit, ShardingRules, ShardingTable, pairs_of, save_table

P = PartitionSpec


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])


def test_precedence(mesh: Mesh) -> None:
    plan = {path: PlannedSplit(0, "M 'x' colwise") for path in ("a.weight", "b.weight", "c.weight", "small")}
    rules = ShardingRules(
        by_path=(("a.*", P(None, "tensor")), ("*.weight_g", P("fsdp"))),
        logical_axes=(("[ab].weight", ("heads", "embed")),),
        axis_rules={"heads": ("fsdp", "tensor"), "embed": None},
        planned=plan,
    )
    shape = (64, 128)
    chosen = {path: rules.choose(path, shape, mesh) for path in ("a.weight", "b.weight", "c.weight", "d.weight")}
    assert {path: (str(one), one.spec) for path, one in chosen.items()} == {
        "a.weight": ("path a.*", P(None, "tensor")),
        "b.weight": ("logical [ab].weight", P(("fsdp", "tensor"), None)),
        "c.weight": ("plan M 'x' colwise", P("tensor", "fsdp")),
        "d.weight": ("automatic", P(None, "fsdp")),
    }
    assert pairs_of("rules", {"w": P("fsdp")}) == (("w", P("fsdp")),)
    assert chosen["d.weight"].reasons == ("whole over tensor: no rule or plan names it",)
    assert rules.choose("small", (4, 4), mesh).spec == P("tensor")  # the plan's axis, but too small for fsdp
    assert rules.choose("b.weight", shape, make_mesh({"fsdp": 8}, jax.devices()[:8])).spec == P("fsdp", None)


def test_a_dim_that_does_not_divide(mesh: Mesh) -> None:
    rules = ShardingRules(by_path=(("w", P("fsdp", "tensor")),), planned={"p": PlannedSplit(0, "plan")}, min_size=1)
    with pytest.raises(
        ValueError, match=r"'w' of shape \(7, 8\): dim 0 of length 7 is not divisible by 2 .*indivisible='replicate'"
    ):
        rules.spec("w", (7, 8), mesh)
    lenient = ShardingRules(by_path=rules.by_path, indivisible="replicate").choose("w", (7, 8), mesh)
    assert lenient.spec == P(None, "tensor")
    assert "dim 0 of length 7" in lenient.reasons[0]
    planned = rules.choose("p", (7, 8), mesh)
    assert planned.spec == P(None, "fsdp")
    assert planned.reasons == ("whole over tensor: dim 0 of length 7 is not divisible by 2",)
    assert rules.choose("other", (7, 9), mesh).reasons[0] == "whole over fsdp: no dim of (7, 9) is divisible by 2"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShardingRules(by_path=(("w", P("tensro")),)), r"'w'.*unknown mesh axis \['tensro'\]; known axes: stage, data"),
        (lambda: ShardingRules(axis_rules={"heads": "rows"}), r"axis rule 'heads'.*unknown mesh axis \['rows'\]"),
        (lambda: ShardingRules(logical_axes=(("w", ("heads", None)),)), r"no axis rule for \['heads'\]"),
        (lambda: ShardingRules(by_path=(("w", P("fsdp", "fsdp")),)), r"'w' → .*'fsdp' stands there twice"),
        (
            lambda: ShardingRules(logical_axes=(("w", ("in", "out")),), axis_rules={"in": "fsdp", "out": ("tensor", "fsdp")}),
            r"'w' → .*'fsdp' stands there twice",
        ),
        (lambda: ShardingRules(by_path=(("w", "fsdp"),)), r"'w' → 'fsdp': expected a PartitionSpec"),  # pyright: ignore[reportArgumentType]
        (lambda: ShardingRules(logical_axes=(("w", "heads"),), axis_rules={"heads": None}), "a name, or None, for each dim"),  # pyright: ignore[reportArgumentType]
        (lambda: ShardingRules(min_size=-1), "min_size=-1; expected a number of elements, 0 or more"),
        (lambda: ShardingRules(min_size="1k"), "expected a number of elements"),  # pyright: ignore[reportArgumentType]
        (lambda: make_mesh({"data": "2"}), r"mesh axes {'data': '2'}: sizes must be positive whole numbers"),  # pyright: ignore[reportArgumentType]
        (lambda: pairs_of("rules", ("*.weight", P("fsdp"))), r"rules: '\*.weight' is not a pair"),
        (lambda: ShardingRules(indivisible="pad"), "expected 'error' or 'replicate'"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_axis_or_dims_that_are_not_there(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"the mesh has no axis \['context'\]; its axes are"):
        ShardingRules(by_path=(("w", P("context")),)).spec("w", (8,), mesh)
    with pytest.raises(ValueError, match="the spec has 2 dims, the parameter 1"):
        ShardingRules(by_path=(("w", P(None, "fsdp")),)).spec("w", (8,), mesh)


def test_the_table_counts_what_devices_hold(mesh: Mesh, tmp_path: Path) -> None:
    rules = ShardingRules(by_path=(("w", P("fsdp")), ("w", P("tensor")), ("*.query", P("tensor"))))
    params = {"w": np.zeros((64, 32), np.float32), "b": np.zeros(32, np.float32)}
    moments = {"w": (params["w"], params["w"], np.zeros((), np.int32)), "b": (params["b"],)}
    table = ShardingTable.from_rules(rules, mesh, params, moments, {"steps": np.zeros((), np.int64)})
    assert table.bytes_per_device("parameter") == 64 * 32 * 4 // 2 + 32 * 4
    assert table.bytes_per_device("optimizer state") == 2 * 64 * 32 * 4 // 2 + 4 + 32 * 4
    placed = jax.device_put(params["w"], rules.shardings(params, mesh)["w"])
    assert placed.addressable_shards[0].data.nbytes == table.places[0].bytes_per_device
    assert [place.path for place in table.largest(2)] == ["w", "w"]
    assert table.warnings[0].startswith("sharding rule 'w'") and "rules before it" in table.warnings[0]
    assert table.warnings[1].startswith("sharding rule '*.query'") and "matches no parameter" in table.warnings[1]
    assert table.warnings[2].startswith("mesh axis 'tensor' of size 2 splits no parameter")
    text = str(table)
    assert "w (optimizer state)  8.20 kB  fsdp" in text
    assert "whole over fsdp: 32 elements, fewer than min_size=1024" in text
    assert json.loads(save_table(table, tmp_path / "t.json").read_text()) == table.to_dict()
    assert save_table(table, tmp_path / "t.txt").read_text() == text + "\n"
    picture = ElementTree.parse(save_table(table, tmp_path / "t.svg")).getroot()
    assert "whole over fsdp: 32 elements, fewer than min_size=1024" in [text.text for text in picture.findall("{*}text")]
    boxes = picture.findall(".//{*}title")
    assert len(boxes) == len(table.places) + 2 + 1  # the bar; w in two pieces, b in one
    with pytest.raises(ValueError, match=r"ends in .svg, .json, .txt"):
        save_table(table, tmp_path / "t.png")
