"""Functions that a captured step calls for their effect on the host, or to get values: ``print``, ``.item()``, ``.numpy()``.

They are recorded (:mod:`torch_compat.step.host.calls`) and called after each step.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch._tensor_str import _add_suffixes
from torch.utils.data import DataLoader

import torch_compat
import xlatrain
from torch_compat.core.module_logging import LoggingMembers
from torch_compat.step.host.calls import HostCalls, is_traced
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.known import Known
from torch_compat.step.host.percent import CONVERSION
from torch_compat.step.host.said import recording
from torch_compat.step.host.streams import RecordedStream, is_asked_by_user
from xlatrain.bridge.capture.generation.uncut import Uncut
from xlatrain.bridge.errors import is_user_file, user_line
from xlatrain.bridge.patches import patched
from xlatrain.bridge.tensors.dtypes import numpy_dtype

_LOGGING = ("debug", "info", "warning", "error", "critical", "log", "exception")


@contextlib.contextmanager
def recording_host_functions(calls: HostCalls) -> Iterator[None]:
    """Record calls by the user's code of these functions in the block."""
    functions: list[tuple[Any, str, Any]] = [(builtins, "print", _recorded(calls, builtins.print, "print", _as_texts))]
    functions.append((LoggingMembers, "print", _of_module(calls, LoggingMembers.print)))
    streams = {name: RecordedStream(name, calls) for name in ("stdout", "stderr") if getattr(sys, name) is not None}
    functions += [(sys, name, stream) for name, stream in streams.items()]
    functions += [(owner, "open", _reading_only(calls, owner.open)) for owner in (builtins, io)]
    for name in _LOGGING:
        logged = functools.partial(_logged, before=2 if name == "log" else 1)
        functions.append((logging.Logger, name, _recorded(calls, getattr(logging.Logger, name), f"logging.{name}", logged)))
    functions.append((DataLoader, "__iter__", _beginning(calls)))
    if (wandb := sys.modules.get("wandb")) is not None and callable(getattr(wandb, "log", None)):
        functions.append((wandb, "log", _recorded(calls, wandb.log, "wandb.log")))
    if (tokenizers := sys.modules.get("transformers.tokenization_utils_base")) is not None:
        kind: Any = tokenizers.PreTrainedTokenizerBase
        functions += [(kind, name, _decoding(calls, getattr(kind, name))) for name in ("decode", "batch_decode")]
    for name, method in _tensor_methods(calls).items():
        functions.append((FakeTensor, name, _outside_of_torch(method, getattr(FakeTensor, name))))  # what a step computes with,
        functions.append((FunctionalTensor, name, method))  # and where it could not be recorded
    with patched(functions):
        try:
            yield
        finally:
            for stream in streams.values():
                stream.end()


