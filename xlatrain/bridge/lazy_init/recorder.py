"""Writes tensor ops on the tape instead of computing them."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from xlatrain.bridge.inference_mode import without_inference_mode
from xlatrain.bridge.lazy_init.evaluate import host_values
from xlatrain.bridge.lazy_init.seeding import followed_seeds
from xlatrain.bridge.lazy_init.tape import Constant, Draw, Operand, Tape, operand_of
from xlatrain.bridge.lazy_init.trunc_normal import recorded_trunc_normal
from xlatrain.bridge.patches import patched
from xlatrain.bridge.tensors.host_copies import storageless
from xlatrain.bridge.tensors.lazy import unread_lazy

aten = torch.ops.aten
_T: Any = torch.Tensor


class Kind(enum.Enum):
    """The effect of an op on memory."""

    VIEW = enum.auto()
    METADATA = enum.auto()
    WRITES = enum.auto()
    MAKES = enum.auto()


@functools.cache
def _kind(func: torch._ops.OpOverload) -> Kind:
    if torch.Tag.inplace_view in func.tags or func in (aten.set_.source_Tensor, aten.set_.source_Storage_storage_offset):
        return Kind.METADATA
    if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
        return Kind.WRITES
    if any(r.alias_info is not None for r in func._schema.returns):
        return Kind.VIEW
    return Kind.MAKES


@functools.cache
def _is_random(func: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


_UNINITIALISED = frozenset({
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.empty_permuted.default,
    aten.new_empty.default, aten.new_empty_strided.default,
})  # fmt: skip


def _depending_on_values() -> tuple[type[Exception], ...]:
    """The exceptions that a fake tensor raises where an op's shapes depend on values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode, UnsupportedOperatorException


# Only the shape of the argument matters: its values must not be computed for it.
_LIKE = {aten.rand_like.default: aten.rand.default, aten.randn_like.default: aten.randn.default}
_SHAPED_LIKE = _UNINITIALISED | set(_LIKE)


