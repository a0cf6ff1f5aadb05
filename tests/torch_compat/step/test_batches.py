"""Batches of any nesting as flat lists of tensors, and back."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from torch_compat.run.batches import first_batch_size, flatten_batch, map_tensors, take_rows
from torch_compat.step.host.batch_containers import BatchContainers
from xlatrain.bridge.tensors.host import as_numpy

A, B, C = torch.zeros(4), torch.ones(4, 2), torch.full((4,), 2.0)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str
    rest: Any = None


class Own:
    """A batch class as PyTorch's tutorials write it."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.inputs, self.targets = rows
        self.note = "kept"

    def pin_memory(self) -> Own:
        return self


@pytest.mark.parametrize(
    ("batch", "leaves", "names"),
    [
        (A, [A], ["batch"]),
        ((A, B), [A, B], ["batch[0]", "batch[1]"]),
        ([A, [B, (C,)]], [A, B, C], ["batch[0]", "batch[1][0]", "batch[1][1][0]"]),
        ({"y": B, "x": A}, [B, A], ['batch["y"]', 'batch["x"]']),
        ({"x": {3: A}, "id": "s"}, [A], ['batch["x"][3]']),
        (Pair(A, {"q": B}), [A, B], ["batch.first", 'batch.second["q"]']),
        (Sample(A, "n", [B]), [A, B], ["batch.image", "batch.rest[0]"]),
        (Own([A, B]), [A, B], ["batch.inputs", "batch.targets"]),
        (collections.OrderedDict(x=A), [A], ['batch["x"]']),
        (collections.defaultdict(list, x=A), [A], ['batch["x"]']),
        (collections.UserDict(x=A), [A], ['batch["x"]']),
        (torch.nn.Parameter(A), [A], ["batch"]),
        ("text", [], []),
        ([], [], []),
        (None, [], []),
    ],
)
def test_round_trip(batch: Any, leaves: list[torch.Tensor], names: list[str]) -> None:
    found, spec = flatten_batch(batch)
    assert len(found) == len(leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, leaves, strict=True))
    assert spec.names() == names
    rebuilt = spec.unflatten([leaf + 1 for leaf in found])
    assert type(rebuilt) is type(batch) or isinstance(batch, torch.Tensor)
    again, same = flatten_batch(rebuilt)
    assert same == spec
    assert all(torch.equal(a, b + 1) for a, b in zip(again, leaves, strict=True))


def test_what_is_no_tensor_is_carried_along() -> None:
    batch = {"x": A, "ids": ["a", "b"], "n": 3, "array": np.arange(2), "none": None}
    leaves, spec = flatten_batch(batch)
    assert spec.others == [["a", "b"], 3, batch["array"], None]
    rebuilt = spec.unflatten(leaves)
    assert rebuilt["ids"] is batch["ids"]
    assert rebuilt["array"] is batch["array"]


def test_the_batch_itself_is_not_changed() -> None:
    own, table = Own([A, B]), collections.UserDict(x=A)
    for batch in (own, table):
        leaves, spec = flatten_batch(batch)
        spec.unflatten([leaf + 1 for leaf in leaves])
    assert own.inputs is A
    assert table["x"] is A


def test_attributes_and_factories_survive() -> None:
    rebuilt = map_tensors(lambda leaf: leaf + 1, Own([A, B]))
    assert rebuilt.note == "kept"
    assert map_tensors(lambda leaf: leaf, collections.defaultdict(list, x=A)).default_factory is list
    assert map_tensors(lambda leaf: leaf, Sample(A, "n")).name == "n"


def test_batch_encoding() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": A, "labels": C, "text": ["a"]})
    rebuilt = map_tensors(lambda leaf: leaf + 1, batch)
    assert type(rebuilt) is transformers.BatchEncoding
    assert rebuilt["input_ids"].tolist() == [1.0] * 4
    assert rebuilt.text == ["a"]


def test_packed_sequence() -> None:
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    rebuilt = map_tensors(lambda leaf: leaf + 1 if leaf.is_floating_point() else leaf, packed)
    assert type(rebuilt) is type(packed)
    assert rebuilt.data.tolist() == (packed.data + 1).tolist()
    assert rebuilt.batch_sizes.tolist() == packed.batch_sizes.tolist()


