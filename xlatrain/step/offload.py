"""Optimizer state that lies in the memory of the host, and is on the devices a parameter at a time.

Between steps the arrays are in ``pinned_host`` memory, split as ever. The update of each parameter fetches its state, and writes
it back; a barrier holds the next fetches until that has been written, since XLA would otherwise fetch everything at once. The
numbers are those of an update on the devices. It costs the transfer of the whole state, both ways, in every update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from xlatrain.mesh.sharding.rules import ShardingRules

MEMORY = "pinned_host"
_AHEAD = 2
"""Parameters whose state is on the devices at a time: one is fetched while the one before is updated."""

UpdateOne = Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""``(grads, opt_state, params) -> (params, opt_state)``, of any subset of the parameters."""


def check_host_memory(mesh: Mesh, argument: str) -> None:
    """``argument`` is what asks for it.

    Raises:
        ValueError: a device of the mesh cannot reach host memory.
    """
    kinds = [memory.kind for memory in mesh.devices.flat[0].addressable_memories()]
    if MEMORY not in kinds:
        raise ValueError(
            f"{argument} needs devices that reach {MEMORY!r} memory; {mesh.devices.flat[0].platform} has "
            f"{', '.join(kinds)} only. Split over more devices (fsdp) instead"
        )


def on_host(shardings: Mapping[str, NamedSharding]) -> dict[str, NamedSharding]:
    """The same shardings, in host memory."""
    return {path: sharding.with_memory_kind(MEMORY) for path, sharding in shardings.items()}


def state_places(rules: ShardingRules, shardings: Mapping[str, NamedSharding]) -> Mapping[str, NamedSharding]:
    """The shardings of the optimizer's state of each parameter, given those of the parameters."""
    return on_host(shardings) if rules.offload == "optimizer" else shardings


def update_from_host(
    update: UpdateOne, grads: Mapping[str, Any], opt_state: Mapping[str, Any], params: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``update`` of one parameter after the other, inside of a program.

    Args:
        update: treats every parameter by itself.
        grads: path → gradient, or None.
        opt_state: path → pytree, whose leaves of the parameter's shape are in host memory.
        params: path → parameter.
    """
    new_params, new_state = dict(params), dict(opt_state)
    written: deque[list[Any]] = deque()
    for path, grad in grads.items():
        if grad is None:
            continue
        param = params[path]
        before = {path: opt_state[path]} if path in opt_state else {}
        if before and len(written) >= _AHEAD:
            before, _ = jax.lax.optimization_barrier((before, written.popleft()))
        changed, state = update({path: grad}, _moved(before, param.shape, jax.memory.Space.Device), {path: param})
        new_params[path] = changed[path]
        if path in state:
            new_state[path] = _moved(state[path], param.shape, jax.memory.Space.Host)
            written.append([leaf for leaf in jax.tree.leaves(new_state[path]) if leaf.shape == param.shape])
    return new_params, new_state


def _moved(state: Any, shape: tuple[int, ...], to: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(leaf, to) if leaf.shape == shape else leaf, state)
