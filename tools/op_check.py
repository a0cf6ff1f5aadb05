"""Checks of ops of PyTorch's OpInfo database: capture, lowering and ``jax.jit``, forward and gradient, against torch itself."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils._pytree as pytree

from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.errors import BridgeError, LoweringError
from xlatrain.bridge.lower.index_checks import IndexFindings, finding, index_checks
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.patches import patched
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.bridge.tensors.host import as_numpy

PASSES, REFUSED, WRONG, ERROR, SKIPPED = "passes", "refused", "WRONG", "error", "skipped"
"""Outcomes of an op. ``refused``: a BridgeError that says why; ``error``: any other exception, where torch itself has none."""

_SEVERITY = (SKIPPED, PASSES, REFUSED, ERROR, WRONG)

# (rtol, atol as a multiple of the largest reference value)
_TOLERANCE = {
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.bfloat16: (2e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
}
_DOUBLE = {
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
}

# Their values are whatever the memory held.
_UNINITIALISED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")

# Where elements are equal, torch leaves open which of their indices it gives (and which of them gets the gradient).
_ANY_OF_EQUALS = ("argsort", "kthvalue", "median", "mode", "msort", "nanmedian", "sort", "topk")


@dataclasses.dataclass
class OpResult:
    """The outcome for an op of the database with one dtype.

    Attributes:
        name: the op's name, its variant after a dot.
        dtype: the dtype of the samples.
        outcome: the worst outcome over its samples.
        samples: how many samples were run and compared.
        refused: how many of them were refused.
        random: True where values are random or uninitialised, so that only shapes and dtypes are compared.
        gradients: True where gradients were compared too.
        reason: the first message that goes with the outcome.
    """

    name: str
    dtype: torch.dtype
    outcome: str = SKIPPED
    samples: int = 0
    refused: int = 0
    random: bool = False
    gradients: bool = False
    reason: str = ""

    def add(self, outcome: str, reason: str = "") -> None:
        self.samples += outcome != SKIPPED
        self.refused += outcome == REFUSED
        if _SEVERITY.index(outcome) > _SEVERITY.index(self.outcome):
            self.outcome, self.reason = outcome, reason


def op_database() -> list[Any]:
    """PyTorch's OpInfos, sorted by name; ops that only exist on CUDA (jiterator) are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return sorted((op for op in op_db if not op.name.startswith("jiterator")), key=op_name)


def op_name(op: Any) -> str:
    """The op's name with its variant: ``"sum"``, ``"std.unbiased"``."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def check_op(op: Any, dtype: torch.dtype, max_samples: int = 3) -> OpResult:
    """Run up to ``max_samples`` of the op's sample inputs, spread over all of them, through the bridge and through torch."""
    result = OpResult(op_name(op), dtype)
    if dtype not in op.dtypes:
        result.reason = f"torch has no {dtype} version on CPU"
        return result
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    with _quiet():
        samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), 256))
        for sample in _spread(samples, max_samples):
            _check_sample(op, sample, differentiable, result)
    return result


