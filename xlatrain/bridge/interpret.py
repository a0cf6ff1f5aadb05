"""Lower a captured graph to a JAX function, op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
from torch.fx.node import Node, map_arg

from xlatrain.bridge.capture import Capture, TensorSpec
from xlatrain.bridge.dtypes import jax_dtype
from xlatrain.bridge.errors import BridgeError, LoweringError
from xlatrain.bridge.host import as_numpy
from xlatrain.bridge.keys import use_key
from xlatrain.bridge.registry import lowering_of

Lowered = Callable[[Sequence[jax.Array], jax.Array | None], list[jax.Array]]


def lower(capture: Capture) -> Lowered:
    """A pure JAX function that computes ``capture``'s graph, to be called under ``jax.jit``.

    It takes one array per input (in order; dtype :func:`~xlatrain.bridge.dtypes.jax_dtype` of torch's) and a PRNG key
    (None where the graph draws no random numbers), and gives one array per output.

    Raises:
        LoweringError: ops of the graph have no lowering; all of them are listed, each with the user's line.
    """
    nodes = list(capture.graph.graph.nodes)
    _check_lowerings(capture, nodes)
    constants = {name: as_numpy(tensor) for name, tensor in capture.constants.items()}

    def run(inputs: Sequence[jax.Array], key: jax.Array | None) -> list[jax.Array]:
        env: dict[Node, Any] = {}
        given = iter(inputs)
        with use_key(key):
            for node in nodes:
                if node.op == "placeholder":
                    env[node] = next(given)
                elif node.op == "get_attr":
                    env[node] = jnp.asarray(constants[node.target], jax_dtype(capture.constants[node.target].dtype))
                elif node.op == "call_function":
                    env[node] = _call(capture, node, env)
                else:
                    return [env[value] for value in node.args[0]]
        raise AssertionError("a captured graph ends in an output node")

    return run


def _check_lowerings(capture: Capture, nodes: list[Node]) -> None:
    missing: dict[str, str] = {}
    for node in nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and lowering_of(node.target) is None:
            missing.setdefault(str(node.target), capture.user_line(node) or "in the backward pass or a library")
    if missing:
        listed = "\n".join(f"  {op}  ({where})" for op, where in sorted(missing.items()))
        raise LoweringError(
            f"the step uses {len(missing)} op(s) without a JAX lowering:\n{listed}\n"
            "Replace them by other torch ops, add a lowering with xlatrain.bridge.registry.lowers, or run the step eagerly."
        )


def _call(capture: Capture, node: Node, env: dict[Node, Any]) -> Any:
    args = map_arg(node.args, lambda n: env[n])
    kwargs = map_arg(node.kwargs, lambda n: env[n])
    if not isinstance(node.target, torch._ops.OpOverload):
        return cast(Any, node.target)(*args, **kwargs)  # operator.getitem on a tuple of results
    lowering = lowering_of(node.target)
    assert lowering is not None
    try:
        value = lowering(*args, **kwargs)
    except BridgeError:
        raise
    except Exception as error:
        where = capture.user_line(node)
        raise LoweringError(
            f"{node.target} could not be lowered{f' ({where})' if where else ''}: {type(error).__name__}: {error}"
        ) from error
    return _as_promised(node, value, node.meta.get("val"))


def _as_promised(node: Node, value: Any, promised: Any) -> Any:
    """``value`` with the dtype that torch promised for it, its shape checked."""
    if isinstance(promised, torch.Tensor):
        value = jnp.asarray(value)
        if tuple(value.shape) != tuple(promised.shape):
            raise LoweringError(
                f"{node.target}: the lowering gave shape {tuple(value.shape)}, torch promised {TensorSpec.of(promised)}"
            )
        return value.astype(jax_dtype(promised.dtype))
    if isinstance(promised, list | tuple):
        return tuple(_as_promised(node, one, spec) for one, spec in zip(value, promised, strict=False))
    return value
