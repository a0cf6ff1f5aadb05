"""safetensors files read by byte ranges, and pretrained weights onto shards."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.torch import load_file, save_file
from torch import nn

from xlatrain.bridge.lazy_init import deferred_init, is_deferred
from xlatrain.bridge.pretrained import load_pretrained
from xlatrain.init import PretrainedMismatchError, SafetensorsFile, load_safetensors, open_safetensors
from xlatrain.init.joined import Joined
from xlatrain.init.safetensors import SafetensorsError
from xlatrain.mesh.mesh import make_mesh

TENSORS = {
    "f32": torch.randn(24, 6, 5),
    "bf16": torch.randn(16, 8).bfloat16(),
    "i64": torch.arange(10),
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "f8": torch.randn(8).to(torch.float8_e4m3fn),
}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def test_whole_tensors_and_slices(stored: Path) -> None:
    file = SafetensorsFile(stored)
    assert set(file) == set(TENSORS)
    assert file.metadata == {"format": "pt"}
    for name, tensor in TENSORS.items():
        found = file[name].read()
        assert found.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(found.astype(np.float64), tensor.double().numpy())
    whole = TENSORS["f32"].numpy()
    for index in [(slice(3, 9),), (slice(None), slice(1, 4)), (slice(20, 24), slice(0, 6), slice(2, 3)), (slice(5, 5),)]:
        np.testing.assert_array_equal(file["f32"].read(index), whole[index])


def test_only_the_rows_asked_for_are_read(stored: Path, tmp_path: Path) -> None:
    """The file is cut off behind them: reading more would fail."""
    entry = SafetensorsFile(stored)["f32"]
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(stored.read_bytes()[: entry.offset + 12 * 30 * 4])
    short = type(entry)(cut, entry.name, entry.shape, entry.dtype, entry.offset)
    np.testing.assert_array_equal(short.read((slice(2, 12),)), TENSORS["f32"][2:12].numpy())
    with pytest.raises(SafetensorsError, match=r"ends inside of tensor 'f32'"):
        short.read((slice(2, 14),))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "first 8 bytes"),
        (b"\xff" * 20, "first 8 bytes"),
        (b"PK\x03\x04" + b"0" * 20, r"torch.save.*safetensors.torch.save_file"),
        ((10).to_bytes(8, "little") + b"not json!!" + b"0" * 9, "header is not a JSON object"),
    ],
)
def test_what_is_no_safetensors_file_is_said_to_be_none(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(SafetensorsError, match=message):
        SafetensorsFile(tmp_path / "bad.safetensors")


def test_a_truncated_download_is_named(stored: Path) -> None:
    stored.write_bytes(stored.read_bytes()[:-8])
    with pytest.raises(SafetensorsError, match="damaged or incomplete"):
        SafetensorsFile(stored)


def hf_directory(path: Path) -> Path:
    save_file({"model.a.weight": TENSORS["f32"]}, path / "one.safetensors")
    save_file({"model.b.weight": TENSORS["bf16"]}, path / "two.safetensors")
    weight_map = {"model.a.weight": "one.safetensors", "model.b.weight": "two.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_shards_of_an_index_with_other_names_and_dtypes(tmp_path: Path) -> None:
    mesh = make_mesh({"data": 2, "fsdp": 4})
    templates = {
        "a.weight": jax.ShapeDtypeStruct((24, 6, 5), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))),
        "b.weight": jax.ShapeDtypeStruct(
            (16, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp")))
        ),
    }
    arrays = load_safetensors(hf_directory(tmp_path), templates, names={"model.": ""})
    for name, source in (("a.weight", TENSORS["f32"].bfloat16()), ("b.weight", TENSORS["bf16"])):
        assert arrays[name].sharding == templates[name].sharding
        assert arrays[name].dtype == templates[name].dtype
        np.testing.assert_array_equal(np.asarray(arrays[name]).astype(np.float32), source.float().numpy())


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    whole = NamedSharding(make_mesh({"data": 8}), PartitionSpec())
    templates = {name: jax.ShapeDtypeStruct((2, 2), jnp.float32, sharding=whole) for name in ("model.a.weight", "c")}
    with pytest.raises(PretrainedMismatchError) as raised:
        load_safetensors(hf_directory(tmp_path), templates)
    for part in ("missing: c (2, 2)", "unexpected: model.b.weight (16, 8)", "model.a.weight is (24, 6, 5), expected (2, 2)"):
        assert part in str(raised.value)
    assert load_safetensors(tmp_path, {"c": templates["c"]}, strict=False) == {}
    with pytest.raises(PretrainedMismatchError, match="strict=False leaves out names, not shapes"):
        load_safetensors(tmp_path, templates, strict=False)
    for missing, hint in (("b.weight", "{'model.': ''}"), ("net.model.b.weight", "{'': 'net.'}")):
        with pytest.raises(PretrainedMismatchError, match=re.escape(f"names={hint} would find 1 of the 1")):
            load_safetensors(tmp_path, {missing: templates["c"]})
    head = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=whole)  # the shape of model.b.weight alone
    with pytest.raises(PretrainedMismatchError, match=re.escape("fit with names={'model.b.weight': 'head'}.")):
        load_safetensors(tmp_path, {"head": head})
    with pytest.raises(PretrainedMismatchError, match="Map names with names="):
        load_safetensors(tmp_path, {"head": head, "tail": head})
    with pytest.raises(ValueError, match=r"names maps both .* to 'same'"):
        open_safetensors(tmp_path, lambda name: "same")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        open_safetensors(tmp_path / "..")
    with pytest.raises(FileNotFoundError, match=r"'meta-llama/Llama-3-8B'; nothing is downloaded here"):
        open_safetensors("meta-llama/Llama-3-8B")
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names files that are not beside it: two.safetensors$"):
        open_safetensors(tmp_path)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(700, 512)
        self.head = nn.Linear(512, 700, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)


@pytest.mark.parametrize("deferred", [True, False])
def test_a_torch_module_with_tied_weights(tmp_path: Path, deferred: bool) -> None:
    source = Tied()
    state = {name: value for name, value in source.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    if deferred:
        with deferred_init():
            module = Tied()
    else:
        module = Tied()
    load_pretrained(module, tmp_path)
    assert is_deferred(module.embed.weight) == deferred  # it is read when it is needed
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.head.weight, source.embed.weight)
    assert torch.equal(module.norm.running_var, source.norm.running_var)


def test_slices_of_joined_tensors_are_those_of_the_whole(tmp_path: Path) -> None:
    tensors = {f"experts.{e}.{part}": torch.randn(rows, 5) for e in range(3) for part, rows in (("gate", 4), ("up", 6))}
    save_file(tensors, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    stacks = [Joined.stack([file[f"experts.{e}.{part}"] for e in range(3)]) for part in ("gate", "up")]
    joined = Joined.concatenate(stacks, 1)
    whole = torch.cat([torch.stack([tensors[f"experts.{e}.{part}"] for e in range(3)]) for part in ("gate", "up")], 1).numpy()
    assert (joined.shape, joined.dtype) == (whole.shape, whole.dtype)
    for index in [(), (slice(1, 3),), (slice(None), slice(3, 5)), (slice(2, 3), slice(5, 10), slice(1, 4)), (slice(1, 1),)]:
        np.testing.assert_array_equal(joined.read(index), whole[index])
    with pytest.raises(ValueError, match=r"stack differ: \[\('experts.0.gate', \(4, 5\)"):
        Joined.stack([file["experts.0.gate"], file["experts.0.up"]])
    with pytest.raises(ValueError, match="concatenate differ"):
        Joined.concatenate(stacks, 0)


def mixtral(layers: int = 1) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, num_hidden_layers=layers, num_local_experts=12)  # pyright: ignore[reportCallIssue]
    )


def gpt_neox() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("make", [mixtral, gpt_neox])
@pytest.mark.parametrize("deferred", [True, False])
def test_transformers_models_whose_checkpoints_have_other_names(tmp_path: Path, make: Any, deferred: bool) -> None:
    source = make()
    source.save_pretrained(tmp_path, max_shard_size="20KB")  # 12 experts, w1, w2 and w3 of each, in many files
    names = {name for name, _ in json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].items()}
    assert names != set(source.state_dict())
    with deferred_init() if deferred else contextlib.nullcontext():
        outer = nn.ModuleDict({"net": make()})
    load_pretrained(outer, tmp_path, names={"": "net."})
    for name, value in source.state_dict().items():
        assert torch.equal(outer["net"].state_dict()[name], value), name


def test_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if ".experts.11." in name]:
        del stored[name]
    save_file(stored, tmp_path / "model.safetensors")
    message = r"wrong shape: model.layers.0.mlp.experts.gate_up_proj \(stored as .*\) is \(11, 96, 32\), expected \(12, 96, 32\)"
    with pytest.raises(PretrainedMismatchError, match=message):
        load_pretrained(mixtral(), tmp_path)
    with pytest.raises(PretrainedMismatchError, match=r"missing: model.layers.1.mlp.experts.down_proj \(12, 32, 48\)"):
        load_pretrained(mixtral(layers=2), tmp_path)