def _spread(samples: Sequence[Any], count: int) -> list[Any]:
    """``count`` of the samples, evenly spaced, the first included."""
    if len(samples) <= count:
        return list(samples)
    return [samples[round(i * (len(samples) - 1) / max(count - 1, 1))] for i in range(count)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Call:
    """A sample as a function of its tensors that gives outputs and, where it can, gradients with fixed cotangents."""

    def __init__(self, op: Any, sample: Any, differentiable: bool) -> None:
        self.op = op
        self.process = sample.output_process_fn_grad
        self.by_name = op.op in (torch.cov, torch.corrcoef, torch.nn.functional.gaussian_nll_loss)
        self.differentiable = differentiable
        self.leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [self.leaves[i].detach().clone(memory_format=torch.contiguous_format) for i in self.places]
        self.wants_grad = [bool(self.leaves[i].requires_grad) for i in self.places]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        inputs = [t.detach().requires_grad_() if grad else t for t, grad in zip(tensors, self.wants_grad, strict=True)]
        leaves = list(self.leaves)
        for place, tensor, grad in zip(self.places, inputs, self.wants_grad, strict=True):
            leaves[place] = tensor.clone() if grad else tensor  # ops that write to their input may
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with _without_seeding():
            value = self.process(self._function()(first, *args, **kwargs))
        outputs = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        return outputs, self._gradients(outputs, inputs)

    def _function(self) -> Callable[..., Any]:
        """The function that a user calls by the op's name: the database keeps the function itself, which capture may replace."""
        return operator.attrgetter(self.op.name)(torch) if self.by_name else self.op

    def _gradients(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        sources = [out for out in outputs if out.requires_grad]
        targets = [tensor for tensor in inputs if tensor.requires_grad]
        if not (self.differentiable and sources and targets):
            return []
        gradients = torch.autograd.grad(sources, targets, [_cotangent(out) for out in sources], allow_unused=True)
        return [
            torch.zeros_like(t) if g is not None and g._is_zerotensor() else g for g, t in zip(gradients, targets, strict=True)
        ]


@contextlib.contextmanager
def _without_seeding() -> Iterator[None]:
    """The database seeds torch around its random ops, which a captured step must not do."""
    with patched([(torch, "manual_seed", lambda seed: torch.default_generator)]):
        yield


def _cotangent(out: torch.Tensor) -> torch.Tensor:
    """Numbers from 0.5 to 1.5 that differ between neighbours, made of exact arithmetic so that capture needs no input."""
    ramp = torch.arange(out.numel(), dtype=torch.float32).reshape(out.shape)
    return (0.5 + torch.remainder(ramp * 5, 16) / 16).to(out.dtype)


def _check_sample(op: Any, sample: Any, differentiable: bool, result: OpResult) -> None:
    if any(isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided for leaf in _leaves(sample)):
        result.add(REFUSED, "sparse tensors: the bridge computes dense ones")
        return
    call = _Call(op, sample, differentiable)
    try:
        expected = call(call.tensors)
    except Exception as error:  # samples that torch itself does not compute
        result.add(SKIPPED, f"torch raises {type(error).__name__}")
        return
    try:
        actual, random = _through_bridge(call)
    except BridgeError as error:
        crashed = isinstance(error, LoweringError) and error.__cause__ is not None
        result.add(ERROR if crashed else REFUSED, _first_words(error))
        return
    except Exception as error:  # that is what the report is about
        result.add(ERROR, f"{type(error).__name__}: {_first_words(error)}")
        return
    random |= op.name in _UNINITIALISED
    result.random |= random
    result.gradients |= bool(expected[1])
    difference = _difference(call, expected, actual, shapes_only=random)
    result.add(WRONG if difference else PASSES, difference or "")


def _leaves(sample: Any) -> list[Any]:
    return pytree.tree_leaves((sample.input, sample.args, sample.kwargs))


def _first_words(error: Exception) -> str:
    """The message on one line, shortened to its reason."""
    text = " ".join(str(error).split())
    if isinstance(error, LoweringError) and "without a JAX lowering" in text:
        return f"no lowering: {', '.join(dict.fromkeys(re.findall(r'[a-z_]+[.][a-zA-Z0-9_]+[.][a-zA-Z_0-9]+(?= [(])', text)))}"
    text = text.rpartition(" cannot be captured: ")[2].split(" Fix: ")[0]  # before it is the line of this file that calls the op
    return text if len(text) <= 200 else f"{text[:200]}…"


_AS_FOR_USERS = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
"""Options of XLA:CPU: its defaults, whatever ``XLA_FLAGS`` says (`tests/compiling.py`)."""


def _through_bridge(call: _Call) -> tuple[Any, bool]:
    """The call's result with numpy arrays as its tensors, and whether random numbers were drawn."""
    with contextlib.redirect_stderr(None):
        captured = capture(call, call.tensors)
    run, checks = lower(captured, platform=jax.default_backend()), index_checks(captured)

    def checked(arrays: list[Any], key: jax.Array) -> tuple[list[Any], list[jax.Array]]:
        findings = IndexFindings(checks)
        return run(arrays, key, findings), findings.packed()[0]

    arrays = [as_numpy(t).astype(jax_dtype(t.dtype)) for t in call.tensors]
    options = _AS_FOR_USERS if jax.default_backend() == "cpu" else None
    outputs, found = jax.jit(checked, compiler_options=options)(arrays, jax.random.key(0))
    assert not found or finding(checks, np.asarray(found)) is None, "torch takes these indices"
    for out, spec in zip(outputs, captured.outputs, strict=True):
        assert out.dtype == jax_dtype(spec.dtype), f"{out.dtype} instead of {spec}"
    return captured.unflatten(list(zip(outputs, captured.outputs, strict=True))), captured.uses_random


def _difference(call: _Call, expected: Any, actual: Any, *, shapes_only: bool) -> str | None:
    """A description of how a result differs from torch's, or None.

    Where float32 rounding alone may explain the difference, torch's own error decides.
    """
    names = [f"output {i}" for i in range(len(expected[0]))] + [f"gradient {i}" for i in range(len(expected[1]))]
    want = [*expected[0], *expected[1]]
    got = [*actual[0], *actual[1]]
    if len(want) != len(got):
        return f"{len(got)} results, torch has {len(want)}"
    exact: list[Any] | None = None
    for i, (name, a, b) in enumerate(zip(names, want, got, strict=True)):
        if (a is None) != (b is None):
            return f"{name}: {'a gradient where torch has None' if a is None else 'None where torch has a gradient'}"
        if a is None:
            continue
        if isinstance(b, torch.Tensor):
            value, dtype = as_numpy(b), b.dtype
        else:
            value, dtype = np.asarray(b[0]), b[1].dtype
        if tuple(value.shape) != tuple(a.shape) or dtype != a.dtype:
            return f"{name}: {dtype}{list(value.shape)}, torch has {a.dtype}{list(a.shape)}"
        if shapes_only or _close(value, a):
            continue
        if call.op.name in _ANY_OF_EQUALS and i < len(expected[0]) and _select_equals(call.tensors[0], a, value):
            return None  # gradients follow the indices
        if call.op.name in _ANY_OF_EQUALS and i >= len(expected[0]) and _close(np.sort(value, None), a.flatten().sort().values):
            continue
        if exact is None:
            exact = _in_double(call)
        if exact is None or not _as_good_as_torch(value, a, exact[i]):
            return f"{name}: {_describe(value, a)}"
    return None


def _select_equals(x: torch.Tensor, want: torch.Tensor, got: np.ndarray) -> bool:
    """True where two index tensors choose equal elements of ``x`` along some dim, which they may lack."""
    if want.dtype != torch.int64:
        return False
    flat = x.ndim == 0 or want.ndim == 0
    source = x.detach().reshape(-1) if flat else x.detach()
    for dim in range(source.ndim):
        first, second = want, torch.from_numpy(got.astype(np.int64))
        if first.ndim < source.ndim:
            first, second = first.unsqueeze(dim), second.unsqueeze(dim)
        if all(a == b for d, (a, b) in enumerate(zip(first.shape, source.shape, strict=True)) if d != dim):
            chosen = [torch.take_along_dim(source, index, dim) for index in (first, second)]
            if torch.equal(torch.nan_to_num(chosen[0]), torch.nan_to_num(chosen[1])):
                return True
    return False


def _wide(value: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(value):
        return value.astype(np.complex128)
    return value.astype(np.float64) if jnp.issubdtype(value.dtype, jnp.floating) else value


def _close(value: np.ndarray, reference: torch.Tensor) -> bool:
    want = as_numpy(reference)
    if reference.dtype not in _TOLERANCE:
        return np.array_equal(value, want.astype(value.dtype))
    rtol, atol = _TOLERANCE[reference.dtype]
    a, b = _wide(value), _wide(want)
    finite = np.abs(b[np.isfinite(b)])
    scale = max(1.0, float(finite.max())) if finite.size else 1.0
    return np.allclose(a, b, rtol=rtol, atol=atol * scale, equal_nan=True)


def _in_double(call: _Call) -> list[Any] | None:
    """torch's results in double precision, or None where it has none."""
    wide = [t.to(_DOUBLE.get(t.dtype, t.dtype)) for t in call.tensors]
    try:
        outputs, gradients = call(wide)
    except Exception:  # not every operator computes in float64
        return None
    return [*outputs, *gradients]


def _as_good_as_torch(value: np.ndarray, reference: torch.Tensor, exact: torch.Tensor | None) -> bool:
    """Whether the result is as near as torch's own to the result in double precision, within a factor of 4.

    Where torch's own overflowed to NaN, the result must lie within its dtype's tolerance of the exact one.
    """
    if exact is None or not (reference.is_floating_point() or reference.is_complex()):
        return False
    ours, theirs, truth = _wide(value), _wide(as_numpy(reference)), _wide(as_numpy(exact))
    if not np.array_equal(np.isnan(ours), np.isnan(truth)):
        return False
    finite = np.isfinite(truth)
    scale = np.max(np.abs(truth[finite]), initial=0.0)
    error, torch_error = (np.max(np.abs(x - truth)[finite], initial=0.0) for x in (ours, theirs))
    if not np.isfinite(torch_error):
        torch_error = scale * _TOLERANCE[reference.dtype][0]
    return bool(error <= 4 * torch_error + 1e-6 * max(scale, 1.0))


def _describe(value: np.ndarray, reference: torch.Tensor) -> str:
    want = as_numpy(reference)
    a, b = _wide(np.asarray(value)), _wide(want)
    if a.dtype == np.bool_:
        return f"{int((a != b).sum())} of {a.size} values differ"
    error = np.abs(a - b)
    where = np.unravel_index(int(np.argmax(np.where(np.isnan(error), np.inf, error))), error.shape) if error.size else ()
    return f"{value[where]} at {tuple(map(int, where))}, torch has {want[where]}"