class RecordingMode(TorchDispatchMode):
    """The mode below autograd: it sees every ATen op on CPU tensors without values, and every op that makes a tensor from none.

    Args:
        tape: what it is written on.
        settle: gives a tensor's storage memory and values.
    """

    def __init__(self, tape: Tape, settle: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.tape = tape
        self._settle = settle
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        operands = {id(tensor): operand for tensor in tensors if (operand := operand_of(tensor)) is not None}
        if not operands and not self._starts(func, tensors, kwargs):
            return func(*args, **kwargs)
        kind = _kind(func)
        if kind is Kind.METADATA:
            if func is aten.resize_.default:  # torch gives a storage more memory, and this one has none
                self._settle(args[0])
            return func(*args, **kwargs)
        if changed := _changed_beside_results(func, args, kwargs):
            return self._at_once(func, args, kwargs, operands, changed)
        if kind is Kind.VIEW:
            return self._view(func, args, kwargs, operands)
        if _own_generator(args, kwargs) is not None or _draws_by_values(func, args, kwargs):
            return self._drawn_at_once(func, args, kwargs, operands)
        if kind is Kind.WRITES:
            return self._write(func, args, kwargs, operands)
        return self._make(func, args, kwargs, operands)

    def _starts(self, func: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        """Whether an op on no tensor of the tape makes a new one for it: a factory, or a random op."""
        if _kind(func) is not Kind.MAKES or kwargs.get("layout") not in (None, torch.strided):
            return False
        device = kwargs.get("device")
        if tensors and device is not None and func in _SHAPED_LIKE and all(tensor.device.type == "meta" for tensor in tensors):
            return torch.device(device).type == "cpu"  # module.to_empty(device="cpu") of one made on the meta device
        if tensors and (not _is_random(func) or any(tensor.device.type != "cpu" for tensor in tensors)):
            return False
        return torch.device(device or "cpu").type == "cpu" if not tensors or device is not None else True

    # -- what may happen to an op ----------------------------------------------------------------------------------

    def _view(self, func: Any, args: Any, kwargs: Any, operands: dict[int, Operand]) -> Any:
        """Views of storageless tensors are real views; the tape only notes how they came about."""
        result = func(*args, **kwargs)
        if len(args) and isinstance(args[0], torch.Tensor) and id(args[0]) in operands:
            for output, view in enumerate(pytree.tree_leaves(result)):
                self.tape.derive(operands[id(args[0])], view, func, args[1:], kwargs, output)
        return result

    def _write(self, func: Any, args: Any, kwargs: Any, operands: dict[int, Operand]) -> Any:
        targets = _written(func, args, kwargs)
        if any(id(target) not in operands for target in targets):
            return self._write_to_memory(func, args, kwargs, operands, targets)
        if any(isinstance(leaf, torch.Tensor) and leaf is not targets[0] for leaf in pytree.tree_leaves((args, kwargs))):
            self._check_shapes(func, args, kwargs)
        draw = self._draw(func, args, kwargs, targets[0])
        self._record(func, args, kwargs, operands, written=[operands[id(target)] for target in targets], draw=draw)
        return _returned(func, targets)

    def _write_to_memory(
        self, func: Any, args: Any, kwargs: Any, operands: dict[int, Operand], targets: list[torch.Tensor]
    ) -> Any:
        """A tensor that has memory takes the values now."""
        if any(id(target) in operands for target in targets):
            raise NotImplementedError(
                f"{func} writes to a tensor made in the deferred-init block and to one made outside of it at once; make both "
                "inside, or both outside"
            )
        args, kwargs = self._with_values(args, kwargs)
        func(*args, **kwargs)
        return _returned(func, targets)

    def _make(self, func: Any, args: Any, kwargs: Any, operands: dict[int, Operand]) -> Any:
        try:
            fakes = self._shapes(func, args, kwargs)
        except _depending_on_values():
            args, kwargs = self._with_values(args, kwargs)
            return func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(fakes)
        if not any(isinstance(leaf, torch.Tensor) and leaf.numel() for leaf in leaves):
            args, kwargs = self._with_values(args, kwargs)
            return func(*args, **kwargs)
        made = [storageless(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if func in _UNINITIALISED:
            (tensor,) = made
            func, args, operands = aten.empty_strided.default, (tuple(tensor.shape), tensor.stride()), {}
            kwargs = {"dtype": tensor.dtype, "device": "cpu"}
        elif func in _LIKE:
            (tensor,) = made
            func, args, operands = _LIKE[func], (tuple(tensor.shape),), {}
            kwargs = {"dtype": tensor.dtype, "device": "cpu"}
        hollows = tuple(one if isinstance(one, torch.Tensor) else None for one in made)
        draw = self._draw(func, args, kwargs, next(one for one in hollows if one is not None))
        self._record(func, args, kwargs, operands, written=[], made=hollows, draw=draw)
        return pytree.tree_unflatten(made, spec)

    def _check_shapes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise torch's errors about shapes in the user's line, when the op is recorded, not when values are needed."""
        with contextlib.suppress(*_depending_on_values()):
            self._shapes(func, args, kwargs)

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The op's result as fake tensors."""
        with self._fake:

            def fake(tensor: torch.Tensor) -> torch.Tensor:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

            args, kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
            return func(*args, **kwargs)

    def _at_once(self, func: Any, args: Any, kwargs: Any, operands: dict[int, Operand], changed: list[torch.Tensor]) -> Any:
        """An op that changes some tensors and makes others is computed here and now. What follows begins with its results: a
        constructor that runs its network once, to see a shape, computes each layer once, not for each of its statistics."""
        copies: dict[int, torch.Tensor] = {}

        def values(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in operands:
                return tensor
            if id(tensor) not in copies:
                copies[id(tensor)] = host_values(operands[id(tensor)]).clone()
            return copies[id(tensor)]

        args, kwargs = pytree.tree_map_only(torch.Tensor, values, (args, kwargs))
        results = func(*args, **kwargs)
        for target in changed:
            if (operand := operands.get(id(target))) is not None:
                written = {id(target): operand}
                self._record(aten.copy_.default, (target, copies[id(target)]), {}, written, written=[operand])
        return results

    def _draw(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> Draw | None:
        """The record of what an op draws into ``target``; None where it draws nothing."""
        if not _is_random(func):
            return None

        def at_once() -> None:
            memory = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
            there, named = pytree.tree_map(lambda leaf: memory if leaf is target else leaf, (args, kwargs))
            func(*there, **named)

        return self.tape.draw(target.nbytes, at_once)

    def _drawn_at_once(self, func: Any, args: Any, kwargs: Any, operands: dict[int, Operand]) -> Any:
        """The user's own generator decides, or values do: drawn now by torch, and kept until the parameter is made."""
        if _kind(func) is not Kind.WRITES:
            args, kwargs = self._with_values(args, kwargs)
            return func(*args, **kwargs)
        (target,) = _written(func, args, kwargs)
        values, values_kwargs = self._with_values(args, kwargs)
        drawn = func(*values, **values_kwargs)
        if id(target) not in operands:
            return target.copy_(drawn)
        self._record(aten.copy_.default, (target, drawn), {}, operands, written=[operands[id(target)]])
        return target

    # -- the tape --------------------------------------------------------------------------------------------------

    def _record(self, func: Any, args: Any, kwargs: Any, operands: dict[int, Operand], **what: Any) -> None:
        def operand_or_constant(leaf: torch.Tensor) -> Operand | Constant:
            return operands.get(id(leaf)) or _constant(leaf)

        args, kwargs = pytree.tree_map_only(torch.Tensor, operand_or_constant, (tuple(args), kwargs))
        self.tape.record(func, args, kwargs, **what)

    def _with_values(self, args: Any, kwargs: Any) -> Any:
        """The arguments with a host copy of each tensor of the tape."""

        def values(tensor: torch.Tensor) -> torch.Tensor:
            operand = operand_of(tensor)
            return tensor if operand is None else host_values(operand)

        return pytree.tree_map_only(torch.Tensor, values, (args, kwargs))


_SMALL = 1 << 20  # bytes up to which a constant is copied, so that later changes in place do not matter


def _constant(tensor: torch.Tensor) -> Constant:
    """A tensor with values as a constant: small ones are copied, large ones taken by reference with their version."""
    if unread_lazy(tensor) is None and tensor.numel() * tensor.element_size() <= _SMALL:
        tensor = tensor.detach().clone()
    return Constant(tensor, tensor._version)


def _own_generator(args: Any, kwargs: Any) -> torch.Generator | None:
    leaves = pytree.tree_leaves((args, kwargs))
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Generator) and leaf is not torch.default_generator), None)


def _draws_by_values(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether torch's generator and the values of a tensor decide what an op draws, as in ``torch.bernoulli(p)``."""
    if not _is_random(func) or func in _LIKE:
        return False
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    written = _written(func, args, kwargs)
    return any(all(tensor is not one for one in written) for tensor in tensors)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that the op changes in place."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        found.extend(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return found


# Their schemas do not say that they change the running statistics.
_CHANGES_STATISTICS = frozenset({aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default})


def _changed_beside_results(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an op changes besides returning others; of other ops none."""
    if func in _CHANGES_STATISTICS:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        statistics = (given["running_mean"], given["running_var"]) if given["training"] else ()
        return [tensor for tensor in statistics if tensor is not None]
    if all(result.alias_info is not None for result in func._schema.returns):
        return []
    return _written(func, args, kwargs)


def _returned(func: Any, targets: list[torch.Tensor]) -> Any:
    """The return value of an op that only writes to ``targets``."""
    returns = func._schema.returns
    if not returns:
        return None
    return targets[0] if len(returns) == 1 else tuple(targets)


class ReadingMode(TorchFunctionMode):
    """The mode above autograd: it sees functions that read a tensor's memory by no op, and initialisers that look at values.

    Args:
        settle: gives a tensor's storage memory and values.
    """

    def __init__(self, settle: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._settle = settle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _T.data_ptr and (operand := operand_of(args[0])) is not None:
            return operand.storage.handle._cdata + operand.geometry.offset * args[0].element_size()
        if func is _T.__deepcopy__ and operand_of(args[0]) is not None and args[0].is_leaf:
            return _copied(*args)
        if func in _SHARES_MEMORY:
            self._settle(args[0])
        elif func in _READS_MEMORY:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._values, (args, kwargs))
        return func(*args, **kwargs)

    def _values(self, tensor: torch.Tensor) -> torch.Tensor:
        operand = operand_of(tensor)
        return tensor if operand is None else host_values(operand)


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A buffer of a module that is copied: torch would copy its storage, which has no memory."""
    made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    for name, value in tensor.__dict__.items():
        setattr(made, name, copy.deepcopy(value, memo))
    memo[id(tensor)] = made
    return made


_SHARES_MEMORY = frozenset(
    getattr(_T, name) for name in ("numpy", "__array__", "__dlpack__", "share_memory_", "__reduce_ex__") if hasattr(_T, name)
)
_READS_MEMORY = frozenset(
    [_T.tolist, _T.__repr__, _T.__format__, _T.new_tensor, torch.tensor, torch.as_tensor, torch.asarray, _T.item, _T.__bool__]
)


@contextmanager
def _pickled_with_values(settle: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """``torch.save`` and ``pickle`` in a constructor write values: torch reads the storage there, behind every mode's back."""
    original = _T._reduce_ex_internal

    @functools.wraps(original)
    def reduced(self: torch.Tensor, protocol: int) -> Any:
        settle(self)
        return original(self, protocol)

    with patched([(_T, "_reduce_ex_internal", reduced)]):
        yield


@contextmanager
def recording(tape: Tape, settle: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within the block, ops are written on ``tape``."""
    with ExitStack() as stack:
        stack.enter_context(without_inference_mode())
        stack.enter_context(followed_seeds(tape))
        stack.enter_context(recorded_trunc_normal(lambda tensor: operand_of(tensor) is None or tape.is_torchs(tensor.nbytes)))
        stack.enter_context(_pickled_with_values(settle))
        stack.enter_context(RecordingMode(tape, settle))
        stack.enter_context(ReadingMode(settle))
        yield
