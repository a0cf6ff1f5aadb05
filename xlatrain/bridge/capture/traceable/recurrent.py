"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as one loop per layer.

PyTorch decomposes a recurrent layer into every op of every time step, so that capturing and compiling would take a time
proportional to the sequence length. While a step is captured, the functions under these modules run on a custom op for the
recurrence alone, which is lowered to ``lax.scan``. The products with the input, which do not depend on the recurrence, stay one
matrix product over all time steps. Packed sequences are padded ones with a mask of their steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from xlatrain.bridge.capture.autocast import is_as_on_a_gpu
from xlatrain.bridge.capture.masked_rows.packed import packed_rows, padded_rows
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.fake_kernels import fake_kernel
from xlatrain.bridge.patches import patched

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define(
    "recurrence(str cell, Tensor gates, Tensor h0, Tensor c0, Tensor weight, Tensor bias, bool reverse, Tensor? valid=None) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define(
    "recurrence_backward(str cell, Tensor grad_h, Tensor grad_c, Tensor gates, Tensor h0, Tensor c0, Tensor weight, Tensor bias, "
    "bool reverse, Tensor? valid, Tensor h, Tensor c) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@fake_kernel(_LIBRARY, "recurrence")
def _fake(
    cell: str,
    gates: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    reverse: bool,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of the hidden and cell states after each step, (T, B, H)."""
    steps = gates.shape[0]
    return h0.new_empty((steps, *h0.shape)), c0.new_empty((steps, *c0.shape))


@fake_kernel(_LIBRARY, "recurrence_backward")
def _fake_backward(
    cell: str,
    grad_h: torch.Tensor,
    grad_c: torch.Tensor,
    gates: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    reverse: bool,
    valid: torch.Tensor | None,
    h: torch.Tensor,
    c: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Shapes of the gradients: those of the gates, the first states, the weight and the bias."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gates, h0, c0, weight, bias))


@register_flop_formula(torch.ops.xlatrain.recurrence)
def _flops(cell: str, gates: Any, h0: Any, c0: Any, weight: Any, *_: Any, **__: Any) -> int:
    """FLOPs of the products with each step's state, by shapes."""
    return 2 * gates[0] * h0[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.xlatrain.recurrence_backward)
def _flops_backward(cell: str, grad_h: Any, grad_c: Any, *args: Any, **_: Any) -> int:
    """FLOPs of the gradients by states and by the weight."""
    return 2 * _flops(cell, *args)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.cell, *tensors, ctx.reverse, valid = inputs
    ctx.save_for_backward(*tensors, valid, *output)


def _backward(ctx: Any, grad_h: torch.Tensor, grad_c: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *tensors, valid, h, c = ctx.saved_tensors
    grads = torch.ops.xlatrain.recurrence_backward(ctx.cell, grad_h, grad_c, *tensors, ctx.reverse, valid, h, c)
    return None, *grads, None, None


def _no_double_backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
    raise CaptureError(
        "the step cannot be captured: it differentiates the gradient of an nn.LSTM, nn.GRU or nn.RNN (create_graph=True).\n"
        "  Fix: write the recurrence with nn.LSTMCell, nn.GRUCell or nn.RNNCell, or run the step eagerly."
    )


torch.library.register_autograd("xlatrain::recurrence", _backward, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("xlatrain::recurrence_backward", _no_double_backward, lib=_LIBRARY)


def _direction(
    cell: str,
    x: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor,
    weights: Sequence[torch.Tensor],
    valid: torch.Tensor | None,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run one direction of one layer over ``x`` (T, B, I): its outputs (T, B, H) and its last states (B, H).

    Where ``valid`` (T, B) is False a step leaves the states as they are.
    """
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, w_hh.new_zeros(w_hh.shape[0]))
    gates = F.linear(x, w_ih, b_ih)
    # under autocast the gates are 16-bit and the states are not
    h, c = torch.ops.xlatrain.recurrence(cell, gates, h0, c0, w_hh.to(gates.dtype), b_hh.to(gates.dtype), reverse, valid)
    last = 0 if reverse else -1
    return h, h[last], c[last]


def _layers(
    cell: str,
    x: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run all layers over ``x`` (T, B, I), or (B, T, I) if ``batch_first``.

    Args:
        valid: (T, B), the steps that each sequence has; None: all.

    Returns:
        The last layer's outputs, as long as ``x``, and the last hidden and cell states of all layers and directions.
    """
    directions = 2 if bidirectional else 1
    each = 4 if has_biases else 2
    weights = [params[start : start + each] for start in range(0, len(params), each)]
    if batch_first:
        x = x.transpose(0, 1)
    last_h: list[torch.Tensor] = []
    last_c: list[torch.Tensor] = []
    for layer in range(num_layers):
        outputs: list[torch.Tensor] = []
        for direction in range(directions):
            index = layer * directions + direction
            y, h, c = _direction(cell, x, h0[index], c0[index], weights[index], valid, reverse=direction == 1)
            outputs.append(y)
            last_h.append(h)
            last_c.append(c)
        x = torch.cat(outputs, dim=-1) if bidirectional else outputs[0]
        if train and dropout and layer < num_layers - 1:
            x = F.dropout(x, dropout, training=True)
    return (x.transpose(0, 1) if batch_first else x), torch.stack(last_h), torch.stack(last_c)


def _scanned_lstm(original: Callable[..., Any]) -> Callable[..., Any]:
    def lstm(x: torch.Tensor, *args: Any) -> Any:
        if _is_packed(args) and (found := padded_rows(x, args[0])) is not None:
            _, (h0, c0), params, *rest = args
            x, h0, c0, *params = _autocast(found[0], h0, c0, *params)
            if len(params) == _tensors(*rest):
                y, *states = _layers("lstm", x, h0, c0, params, *rest, batch_first=False, valid=found[1])
                return packed_rows(y, found[1]), *states
        if not _is_plain(args) or len(args[1]) != _tensors(*args[2:]):
            return original(x, *args)  # projections
        (h0, c0), params, *rest = args
        x, h0, c0, *params = _autocast(x, h0, c0, *params)
        return _layers("lstm", x, h0, c0, params, *rest)

    return lstm


def _tensors(has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool, *_: Any) -> int:
    """The number of parameters of a layer without projections."""
    return num_layers * (2 if bidirectional else 1) * (4 if has_biases else 2)


def _autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors as autocast casts them: torch runs all of a recurrence in the lower precision; on a CPU, of LSTMs alone."""
    if not torch.is_autocast_enabled("cpu"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cpu")
    return [tensor.to(dtype) if tensor.dtype == torch.float32 else tensor for tensor in tensors]


def _autocast_on_a_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return _autocast(*tensors) if is_as_on_a_gpu() else list(tensors)


def _scanned(cell: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def recurrent(x: torch.Tensor, *args: Any) -> Any:
        if _is_packed(args) and (found := padded_rows(x, args[0])) is not None:
            _, h0, params, *rest = args
            x, h0, *params = _autocast_on_a_gpu(found[0], h0, *params)
            y, states, _ = _layers(cell, x, h0, h0[..., :0], params, *rest, batch_first=False, valid=found[1])
            return packed_rows(y, found[1]), states
        if not _is_plain(args):
            return original(x, *args)
        h0, params, *rest = args
        x, h0, *params = _autocast_on_a_gpu(x, h0, *params)
        return _layers(cell, x, h0, h0[..., :0], params, *rest)[:2]

    return recurrent


def _is_plain(args: tuple[Any, ...]) -> bool:
    """Arguments (hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first): no packed sequence."""
    return len(args) == 8 and isinstance(args[1], list | tuple)


def _is_packed(args: tuple[Any, ...]) -> bool:
    """Arguments (batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional): a packed sequence."""
    return len(args) == 8 and isinstance(args[2], list | tuple) and isinstance(args[0], torch.Tensor)


@contextlib.contextmanager
def scanned_recurrence() -> Iterator[None]:
    """Within the block the modules ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` run on ``xlatrain::recurrence``.

    ``proj_size`` stays PyTorch's, unrolled over time.
    """
    originals = {cell: getattr(torch._VF, cell) for cell in CELLS}
    scanned = {cell: _scanned_lstm(one) if cell == "lstm" else _scanned(cell, one) for cell, one in originals.items()}
    with patched((torch._VF, cell, function) for cell, function in scanned.items()):
        yield
