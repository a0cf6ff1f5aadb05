"""Files of an ``nnx`` module that others read: its weights as safetensors, its call as StableHLO."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax import export

from xlatrain.init.pretrained import NameMapping, load_safetensors
from xlatrain.init.safetensors_writer import write_safetensors
from xlatrain.step.variables import ModuleVariables

PROGRAM, WEIGHTS = "forward.jax_export", "weights.safetensors"
_PLATFORMS = ("cpu", "cuda", "tpu")


def save_weights(module: nnx.Module, path: str | os.PathLike[str]) -> None:
    """Write a module's variables, without random streams, as one safetensors file, under their dotted paths.

    Raises:
        ValueError: see :func:`~xlatrain.init.safetensors_writer.write_safetensors`.
    """
    write_safetensors(path, _stored(module))


def load_weights(module: nnx.Module, path: str | os.PathLike[str], *, names: NameMapping = None, strict: bool = True) -> None:
    """Give a module's variables, but for random streams, the values of safetensors files, on the shards that they are on.

    Args:
        module: its shapes, dtypes and shardings stay.
        path: see :func:`xlatrain.init.pretrained.open_safetensors`.
        names: how stored names become dotted paths.
        strict: refuse names that only one side has.

    Raises:
        PretrainedMismatchError, FileNotFoundError, SafetensorsError, ValueError: see
            :func:`xlatrain.init.pretrained.load_safetensors`.
    """
    variables = ModuleVariables(module)
    for name, array in load_safetensors(path, _stored(module), names=names, strict=strict).items():
        variables.write(name, array)


def export_forward(
    model: nnx.Module | tuple[Mapping[str, jax.Array], Callable[..., Any]],
    folder: str | os.PathLike[str],
    *example: Any,
    batch: str | None = "batch",
    platforms: Sequence[str] = _PLATFORMS,
) -> Path:
    """Write a model's call as StableHLO, and its weights; both are read without this package.

    ::

        export_forward(module, "exported", jnp.zeros((8, 64)))

        program = jax.export.deserialize(bytearray(open("exported/forward.jax_export", "rb").read()))
        logits = program.call(safetensors.numpy.load_file("exported/weights.safetensors"), images)

    Args:
        model: an ``nnx`` module, which is called after its ``eval()``; or ``(params, apply)`` of :func:`xlatrain.bridge.to_jax`.
        folder: made if it is not there.
        *example: positional arguments: arrays, or anything with shape and dtype, in any nesting.
        batch: the name of dim 0 of all of them, which may have any size then; None: sizes are those of the example.
        platforms: where the program can run.

    Returns:
        The folder.

    Raises:
        ImportError: flatbuffers is not there, which ``jax.export`` needs for files.
        ValueError: ``batch`` is given and an argument has no dim 0, or the model wants a certain size; says what to do.
    """
    weights, function = _forward(model)
    given = _specs(example, batch)
    shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in weights.items()}
    # without compiler_options: it is not compiled here
    program = jax.jit(function)
    try:
        exported = export.export(program, platforms=list(platforms))(shapes, *given)
    except Exception as error:
        if batch is None:
            raise
        raise ValueError(
            f"export_forward(batch={batch!r}): {type(model).__name__} could not be traced with a dim 0 of any size "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0][:300]}). Expected a call that asks nothing of the "
            "batch size; batch=None exports it for the example's size"
        ) from error
    try:
        serialized = exported.serialize()
    except ImportError as error:
        raise ImportError("export_forward: jax.export writes its files with flatbuffers: pip install flatbuffers") from error
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS, weights)
    (folder / PROGRAM).write_bytes(serialized)
    return folder


def _forward(model: Any) -> tuple[dict[str, Any], Callable[..., Any]]:
    """The weights by name, and the call as a function of them and of its arguments."""
    if isinstance(model, tuple):
        params, apply = model
        return dict(params), apply
    if not isinstance(model, nnx.Module) or not callable(model):
        raise TypeError(
            f"export_forward: model is a {type(model).__name__}; expected an nnx.Module with __call__, or (params, apply) of "
            "xlatrain.bridge.to_jax(torch_module, example)"
        )
    variables = ModuleVariables(model)
    weights = _stored(model)
    streams = {name: value for name, value in variables.values()[1].items() if name not in weights}

    def call(weights: Mapping[str, jax.Array], *args: Any) -> Any:
        params = {name: weights[name] for name in variables.params}
        module = variables.build(params, {name: {**weights, **streams}[name] for name in variables.buffers})
        module.eval()
        return module(*args)

    return weights, call


def _stored(module: nnx.Module) -> dict[str, Any]:
    """The arrays of a module by name, without random streams.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(module, nnx.Module):
        raise TypeError(f"module is a {type(module).__name__}; expected an nnx.Module, as which a JaxModule counts")
    variables = ModuleVariables(module)
    params, buffers = variables.values()
    streams = {name for name, (_, variable) in variables.buffers.items() if isinstance(variable, nnx.RngState)}
    return {**params, **{name: value for name, value in buffers.items() if name not in streams}}


def _specs(example: Sequence[Any], batch: str | None) -> Any:
    """Shapes and dtypes of the arguments, with a symbol for dim 0.

    Raises:
        ValueError: an argument has no dim 0.
    """
    size = None if batch is None else export.symbolic_shape(batch)[0]

    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype)
        if size is None:
            return jax.ShapeDtypeStruct(shape, dtype)
        if not shape:
            raise ValueError(
                f"export_forward(batch={batch!r}): an argument is a scalar; expected arrays with a dim 0, or batch=None"
            )
        return jax.ShapeDtypeStruct((size, *shape[1:]), dtype)

    return jax.tree.map(spec, example)
