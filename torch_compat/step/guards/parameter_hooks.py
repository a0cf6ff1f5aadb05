"""The hooks that hang on a parameter: on the tensor itself, and on the node of autograd's graph that adds to its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_Hooks = tuple[Callable[..., Any], ...]


class HooksOf(NamedTuple):
    """The hooks of one tensor, by when autograd calls them.

    Attributes:
        gradient: of ``register_hook``; each may replace the gradient.
        accumulated: of ``register_post_accumulate_grad_hook``.
        before_node, after_node: of ``register_prehook`` and ``register_hook`` of the node.
        node: the node, where there are hooks.
    """

    gradient: _Hooks
    accumulated: _Hooks
    before_node: _Hooks
    after_node: _Hooks
    node: Any

    @property
    def all(self) -> _Hooks:
        """The hooks, of whatever kind."""
        return (*self.gradient, *self.accumulated, *self.before_node, *self.after_node)


def hooks_of(tensor: torch.Tensor) -> HooksOf:
    """The hooks of a leaf, whose values are not looked at."""
    with torch._C.DisableTorchFunctionSubclass():
        node = node_of(tensor)
        of_node = ((), ()) if node is None else (_registered(node.register_prehook), _registered(node.register_hook))
        found = HooksOf(*hooks_of_tensor(tensor), *of_node, node)
    return found if found.all else NO_HOOKS


NO_HOOKS = HooksOf((), (), (), (), None)


def hooks_of_tensor(tensor: torch.Tensor) -> tuple[_Hooks, _Hooks]:
    """The hooks of a tensor itself, without those of this package, by which Fabric knows of gradients of the host's."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient, accumulated = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    own = "torch_compat."
    gradient, accumulated = (
        tuple(hook for hook in (held or {}).values() if not (getattr(hook, "__module__", None) or "").startswith(own))
        for held in (gradient, accumulated)
    )
    return gradient, accumulated


def node_of(tensor: torch.Tensor) -> Any:
    """The node that adds to a leaf's gradient, one for as long as somebody holds it; None where the tensor has none."""
    if not tensor.requires_grad or not tensor.is_leaf:
        return None
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # pyright: ignore[reportOptionalMemberAccess]


def _registered(register: Callable[[Callable[..., Any]], Any]) -> _Hooks:
    """The hooks of a node, which shows them to nobody but the handle of one more."""
    handle = register(_nothing)
    held = handle.hooks_dict_ref() or {}
    handle.remove()
    return tuple(held.values())


def _nothing(*_: Any) -> None:
    pass


def called_by_autograd(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """The hooks of a module's own parameters, and the functions inside of those that ``register_multi_grad_hook`` has made."""
    hooks = [hook for param in module._parameters.values() if param is not None for hook in hooks_of(param).all]
    cells = [cell for hook in hooks if is_of_several(hook) for cell in getattr(hook, "__closure__", None) or ()]
    return [*hooks, *(cell.cell_contents for cell in cells if callable(cell.cell_contents))]


def is_of_several(hook: Any) -> bool:
    """Whether ``register_multi_grad_hook`` has made the hook: it counts the tensors of which there are gradients."""
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename == torch.autograd.graph.__file__