def _recorded(
    calls: HostCalls, function: Callable[..., Any], text: str, takes: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """``function``, recorded where the user's own code calls it; a library's call while capturing is a library's business.

    Args:
        takes: what it is given in place of its positional arguments.
    """

    thread = threading.get_ident()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread and is_asked_by_user(sys._getframe(1)):
            calls.record(function, args if takes is None else takes(args), kwargs, text=text)
        else:
            function(*args, **kwargs)

    return recording(call)


def _as_texts(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of ``print``: tensors, and containers of some, as their texts, which tell their history."""
    return tuple(str(one) if _holds_tensor(one) else one for one in args)


def _holds_tensor(value: Any) -> bool:
    return any(map(is_traced, pytree.tree_leaves(value)))


def _logged(args: tuple[Any, ...], before: int) -> tuple[Any, ...]:
    """Arguments of a logger's method, its message after ``before``; tensors that ``%s`` or ``%r`` shows as their texts."""
    message, values = args[before] if len(args) > before else None, args[before + 1 :]
    if type(message) is not str or not any(map(_holds_tensor, values)):
        return args
    found = [one for one in CONVERSION.finditer(message) if one["kind"] != "%"]
    if len(values) == 1 and type(values[0]) is dict:  # "%(loss)s"
        names = {one["name"] for one in found if one["kind"] == "s"}
        texts = {name: str(one) if name in names and _holds_tensor(one) else one for name, one in values[0].items()}
        return (*args[:before], message, texts)
    if len(found) != len(values) or any("*" in one["form"] for one in found):
        return args
    shown = [one["kind"] in "sr" and _holds_tensor(value) for one, value in zip(found, values, strict=True)]
    for one, is_text in reversed(list(zip(found, shown, strict=True))):
        if is_text:  # a text is shown as it is by %s only
            message = f"{message[: one.end() - 1]}s{message[one.end() :]}"
    texts = (str(value) if is_text else value for value, is_text in zip(values, shown, strict=True))
    return (*args[:before], message, *texts)


def _of_module(calls: HostCalls, function: Callable[..., Any]) -> Callable[..., Any]:
    """``self.print``, which prints above a progress bar."""

    @functools.wraps(function)
    def call(module: Any, *args: Any, **kwargs: Any) -> None:
        calls.record(functools.partial(function, module), _as_texts(args), kwargs, text="self.print")

    return recording(call)


def _decoding(calls: HostCalls, decode: Callable[..., Any]) -> Callable[..., Any]:
    """A tokenizer's ``decode``, recorded where it is given tokens of the step."""

    @functools.wraps(decode)
    def call(tokenizer: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_traced(tokens) and type(tokens) is not HostFuture:
            return decode(tokenizer, tokens, *args, **kwargs)
        slot = calls.record(functools.partial(decode, tokenizer), (tokens, *args), kwargs, text=decode.__name__, pure=True)
        if type(tokens) is HostFuture:
            return HostFuture(calls, slot)
        return HostFuture(calls, slot, like=[""] * len(_rows(tokens)) if tokens.ndim == 2 else "")

    return call


def _rows(tensor: Any) -> range:
    """The numbers of a tensor's rows, without a look at how many columns there are."""
    return range(len(tensor.whole if isinstance(tensor, Uncut) else tensor))


def _beginning(calls: HostCalls) -> Callable[..., Any]:
    """``DataLoader.__iter__``, which draws a seed from torch's generator on the host."""

    def begin(loader: DataLoader[Any]) -> NoReturn:
        raise calls.refuse(
            "it begins a pass over a DataLoader, which may give other batches each time",
            "begin it in a hook (self.batches = iter(loader) in on_train_epoch_start), and take next(self.batches) in the step",
        )

    return begin


def _reading_only(calls: HostCalls, function: Callable[..., Any]) -> Callable[..., Any]:
    """``open``, refused to the user's own code where it writes."""
    thread = threading.get_ident()

    @functools.wraps(function)
    def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and set(mode) & set("wax+"):
            frame: Any = sys._getframe(1)
            while frame.f_code.co_filename in _BETWEEN:
                frame = frame.f_back
            if is_user_file(frame.f_code.co_filename):
                raise calls.refuse("it writes to a file", "write it in a hook such as on_train_batch_end")
        return function(file, mode, *args, **kwargs)

    return call


_CALLED = f"{Path(__file__).parents[1]}/guards/called_functions.py"
_BETWEEN = frozenset({_CALLED, *(vars(sys.modules[kind.__module__])["__file__"] for kind in (Path, type(Path())))})
"""Files of what the user's own code may call to have ``open`` called."""


def _outside_of_torch(method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, but ``original`` where torch itself calls it: a graph is made of fake tensors too.

    Torch also asks for the texts of what we have given it, for errors that we catch.
    """

    @functools.wraps(original)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own: Any = sys._getframe().f_code
        frame: Any = sys._getframe(1)
        while frame.f_code is own or frame.f_code.co_filename == _CALLED:  # a capture's around it, or a step's call
            frame = frame.f_back
        file = frame.f_code.co_filename
        inside = file.startswith(_INSIDE_TORCH) or (method.__name__ == _REPR and file.startswith(_OURS) and file != __file__)
        return (original if inside else method)(tensor, *args, **kwargs)

    return call


_REPR = "__repr__"
_OURS = tuple(f"{Path(root).parent}/" for root in (vars(torch_compat)["__file__"], vars(xlatrain)["__file__"]))
_INSIDE_TORCH = tuple(f"{Path(torch.__file__).parent / name}" for name in ("_", "fx", "utils", "autograd"))


def _tensor_methods(calls: HostCalls) -> dict[str, Callable[..., Any]]:
    """Methods of a traced tensor that give host values."""

    def item(tensor: torch.Tensor) -> HostFuture:
        if tensor.numel() != 1:
            raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
        known = _known(calls, tensor, _item)
        place = calls.record(_item, (tensor,), text="item", pure=known is not None)
        return HostFuture(calls, place, tensor.detach().clone().reshape(()), _number(tensor.dtype), known)

    def numpy(tensor: torch.Tensor, *, force: bool = False) -> HostFuture:
        if tensor.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        like = (
            None if isinstance(tensor, Uncut) else np.broadcast_to(np.zeros((), numpy_dtype(tensor.dtype)), tuple(tensor.shape))
        )
        known = _known(calls, tensor, _numpy)
        slot = calls.record(_numpy, (tensor,), text="numpy", pure=known is not None)
        calls.memory.note(tensor, calls.calls[slot.index].where or "the step", call=slot.index)
        return HostFuture(calls, slot, like=like, known=known)

    def tolist(tensor: torch.Tensor) -> Any:
        if tensor.ndim == 0:
            return item(tensor)
        if isinstance(tensor, Uncut):
            like = [None for _ in _rows(tensor)]
        else:
            like = np.broadcast_to(np.zeros((), numpy_dtype(tensor.dtype)), tuple(tensor.shape)).tolist()
        known = _known(calls, tensor, _tolist)
        return HostFuture(calls, calls.record(_tolist, (tensor,), text="tolist", pure=known is not None), like=like, known=known)

    def text(tensor: torch.Tensor, specification: str = "") -> str:
        if tensor.ndim == 0 and not isinstance(tensor, torch.nn.Parameter):
            return calls.marker(item(tensor).slot(), specification)
        return object.__format__(tensor, specification)  # which takes none

    def array(tensor: torch.Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
        if _known(calls, tensor, _numpy) is not None:
            made = np.array(numpy(tensor, force=not tensor.requires_grad), dtype)
            calls.memory.note(tensor, user_line(traceback.extract_stack()) or "the step", made=made)
            return made
        raise calls.refuse(
            "a tensor of the step, which has no value yet, is converted to numpy (np.asarray, a numpy or sklearn function)",
            "use torch ops in the step, or convert in a hook such as on_train_batch_end",
        )

    def truth(tensor: torch.Tensor) -> bool:
        return bool(item(tensor))

    def __repr__(tensor: torch.Tensor, **_: Any) -> str:
        return _shown(calls, tensor, may_be_dropped=True)  # torch, or who catches its errors, may be who asks

    texts = {"__format__": text, "__str__": lambda tensor: _shown(calls, tensor), _REPR: __repr__}
    return {"__bool__": truth, "item": item, "numpy": numpy, "tolist": tolist, "__array__": array, **texts}


def _shown(calls: HostCalls, tensor: torch.Tensor, *, may_be_dropped: bool = False) -> str:
    """The text that stands for ``str(tensor)`` until its values are there."""
    grad_fn = tensor.grad_fn
    history = (
        f"grad_fn=<{type(grad_fn).__name__}>" if grad_fn is not None else "requires_grad=True" if tensor.requires_grad else ""
    )
    before = "Parameter containing:\n" if isinstance(tensor, torch.nn.Parameter) else ""
    slot = calls.record(_text, (tensor, history, before), text="str", pure=True)
    return calls.marker(slot, None, may_be_dropped=may_be_dropped)


def _text(tensor: torch.Tensor, history: str, before: str) -> str:
    """The text of a tensor of a finished step, with the history that it had there."""
    text = str(tensor)
    if history:
        inner = text.removeprefix(_BEGIN).removesuffix(")")
        text = _BEGIN + _add_suffixes(inner, [history], len(_BEGIN), force_newline=False)
    return before + text


_BEGIN = "tensor("


def _known(calls: HostCalls, tensor: torch.Tensor, read: Callable[[torch.Tensor], Any]) -> Known | None:
    """The value that ``read`` gives of a tensor, where it is known before the step."""
    if calls.asked is None or isinstance(tensor, Uncut):
        return None
    what = read.__name__.removeprefix("_")
    found = calls.asked.value_of(tensor, read, what)
    if found is not None:
        return Known(*found)
    name = calls.asked.drawn(tensor, read, what)
    if name is None:
        return None
    return Known(lambda host_values: host_values.numbers[name], name, of_state=True, offset=(name, 0), drawn=True)


def _item(tensor: torch.Tensor) -> Any:
    return tensor.item()


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def _tolist(tensor: torch.Tensor) -> Any:
    return tensor.tolist()


def _number(dtype: torch.dtype) -> Any:
    """An example number of the type that ``.item()`` gives."""
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return 0j
    return 0.0 if dtype.is_floating_point else 0
