"""Weights and calls of nnx modules in files that are read without this package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax import export
from safetensors.numpy import load_file, save_file

from xlatrain.bridge import to_jax
from xlatrain.init.pretrained import PretrainedMismatchError
from xlatrain.init.safetensors_writer import write_safetensors
from xlatrain.step.module_files import export_forward, load_weights, save_weights


class Net(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.inner = nnx.Linear(4, 8, param_dtype=jnp.bfloat16, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(self.norm(self.inner(x))))


def exported(folder: Path) -> Any:
    program = export.deserialize(bytearray((folder / "forward.jax_export").read_bytes()))
    return lambda *args: program.call(load_file(folder / "weights.safetensors"), *args)


needs_flatbuffers = pytest.mark.skipif(find_spec("flatbuffers") is None, reason="jax.export writes files with flatbuffers")


@needs_flatbuffers
def test_a_call_of_any_batch_size_and_its_weights(tmp_path: Path) -> None:
    module = Net(0)
    module.norm.mean[...] = jnp.arange(8.0)
    call = exported(export_forward(module, tmp_path / "out", np.zeros((3, 4), np.float32)))
    expected = nnx.clone(module)
    expected.eval()
    for rows in (1, 5):
        x = jax.random.normal(jax.random.key(rows), (rows, 4))
        np.testing.assert_allclose(call(x), expected(x), rtol=1e-5, atol=1e-6)


@needs_flatbuffers
def test_a_torch_module(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).eval()
    x = torch.randn(3, 4)
    call = exported(export_forward(to_jax(net, x), tmp_path, x.numpy(), batch=None))
    np.testing.assert_allclose(call(x.numpy()), net(x).detach().numpy(), rtol=1e-4, atol=1e-6)


def test_weights_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    source, target = Net(0), Net(1)
    save_weights(source, path)
    stored: Any = load_file(path)
    assert set(stored) == {
        *("inner.kernel", "inner.bias", "norm.mean", "norm.var", "norm.scale", "norm.bias", "outer.kernel", "outer.bias"),
    }
    load_weights(target, path)
    source.eval()
    target.eval()
    np.testing.assert_array_equal(source(jnp.ones((2, 4))), target(jnp.ones((2, 4))))
    assert target.inner.kernel[...].dtype == jnp.bfloat16
    save_file({f"model.{name}": value for name, value in stored.items()}, tmp_path / "other.safetensors")
    load_weights(Net(2), tmp_path / "other.safetensors", names={"model.": ""})
    with pytest.raises(PretrainedMismatchError, match="missing"):
        load_weights(Net(2), tmp_path / "other.safetensors")


def test_mistakes_are_named(tmp_path: Path) -> None:
    class Certain(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return x.reshape(3, -1)

    with pytest.raises(ValueError, match="could not be traced with a dim 0 of any size"):
        export_forward(Certain(), tmp_path, np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="is a scalar"):
        export_forward(Net(0), tmp_path, np.zeros((), np.float32))
    with pytest.raises(TypeError, match=r"model is a Linear; expected an nnx\.Module"):
        export_forward(torch.nn.Linear(2, 2), tmp_path, np.zeros((3, 2), np.float32))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'x' is complex64"):
        write_safetensors(tmp_path / "x.safetensors", {"x": np.zeros(2, np.complex64)})
