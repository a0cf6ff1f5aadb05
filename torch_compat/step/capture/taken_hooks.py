"""The hooks of parameters, on the traced values that stand for them while a step is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torch_compat.step.guards.parameter_hooks import NO_HOOKS, HooksOf, hooks_of, hooks_of_tensor, is_of_several, node_of
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.patches import patched


class TakenHooks:
    """The hooks of parameters, registered on their traced values, so that they run on the gradients in the captured step.

    Args:
        hooks: of the parameters, by name.
        values: the traced parameters.

    Attributes:
        on_sums: the names of the parameters with hooks that see what ``p.grad`` has become.
        on_nodes: whether there are hooks that only ``loss.backward()`` calls, unlike ``torch.autograd.grad``.
    """

    def __init__(self, hooks: Mapping[str, HooksOf], values: Mapping[str, torch.Tensor]) -> None:
        self.on_sums: list[str] = []
        self.on_nodes = False
        self._values = values
        self._nodes: dict[Any, Any] = {}  # the parameter's: the traced value's, alive until its hooks have run
        self._registered = False
        # One that was frozen since they were registered has no gradient that they could see.
        self._taken = {name: found if values[name].requires_grad else NO_HOOKS for name, found in hooks.items()}
        for name, found in self._taken.items():
            if found.all:
                self._take(name, found, values[name])

    def _take(self, name: str, found: HooksOf, value: torch.Tensor) -> None:
        for hook in found.gradient:
            value.register_hook(hook)
        for hook in found.accumulated:
            value.register_post_accumulate_grad_hook(hook)
        node = self._nodes[found.node] = node_of(value)
        for hook in found.before_node:
            node.register_prehook(hook)
        for hook in found.after_node:
            node.register_hook(hook)
        if found.accumulated or found.after_node:
            self.on_sums.append(name)
        counting = any(map(is_of_several, found.gradient))
        self.on_nodes |= bool(counting or found.accumulated or found.before_node or found.after_node)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Within the block, what the step registers itself is noted.

        Raises:
            CaptureError: the step leaves a hook on a parameter.
        """
        runs = torch._C._will_engine_execute_node
        register = torch.autograd.Function._register_hook

        def noting(held: Any, hook: Any) -> Any:
            self.on_nodes = self._registered = True
            return register(held, hook)

        with patched(
            [
                (torch._C, "_will_engine_execute_node", lambda node: runs(self._nodes.get(node, node))),
                (torch.autograd.Function, "_register_hook", staticmethod(noting)),
            ]
        ):
            yield
        for name, taken in self._taken.items():
            value = self._values[name]
            of_node = hooks_of(value)[2:] if self._registered else taken[2:]
            if HooksOf(*hooks_of_tensor(value), *of_node).all != taken.all:
                raise CaptureError(
                    f"the step registers a hook on the parameter {name!r}, where it stays for the steps that follow: a compiled "
                    "step's Python runs once.\n  Fix: register it in on_fit_start, or remove it before the step ends."
                )
