"""Random numbers in a captured step: a stream of numbered draws in place of torch's global generator.

torch's generator is mutable state, a compiled step is a pure function. While a step is captured, every random ATen op is
decomposed into one of the custom ops defined here, each with a constant *stream index*. Reading and restoring "the state of the
generator" reads and restores the index, which is what ``torch.utils.checkpoint`` needs to recompute the same dropout mask.

What an op gives is either drawn by torch before the program runs, from torch's generator (:mod:`xlatrain.bridge.host_draws`), or
in the program: then its lowering folds the index into the step's key, and the values differ from torch's for the same seed.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.fake_kernels import fake_kernel
from xlatrain.bridge.patches import patched

_LIBRARY = torch.library.Library("xlatrain", "DEF")
FILLED = {
    "uniform": "float low, float high",
    "normal": "float mean, float std",
    "log_normal": "float mean, float std",
    "cauchy": "float median, float sigma",
    "bernoulli": "float p",
    "exponential": "float lambd",
    "geometric": "float p",
    "randint": "SymInt low, SymInt high",
    "whole_range": "",
}
"""Ops that fill a tensor of a size and strides ([]: contiguous) as the methods of ``torch.Tensor`` do, by their parameters."""
for _name, _parameters in FILLED.items():
    _separator = ", " if _parameters else ""
    _LIBRARY.define(f"{_name}(SymInt[] size, SymInt[] strides, ScalarType dtype, {_parameters}{_separator}int index) -> Tensor")
_LIBRARY.define("randperm(SymInt n, ScalarType dtype, int index) -> Tensor")
_LIBRARY.define("poisson(Tensor rate, int index) -> Tensor")
_LIBRARY.define("binomial(Tensor count, Tensor prob, int index) -> Tensor")
_LIBRARY.define("gamma(Tensor concentration, int index) -> Tensor")


_MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def end_of_range(dtype: torch.dtype) -> int:
    """The exclusive upper bound of the integers that ``random_()`` draws: the dtype's whole non-negative range; for floating
    dtypes those that it holds exactly."""
    if dtype == torch.bool:
        return 2
    if dtype.is_floating_point:
        return 2 ** _MANTISSA_BITS[dtype] + 1
    return torch.iinfo(dtype).max + 1


def draws(target: Any) -> bool:
    """Whether an op of a captured graph is random; ``index``, the last argument, is then the number of its draw."""
    own = isinstance(target, torch._ops.OpOverload) and target.namespace == "xlatrain"
    return own and target._schema.arguments[-1].name == "index"


def _fake_filled(size: Sequence[int], strides: Sequence[int], dtype: torch.dtype, *_: Any) -> torch.Tensor:
    if strides:
        return torch.empty_strided(size, strides, dtype=dtype, device="cpu")
    return torch.empty(size, dtype=dtype, device="cpu")


for _name in FILLED:
    fake_kernel(_LIBRARY, _name)(_fake_filled)


@fake_kernel(_LIBRARY, "randperm")
def _fake_randperm(n: int, dtype: torch.dtype, index: int) -> torch.Tensor:
    return torch.empty((n,), dtype=dtype, device="cpu")


@fake_kernel(_LIBRARY, "poisson")
@fake_kernel(_LIBRARY, "gamma")
def _fake_like(parameter: torch.Tensor, index: int) -> torch.Tensor:
    return torch.empty_like(parameter, memory_format=torch.contiguous_format)


@fake_kernel(_LIBRARY, "binomial")
def _fake_binomial(count: torch.Tensor, prob: torch.Tensor, index: int) -> torch.Tensor:
    return torch.empty_like(count, memory_format=torch.contiguous_format)


class Move(NamedTuple):
    """A read of the state of a stream, or, with ``to``, its setting to what the read of that place among the moves gave.

    Attributes:
        index: the number that the next draw would have got.
        to: None for a read.
    """

    index: int
    to: int | None = None


class RandomStream:
    """Numbers the random draws of one captured step, 0, 1, 2, …: ``with RandomStream() as stream, virtual_rng_state(): …``

    Args:
        by_torch: whether what is drawn is to be torch's own numbers: its ops become those that torch runs on the CPU.

    Attributes:
        index: the number that the next draw gets.
        used: whether anything random was drawn.
        moves: when its state was read and set.
    """

    def __init__(self, *, by_torch: bool = False) -> None:
        self.by_torch = by_torch
        self.index = 0
        self.moves: list[Move] = []
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


_BY_TORCH: contextvars.ContextVar[bool] = contextvars.ContextVar("xlatrain_drawn_by_torch", default=False)


@contextlib.contextmanager
def drawing_by_torch(by_torch: bool) -> Iterator[None]:
    """Within the block, the numbers of functions that are captured are to be torch's own, or need not be."""
    token = _BY_TORCH.set(by_torch)
    try:
        yield
    finally:
        _BY_TORCH.reset(token)


def stream_of_capture() -> RandomStream:
    """The stream of a function that is captured now."""
    return RandomStream(by_torch=_BY_TORCH.get())


_STREAM: contextvars.ContextVar[RandomStream | None] = contextvars.ContextVar("xlatrain_random_stream", default=None)


def _stream() -> RandomStream:
    stream = _STREAM.get()
    if stream is None:
        raise RuntimeError(
            "a random op was captured without a stream; wrap the capture in `with RandomStream(), virtual_rng_state():`"
        )
    return stream


def drawn_by_torch() -> bool:
    """Whether the numbers of the step that is being captured are to be torch's own."""
    stream = _STREAM.get()
    return stream is not None and stream.by_torch


def moves() -> str:
    """How the step that is being captured has read and set the state of the generator, which no op tells."""
    stream = _STREAM.get()
    return "" if stream is None else " ".join("read" if move.to is None else str(move.to) for move in stream.moves)


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


@dataclasses.dataclass(frozen=True, eq=False)  # another one for each call: a step that keeps it stores it each time
class RngState:
    """The return value of ``torch.get_rng_state()`` inside a captured step: the position in the stream, not bytes.

    Attributes:
        index: the number of the draw that comes next.
        read: the number of the move that read it.
    """

    index: int
    read: int


def refusal(reason: str, fix: str) -> CaptureError:
    """The error for something random that a compiled step cannot do, with the user's line."""
    where = user_line(traceback.extract_stack()) or "the step"
    return CaptureError(f"{where}\n  cannot be captured: {reason}.\n  Fix: {fix}.")


def _get_rng_state() -> RngState:
    stream = _stream()
    stream.moves.append(Move(stream.index))
    return RngState(stream.index, len(stream.moves) - 1)


def _set_rng_state(new_state: Any) -> None:
    if not isinstance(new_state, RngState):
        raise refusal(
            "torch.set_rng_state takes only what torch.get_rng_state returned in the same step",
            "set the state of torch's generator outside of the step (a hook such as on_train_batch_start)",
        )
    stream = _stream()
    stream.moves.append(Move(stream.index, new_state.read))
    if not stream.by_torch:  # else numbers that are drawn again get theirs when all are known
        stream.index = new_state.index


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
