"""Whether ops compute by torch's own kernels, so that what was found of them in one run, or process, is so in another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._decomp import global_decomposition_table

_SEEN = ("Autograd", "Autocast", "FuncTorch")
"""Kernels that run above our modes, which see what these dispatch. A first ``torch.vmap`` gives torch eight of them."""
_ELSEWHERE = frozenset({"CUDA", "MPS", "XPU", "HPU", "MTIA", "PrivateUse1"})
"""Kernels of devices on which no fake tensor is."""


_found: tuple[frozenset[str], list[int], bool] | None = None


def kernels_are_torchs() -> bool:
    """Whether nobody but torch has given an op of ATen a kernel, a fake or a decomposition, as ``torch.library`` can, and no mode
    is on that would be told of ops."""
    global _found
    if torch._C._len_torch_dispatch_stack():
        return False
    sizes = [len(table) for table in global_decomposition_table.values()]  # nothing there is replaced
    if _found is None or _found[0] != torch.library._impls or _found[1] != sizes:
        impls = frozenset(torch.library._impls)
        _found = (impls, sizes, _are_torchs(impls))
    return _found[2]


def _are_torchs(impls: Iterable[str]) -> bool:
    tables: Any = global_decomposition_table.values()
    if not all(function.__module__.startswith("torch.") for table in tables for function in table.values()):
        return False
    decomposed = {op.name().replace("::", "/", 1) for table in tables for op in table}
    for key in impls:
        op, _, dispatched = key.rpartition("/")
        if not op.startswith("aten/") or dispatched.startswith(_SEEN) or dispatched in _ELSEWHERE:
            continue
        if dispatched != "Meta" or op not in decomposed:  # torch gives fakes in Python to ops of its tables alone
            return False
    return True


def implementations_are_torchs(ops: Iterable[Any]) -> bool:
    """Whether nobody but torch has given these ops a function in Python (``py_impl``)."""
    given = (one for op in ops for one in op.py_kernels.values())
    return all(str(getattr(one, "__module__", "torch.")).startswith(("torch.", "xlatrain.")) for one in given)


def told_of_torch() -> str:
    """The build of torch, and the kernels that it has for this machine."""
    return f"{torch.__version__} {torch._C._show_config()} {torch.backends.cpu.get_cpu_capability()}"
