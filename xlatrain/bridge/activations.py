"""Where activations lie, said where XLA's partitioner would choose badly.

Nothing in a program says that a batch stays split while it goes through the layers. Where a parameter is split too, the
partitioner may then keep the parameter as it is and split the activations along features: it sums over ``fsdp`` after every
layer instead of gathering the parameter once. A constraint after every layer that has parameters, and on its gradient, keeps
dim 0 split over the batch axes; it changes no number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jax.sharding import Mesh
from torch.nn.modules.module import register_module_forward_hook

from xlatrain.bridge.attention import float32_attention
from xlatrain.mesh import data_parallel_size

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define("split_rows(Tensor x, int mesh) -> Tensor")

MESHES: list[Mesh] = []
"""What the op's ``mesh`` counts: an op of torch takes no mesh."""


@torch.library.register_fake("xlatrain::split_rows", lib=_LIBRARY)
def _fake(x: torch.Tensor, mesh: int) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.mesh = inputs[1]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.xlatrain.split_rows(grad, ctx.mesh), None


torch.library.register_autograd("xlatrain::split_rows", _backward, setup_context=_save, lib=_LIBRARY)


@contextlib.contextmanager
def split_activations(mesh: Mesh) -> Iterator[None]:
    """While a step is captured for a mesh that splits parameters: dim 0 of what layers give stays split over the batch axes.

    Layers are modules with parameters of their own that return one floating-point tensor. On a mesh with a ``tensor`` axis
    attention keeps batch and heads apart, in float32 too: flattened into one dim, as torch does it, heads cannot stay split.
    """
    size = data_parallel_size(mesh)
    tensor = mesh.shape.get("tensor", 1) > 1
    if not tensor and mesh.shape.get("fsdp", 1) == 1:
        yield
        return
    if mesh not in MESHES:
        MESHES.append(mesh)
    index = MESHES.index(mesh)

    def constrain(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not module._parameters or not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        inside_vmap = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
        if inside_vmap or output.ndim < 2 or output.shape[0] % size:
            return None
        return torch.ops.xlatrain.split_rows(output, index)

    handle = register_module_forward_hook(constrain) if size > 1 else None
    try:
        with float32_attention() if tensor else contextlib.nullcontext():
            yield
    finally:
        if handle is not None:
            handle.remove()
