"""Sharding constraints on activations, where XLA's partitioner would choose badly.

Nothing in a program says that a batch stays split while it goes through the layers. Where a parameter is split too, the
partitioner may then keep the parameter as it is and split the activations along features: it sums over ``fsdp`` after every
layer instead of gathering the parameter once. A constraint after every layer that has parameters, and on its gradient, keeps
dim 0 split over the batch axes; it changes no number.

A lookup in an embedding is the exception. Left alone, every device looks up the rows of the *whole* batch in its part of a
table that is split by rows, and the parts are summed: memory and traffic grow with the mesh. Here the table's shards are
exchanged until it is split by features, each device looks up its features of all rows, and these are exchanged for all features
of its own rows; the gradient goes the same way back. The ids that are looked up lie where the features do, on every device of
``fsdp``: compiled for several TPU slices, the partitioner otherwise moves the gradient back to where the ids are, and sums whole
tables over ``fsdp``. Rows are exchanged by an all-to-all of our own: beside ``expert``, and beside ``stage`` on several slices,
the partitioner would gather the features of the whole batch on every device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jax.sharding import Mesh, NamedSharding
from torch.nn.modules.module import register_module_forward_hook

from xlatrain.bridge.capture.attention import float32_attention, inside_functorch
from xlatrain.bridge.fake_kernels import fake_kernel
from xlatrain.bridge.patches import patched
from xlatrain.mesh.mesh import data_parallel_size, sequence_parts
from xlatrain.mesh.sharding.rules import axis_names

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define("split_rows(Tensor x, int mesh) -> Tensor")
_LIBRARY.define("split_features(Tensor x, int mesh) -> Tensor")
_LIBRARY.define("rows_of_features(Tensor x, int mesh) -> Tensor")
_LIBRARY.define("features_of_rows(Tensor x, int mesh) -> Tensor")
_LIBRARY.define("whole_over_fsdp(Tensor x, int mesh) -> Tensor")

MESHES: list[Mesh] = []
"""What the op's ``mesh`` counts: an op of torch takes no mesh."""


def _fake(x: torch.Tensor, mesh: int) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.mesh = inputs[1]


def _gradient_by(name: str) -> Callable[[Any, torch.Tensor], tuple[torch.Tensor, None]]:
    """The gradient of an op, which an op of ours gives."""
    return lambda ctx, grad: (getattr(torch.ops.xlatrain, name)(grad, ctx.mesh), None)


for _name, _back in {
    "split_rows": "split_rows",
    "split_features": "split_features",
    "whole_over_fsdp": None,
    "rows_of_features": "features_of_rows",
    "features_of_rows": "rows_of_features",
}.items():
    fake_kernel(_LIBRARY, _name)(_fake)
    if _back is not None:
        torch.library.register_autograd(f"xlatrain::{_name}", _gradient_by(_back), setup_context=_save, lib=_LIBRARY)


@contextlib.contextmanager
def split_activations(mesh: Mesh, module: torch.nn.Module, shardings: Mapping[str, NamedSharding]) -> Iterator[None]:
    """Keep layers' outputs split as the batch is, in steps captured in the block for a mesh that splits parameters or sequences.

    Layers are modules with parameters of their own that return one floating-point tensor. Lookups in embeddings that ``fsdp``
    splits are split by features. On a mesh with a ``tensor`` or ``context`` axis attention keeps its dims apart, in float32
    too: flattened into one dim, as torch does it, heads cannot stay split.

    Args:
        module: what is captured; its parameters may be replaced by traced tensors before layers run.
        shardings: where its parameters lie, by name.
    """
    size = data_parallel_size(mesh)
    apart = mesh.shape.get("tensor", 1) > 1 or sequence_parts(mesh) > 1
    if not apart and mesh.shape.get("fsdp", 1) == 1:
        yield
        return
    if mesh not in MESHES:
        MESHES.append(mesh)
    index = MESHES.index(mesh)

    def constrain(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not module._parameters or not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        if inside_functorch() or output.ndim < 2 or output.shape[0] % size:
            return None
        return torch.ops.xlatrain.split_rows(output, index)

    handle = register_module_forward_hook(constrain) if size > 1 or sequence_parts(mesh) > 1 else None
    lookup = _split_lookup(F.embedding, index, _Specs(module, shardings))
    try:
        with float32_attention() if apart else contextlib.nullcontext(), patched([(F, "embedding", lookup)]):
            yield
    finally:
        if handle is not None:
            handle.remove()


def _split_lookup(original: Callable[..., torch.Tensor], index: int, specs: _Specs) -> Callable[..., torch.Tensor]:
    """``F.embedding`` that splits features where ``fsdp`` splits the table and can split its features."""
    fsdp = MESHES[index].shape.get("fsdp", 1)

    def by_features(table: torch.Tensor) -> bool:
        if fsdp == 1 or table.shape[-1] % fsdp or inside_functorch():
            return False
        return any("fsdp" in axes for axes in specs.splits_of(table))

    @functools.wraps(original)
    def embedding(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not by_features(weight):
            return original(input, weight, *args, **kwargs)
        input = torch.ops.xlatrain.whole_over_fsdp(input, index) if input.ndim else input
        found = original(input, torch.ops.xlatrain.split_features(weight, index), *args, **kwargs)
        return torch.ops.xlatrain.rows_of_features(found, index)

    return embedding


class _Specs:
    """The splits of a module's parameters, found also where traced tensors have taken their places."""

    def __init__(self, module: torch.nn.Module, shardings: Mapping[str, NamedSharding]) -> None:
        self._module = module
        self._shardings = shardings
        self._known: dict[int, tuple[torch.Tensor, str]] = {}

    def splits_of(self, tensor: torch.Tensor) -> list[tuple[str, ...]]:
        """The mesh axes of each dim of a parameter; empty for any other tensor."""
        if id(tensor) not in self._known:
            self._known = {id(param): (param, name) for name, param in self._module.named_parameters()}
        _, name = self._known.get(id(tensor), (tensor, ""))
        return [axis_names(axes) for axes in self._shardings[name].spec] if name in self._shardings else []
