"""Random numbers in a captured step: a stream of numbered draws in place of torch's global generator.

torch's generator is mutable state, a compiled step is a pure function. While a step is captured, every random ATen op is
decomposed into one of the custom ops defined here, each with a constant *stream index*; their lowerings fold the index into the
step's key (``keys.py``). Reading and restoring "the state of the generator" reads and restores the index, which is what
``torch.utils.checkpoint`` needs to recompute the same dropout mask.

The values differ from torch's own for the same seed (documented); their distributions do not.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.patches import patched

_LIBRARY = torch.library.Library("xlatrain", "DEF")
_LIBRARY.define("uniform(SymInt[] size, ScalarType dtype, int index) -> Tensor")
_LIBRARY.define("normal(SymInt[] size, ScalarType dtype, int index) -> Tensor")
_LIBRARY.define("randint(SymInt[] size, SymInt low, SymInt high, ScalarType dtype, int index) -> Tensor")
_LIBRARY.define("randperm(SymInt n, ScalarType dtype, int index) -> Tensor")
_LIBRARY.define("poisson(Tensor rate, int index) -> Tensor")
_LIBRARY.define("binomial(Tensor count, Tensor prob, int index) -> Tensor")
_LIBRARY.define("gamma(Tensor concentration, int index) -> Tensor")


def draws(target: Any) -> bool:
    """Whether an op of a captured graph is random; ``index``, the last argument, is then the number of its draw."""
    own = isinstance(target, torch._ops.OpOverload) and target.namespace == "xlatrain"
    return own and target._schema.arguments[-1].name == "index"


@torch.library.register_fake("xlatrain::uniform", lib=_LIBRARY)
@torch.library.register_fake("xlatrain::normal", lib=_LIBRARY)
def _fake_of_size(size: Sequence[int], dtype: torch.dtype, index: int) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="cpu")


@torch.library.register_fake("xlatrain::randint", lib=_LIBRARY)
def _fake_randint(size: Sequence[int], low: int, high: int, dtype: torch.dtype, index: int) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="cpu")


@torch.library.register_fake("xlatrain::randperm", lib=_LIBRARY)
def _fake_randperm(n: int, dtype: torch.dtype, index: int) -> torch.Tensor:
    return torch.empty((n,), dtype=dtype, device="cpu")


@torch.library.register_fake("xlatrain::poisson", lib=_LIBRARY)
@torch.library.register_fake("xlatrain::gamma", lib=_LIBRARY)
def _fake_like(parameter: torch.Tensor, index: int) -> torch.Tensor:
    return torch.empty_like(parameter, memory_format=torch.contiguous_format)


@torch.library.register_fake("xlatrain::binomial", lib=_LIBRARY)
def _fake_binomial(count: torch.Tensor, prob: torch.Tensor, index: int) -> torch.Tensor:
    return torch.empty_like(count, memory_format=torch.contiguous_format)


class RandomStream:
    """Numbers the random draws of one captured step, 0, 1, 2, …: ``with RandomStream() as stream, virtual_rng_state(): …``

    Attributes:
        index: the number that the next draw gets.
        used: whether anything random was drawn.
    """

    def __init__(self) -> None:
        self.index = 0
        self.used = False
        self._tokens: list[contextvars.Token[RandomStream | None]] = []

    def next(self) -> int:
        """Take the next number."""
        index = self.index
        self.index += 1
        self.used = True
        return index

    def __enter__(self) -> RandomStream:
        self._tokens.append(_STREAM.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _STREAM.reset(self._tokens.pop())


_STREAM: contextvars.ContextVar[RandomStream | None] = contextvars.ContextVar("xlatrain_random_stream", default=None)


def _stream() -> RandomStream:
    stream = _STREAM.get()
    if stream is None:
        raise RuntimeError(
            "a random op was captured without a stream; wrap the capture in `with RandomStream(), virtual_rng_state():`"
        )
    return stream


def next_index() -> int:
    """The stream index of the random draw that is being captured.

    Raises:
        RuntimeError: no step is being captured.
    """
    return _stream().next()


def continue_at(index: int) -> None:
    """The next draw gets the number ``index``.

    Raises:
        RuntimeError: no step is being captured.
    """
    _stream().index = index


@dataclasses.dataclass(frozen=True)
class RngState:
    """The return value of ``torch.get_rng_state()`` inside a captured step: the position in the stream, not bytes."""

    index: int


def refusal(reason: str, fix: str) -> CaptureError:
    """The error for something random that a compiled step cannot do, with the user's line."""
    where = user_line(traceback.extract_stack()) or "the step"
    return CaptureError(f"{where}\n  cannot be captured: {reason}.\n  Fix: {fix}.")


def _get_rng_state() -> RngState:
    return RngState(_stream().index)


def _set_rng_state(new_state: Any) -> None:
    if not isinstance(new_state, RngState):
        raise refusal(
            "torch.set_rng_state takes only what torch.get_rng_state returned in the same step",
            "set the state of torch's generator outside of the step (a hook such as on_train_batch_start)",
        )
    _stream().index = new_state.index


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise refusal(
            f"{name} would give every step the same random numbers",
            "seed outside of the step (seed_everything), or draw constant noise once, outside, and keep it in a buffer",
        )

    return refuse


class _Recompute:
    """A stand-in for torch's reentrant checkpoint in a capture.

    The reentrant form calls ``backward`` inside of a backward, which ``torch.autograd.grad`` does not allow. The non-reentrant
    form recomputes the same values and gives the same gradients, but for one rule of the reentrant one that is kept here: when
    no tensor argument requires a gradient, nothing inside gets one.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():
                return function(*args)
        return _checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


_checkpoint = torch.utils.checkpoint.checkpoint


@contextlib.contextmanager
def virtual_rng_state() -> Iterator[None]:
    """Within the block, torch's functions on the global generator's state act on the stream's index.

    ``get_rng_state`` and ``set_rng_state`` (so ``fork_rng`` and ``torch.utils.checkpoint``, in both modes) save and restore the
    index; ``manual_seed`` and ``seed`` are refused: they would make every step draw the same numbers.
    """
    patches = [
        (owner, name, replacement)
        for owner in (torch, torch.random)
        for name, replacement in (
            ("get_rng_state", _get_rng_state),
            ("set_rng_state", _set_rng_state),
            ("manual_seed", _refused("torch.manual_seed")),
            ("seed", _refused("torch.seed")),
        )
    ]
    patches.append((torch.utils.checkpoint, "CheckpointFunction", _Recompute))
    with patched(patches):
        yield
