"""torch's checks of a result's values that raise on the host, which a compiled program cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._library import simple_registry

_LINALG_CHECK = "aten::_linalg_check_errors"


@contextlib.contextmanager
def without_linalg_checks() -> Iterator[None]:
    """Within the block ``torch.linalg``'s check for singular matrices counts as an op without effect, and drops out of the graph.

    Newer versions of torch (2.13) else thread a token through the graph to keep it. The result then is inf or NaN.
    """
    entry = simple_registry.singleton.find(_LINALG_CHECK)
    holder = getattr(entry, "effect", None)  # absent in torch 2.11
    effect = holder.effect if holder is not None else None
    if holder is None or effect is None:
        yield
        return
    holder.register(None)
    try:
        yield
    finally:
        holder.register(effect)
