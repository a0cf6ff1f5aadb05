"""``torch.manual_seed`` and the state of torch's generator inside a deferred-init block.

Draws are named by the parameter that they end up in. After an explicit ``manual_seed`` they are named by that seed and their
number instead, so that a constructor that seeds its own noise makes the same noise every time, as it does in torch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from xlatrain.bridge.lazy_init.tape import Tape
from xlatrain.bridge.patches import patched

_MARK = "_xlatrain_stream"


@contextlib.contextmanager
def followed_seeds(tape: Tape) -> Iterator[None]:
    """Within the block, torch's seeding functions act on ``tape`` too."""
    stream = tape.stream
    originals = {name: getattr(torch, name) for name in ("manual_seed", "get_rng_state", "set_rng_state")}

    def own_seed_first() -> None:
        """Make sure that the tape has its own seed, which must not come from what the constructor does to torch's generator."""
        assert tape.seed is not None

    def manual_seed(seed: int) -> torch.Generator:
        own_seed_first()
        stream.seed, stream.count = str(int(seed)), 0
        return originals["manual_seed"](seed)

    def get_rng_state() -> torch.Tensor:
        own_seed_first()
        state = originals["get_rng_state"]()
        setattr(state, _MARK, (stream.seed, stream.count))
        return state

    def set_rng_state(new_state: torch.Tensor) -> None:
        own_seed_first()
        originals["set_rng_state"](new_state)
        bytes_of = hashlib.sha256(new_state.numpy().tobytes()).hexdigest
        stream.seed, stream.count = getattr(new_state, _MARK, None) or (bytes_of(), 0)

    replacements: dict[str, Any] = {
        "manual_seed": manual_seed, "get_rng_state": get_rng_state, "set_rng_state": set_rng_state,
    }  # fmt: skip
    with patched((owner, name, one) for owner in (torch, torch.random) for name, one in replacements.items()):
        yield