def test_specs_are_equal_when_the_tensors_sit_in_the_same_places() -> None:
    def spec(batch: Any) -> Any:
        return flatten_batch(batch)[1]

    assert spec({"x": A, "ids": ["a"]}) == spec({"x": C, "ids": ["b", {"c": "d"}]})
    assert hash(spec({"x": A, "ids": ["a"]})) == hash(spec({"x": C, "ids": 7}))
    assert spec((A, B)) == spec((B, A))
    assert spec((A, B)) != spec([A, B])
    assert spec((A, B)) != spec((A, "b"))
    assert spec({"x": A}) != spec({"y": A})
    assert spec(Sample(A, "p")) == spec(Sample(B, "q", "r"))
    assert spec((A,)) != "something else"


def test_each_batch_keeps_its_own_other_leaves() -> None:
    first, second = flatten_batch({"x": A, "id": "a"})[1], flatten_batch({"x": A, "id": "b"})[1]
    assert first == second
    assert first.unflatten([A])["id"] == "a"
    assert second.unflatten([A])["id"] == "b"


def test_an_object_that_contains_itself_ends() -> None:
    own = Own([A, B])
    own.me = own  # pyright: ignore[reportAttributeAccessIssue]
    assert len(flatten_batch(own)[0]) == 2


def test_modules_and_generators_are_not_searched() -> None:
    assert flatten_batch([torch.nn.Linear(2, 2), torch.Generator(), torch.float32])[0] == []


def test_a_mapping_that_cannot_be_changed_is_refused_by_name() -> None:
    import types

    leaves, spec = flatten_batch(types.MappingProxyType({"x": A}))
    with pytest.raises(TypeError, match="tensors in a mappingproxy, which cannot be copied and changed"):
        spec.unflatten(leaves)


def test_batch_size_and_rows() -> None:
    assert first_batch_size([torch.tensor(1.0), B]) == 4
    assert first_batch_size([torch.tensor(1.0)]) is None
    cut = take_rows({"x": B, "s": torch.tensor(1.0), "w": torch.zeros(3)}, 0)
    assert [leaf.shape for leaf in cut.values()] == [(0, 2), (), (3,)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.float16, torch.uint8, torch.complex64]
)
def test_numpy_shares_memory(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    tensor.numpy()[0] = 0
    assert as_numpy(tensor)[0] == 0
    assert as_numpy(tensor).__array_interface__["data"][0] == tensor.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, ml_dtypes.bfloat16), (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn)]
)
def test_numpy_of_types_that_numpy_lacks(dtype: torch.dtype, name: Any) -> None:
    array = as_numpy(torch.tensor([0.5, 2.0], dtype=dtype))
    assert array.dtype == name
    assert array.tolist() == [0.5, 2.0]


def test_numpy_of_tensors_that_are_not_plain() -> None:
    assert as_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    assert as_numpy(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]
    assert as_numpy(torch.arange(6).reshape(2, 3).T).tolist() == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(TypeError, match=r"torch\.sparse_coo tensor .* only dense tensors"):
        as_numpy(torch.eye(2).to_sparse())


class Node:
    """Knows itself, as parents and children know one another."""

    def __init__(self) -> None:
        self.next, self.count = self, 0


@pytest.mark.parametrize("carried", [False, True])
def test_changes_of_a_batch_whose_objects_go_round_in_a_circle(carried: bool) -> None:
    node, meta = Node(), dict[str, Any]()
    meta["node"] = node
    containers = BatchContainers({"x": A, "meta": meta}, [node] if carried else [])
    meta["name"] = "a"
    node.count = 3
    found = containers.changes(lambda tree: tree)
    expected = [(("meta",), {"name": "a"})] + ([] if carried else [(("meta", "node"), {"count": 3})])
    assert [(one.names, one.put) for one in found] == expected
    own = {"x": A, "meta": {"node": Node()}}
    for one in found:
        one.make(own, lambda tree: tree)
    assert own["meta"]["name"] == "a" and own["meta"]["node"].count == (0 if carried else 3)  # pyright: ignore[reportArgumentType, reportCallIssue]
