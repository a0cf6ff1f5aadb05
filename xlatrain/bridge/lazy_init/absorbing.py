"""Large parameters that a constructor made with values, e.g. from a file: their host memory is given up while it goes on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from xlatrain.bridge.lazy_init.tape import Constant, Operand, Tape, operand_of
from xlatrain.bridge.tensors.host_copies import storageless_like

aten = torch.ops.aten
PutAway = Callable[[torch.Tensor], torch.Tensor]
"""Takes a host tensor's values elsewhere, and gives a lazy tensor that stands for them."""

_LARGE = 1 << 20
_ALONE = 2  # references to a storage that only its tensor has: the tensor's and ours


class Absorber:
    """Puts away each large parameter when the next one is registered: by then its constructor is done with it.

    Args:
        tape: of the block.
        put_away: where values go.
    """

    def __init__(self, tape: Tape, put_away: PutAway) -> None:
        self._tape = tape
        self._put_away = put_away
        self._latest: torch.Tensor | None = None

    def register(self, parameter: torch.Tensor | None) -> None:
        """A module got a parameter."""
        if parameter is self._latest:
            return
        latest, self._latest = self._latest, parameter
        if latest is not None:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                self._absorb(latest)

    def finish(self) -> None:
        """The block ends."""
        self.register(None)

    def _absorb(self, parameter: torch.Tensor) -> None:
        """Put a large parameter's values away, and record that they are copied into it; small and shared ones stay."""
        if not _is_plain(parameter) or parameter.nbytes < _LARGE or operand_of(parameter) is not None:
            return
        if torch._C._storage_Use_Count(parameter.untyped_storage()._cdata) > _ALONE:
            return  # something else sees the same memory
        lazy = self._put_away(parameter.detach().contiguous())
        empty = storageless_like(parameter)
        parameter.data = empty
        tape = self._tape
        size, stride = tuple(empty.shape), empty.stride()
        tape.record(
            aten.empty_strided.default, (size, stride), {"dtype": empty.dtype, "device": "cpu"}, written=[], made=(empty,)
        )
        target = operand_of(parameter)
        assert isinstance(target, Operand)
        tape.record(aten.copy_.default, (target, Constant(lazy, lazy._version)), {}, written=[target])


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether it is dense, on the CPU, and of no class with behaviour of its own."""
    kind_of = type(parameter) in (torch.Tensor, torch.nn.Parameter)
    return kind_of and parameter.layout is torch.strided and parameter.device.type == "cpu"
