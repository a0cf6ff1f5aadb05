"""The tensors that a module tree has under the names of its parameters and buffers: whether they are still the same objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from torch_compat.step.guards.identity_check import IdentityCheck


class ModuleTensors:
    """A detector of parameters or buffers that were assigned anew, in whatever way, at the price of one comparison.

    Args:
        module: the root of the tree.

    Attributes:
        changed: whether any entry is another object than at the last refresh.
    """

    changed: Callable[[], bool]

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.refresh()

    def refresh(self) -> None:
        """Take the present parameters and buffers as the reference of :attr:`changed`."""
        held = [held for one in self._module.modules() for held in (one._parameters, one._buffers)]
        self.changed = IdentityCheck((one, one, False) for one in held).changed

    def others(self, known: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield the names of ``known`` tensors in whose place there is another tensor or None, with that."""
        for path, child in self._module.named_modules(remove_duplicate=False):
            for held in (child._parameters, child._buffers):
                for key, tensor in held.items():
                    name = f"{path}.{key}" if path else key
                    if name in known and known[name] is not tensor:
                        yield name, tensor


def still_there(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entries of ``tensors`` whose name is still a parameter's or buffer's: a part of the module may have been taken out."""
    children = dict(module.named_modules(remove_duplicate=False))
    split = {name: name.rpartition(".")[::2] for name in tensors}
    there = {name: children[path] for name, (path, _) in split.items() if path in children}
    return {
        name: tensors[name] for name, child in there.items() if split[name][1] in child._parameters.keys() | child._buffers.keys()
    }
