"""Precisions in which linear layers multiply in eight bits. API: ``lightning.pytorch.plugins.TransformerEnginePrecision``.

Products are :mod:`xlatrain.bridge.capture.eight_bits`; here is which layers, and what everything else is computed in.
"""

from __future__ import annotations

import contextlib
import fnmatch
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import torch

from torch_compat.plugins.precision import MixedPrecision, Precision, converted, default_dtype
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn
from xlatrain.bridge.capture.eight_bits import EightBits, eight_bit_layers, transposed_linear

LEFT_OUT = ("*head", "*embed*", "*classifier*", "output", "*.output", "*score", "*router*", "*.gate")
"""Globs over the names of layers that are left in the wider dtype: heads, embeddings, what chooses experts."""

_INT8 = EightBits(torch.int8, torch.int8, per_channel=True)
_FLOAT8 = EightBits(torch.float8_e4m3fn, torch.float8_e5m2)


class EightBitLayers:
    """Which linear layers of the modules of a run multiply in eight bits.

    A layer does, if none of ``exclude`` matches its name, its weight is no embedding's and not what transformers calls the
    output embeddings, and 8 divides its inputs and 16 its outputs.

    Args:
        name: the precision, as messages call it.
        how: dtypes and scales.
        exclude: globs over module paths.
    """

    def __init__(self, name: str, how: EightBits, exclude: Iterable[str] = LEFT_OUT) -> None:
        self.how = how
        self._name = name
        self._exclude = tuple(exclude)
        self._roots: list[weakref.ref[torch.nn.Module]] = []
        self._known: dict[int, tuple[weakref.ref[torch.nn.Module], bool]] = {}

    def add(self, root: torch.nn.Module) -> None:
        """Choose among the layers of a module, and say which."""
        if not any(one() is root for one in self._roots):
            self._roots = [one for one in self._roots if one() is not None] + [weakref.ref(root)]
        chosen = sum(self._look(root).values())
        left = {name: why for name, why in self._left_out(root).items() if why}
        if not chosen and not left:
            return
        others = "".join(f"\n  {name}: {why}" for name, why in left.items())
        if chosen:
            rank_zero_info(f"precision={self._name!r}: {chosen} linear layers multiply in eight bits; not:{others or ' none'}")
        else:
            rank_zero_warn(
                f"precision={self._name!r}: no linear layer of {type(root).__name__} multiplies in eight bits:{others}"
            )

    def __call__(self, layer: torch.nn.Module) -> bool:
        """Whether a layer multiplies in eight bits; one that is in no module of the run does not."""
        known = self._known.get(id(layer))
        if known is None or known[0]() is not layer:
            for root in self._roots:  # a layer may have been added after the run began
                if (module := root()) is not None:
                    self._look(module)
            known = self._known.get(id(layer))
            if known is None or known[0]() is not layer:
                known = self._known[id(layer)] = weakref.ref(layer), False
        return known[1]

    def context(self) -> AbstractContextManager[None]:
        """The context in which the layers do so."""
        return eight_bit_layers(self.how, self)

    def __getstate__(self) -> dict[str, Any]:
        """Without the modules: another process has its own."""
        return {**self.__dict__, "_roots": [], "_known": {}}

    def _look(self, root: torch.nn.Module) -> dict[str, bool]:
        modules = dict(root.named_modules())
        found = {name: why is None for name, why in self._left_out(root).items()}
        for name, chosen in found.items():
            layer = modules[name]
            self._known[id(layer)] = weakref.ref(layer), chosen
        return found

    def _left_out(self, root: torch.nn.Module) -> dict[str, str | None]:
        """Each linear layer, and why it stays in the wider dtype; None: it does not."""
        apart = {id(weight): why for weight, why in _embeddings(root)}
        return {
            name: apart.get(id(layer.weight)) or self._excluded(name) or _indivisible(layer)
            for name, layer in root.named_modules()
            if _is_linear(layer)
        }

    def _excluded(self, name: str) -> str | None:
        glob = next((one for one in self._exclude if fnmatch.fnmatchcase(name, one)), None)
        return None if glob is None else f"excluded by {glob!r}"


def _is_linear(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.Linear):
        # The projection of MultiheadAttention is never called: its weight is read.
        return not isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear)
    conv = transposed_linear()
    return conv is not None and isinstance(module, conv)


def _embeddings(root: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    """Weights of embeddings, and of heads by the name that transformers has for them."""
    for module in root.modules():
        if isinstance(module, torch.nn.Embedding):
            yield module.weight, "its weight is an embedding's"
        head = getattr(type(module), "get_output_embeddings", None)
        if head is not None:
            yield getattr(head(module), "weight", None), "the head (get_output_embeddings)"


def _indivisible(layer: Any) -> str | None:
    outputs, inputs = layer.weight.shape if isinstance(layer, torch.nn.Linear) else layer.weight.shape[::-1]
    if inputs % 8 == 0 and outputs % 16 == 0:
        return None
    return f"{inputs} inputs and {outputs} outputs, which 8 and 16 must divide"


class EightBitPrecision(MixedPrecision):
    """``"bf16-mixed"`` in which linear layers multiply in eight bits, forward and backward: ``"int8-mixed"``, ``"float8-mixed"``.

    Parameters, gradients and the optimizer's state are float32. Which layers: those of :class:`EightBitLayers`.

    Args:
        precision: ``"int8-mixed"``, or ``"float8-mixed"``: e4m3 for inputs and weights, e5m2 for gradients.
        scales: ``"channel"``: one for each row and channel that is not summed over, the default of int8; ``"tensor"``: one for
            each tensor, the default of float8. They are those of the tensors of this step.
        exclude: globs over module paths: linear layers that stay in bfloat16.

    Raises:
        ValueError: another precision, other scales, or globs that are no list of texts.
    """

    def __init__(self, precision: str = "int8-mixed", scales: str | None = None, exclude: Iterable[str] = LEFT_OUT) -> None:
        if precision not in ("int8-mixed", "float8-mixed"):
            raise ValueError(f"precision {precision!r}; EightBitPrecision takes 'int8-mixed' or 'float8-mixed'")
        if scales not in (None, "channel", "tensor"):
            raise ValueError(f"EightBitPrecision(scales={scales!r}); expected 'channel' or 'tensor'")
        globs = () if isinstance(exclude, str) else tuple(exclude)  # an iterator gives its own once
        if isinstance(exclude, str) or not all(isinstance(one, str) for one in globs):
            raise ValueError(f"EightBitPrecision(exclude={exclude!r}); expected a list of globs over module paths: ['*head']")
        super().__init__("bf16-mixed")
        self.precision = precision
        default = _INT8 if precision == "int8-mixed" else _FLOAT8
        per_channel = default.per_channel if scales is None else scales == "channel"
        self.layers = EightBitLayers(precision, EightBits(default.values, default.gradients, per_channel), globs)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self.layers.add(module)
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        return _both(super().forward_context(), self.layers.context())


class TransformerEnginePrecision(Precision):
    """Linear layers multiply in float8, as with NVIDIA's Transformer Engine, but compiled by XLA, and on every device.

    Scales are of the tensors of this step (its "current scaling"), one for each, where its default takes them from steps before.
    Which layers: those of :class:`EightBitLayers`; they stay ``torch.nn.Linear``.

    Args:
        weights_dtype: of parameters, batches, and what lies between layers.
        recipe: options of ``transformer_engine.common.recipe.DelayedScaling`` as a dict: ``fp8_format`` (``"HYBRID"``,
            ``"E4M3"``), ``margin``, ``override_linear_precision``.
        replace_layers: True or None: which layers is decided here.
        fallback_compute_dtype: of everything else, under ``torch.autocast``; default: ``weights_dtype``.

    Raises:
        MisconfigurationException: an option of a recipe that has no meaning here, a recipe that is no dict, or
            ``replace_layers=False``, which leaves layers to modules of Transformer Engine.
    """

    precision: Literal["transformer-engine", "transformer-engine-float16"] = "transformer-engine"

    def __init__(
        self,
        *,
        weights_dtype: torch.dtype,
        recipe: Mapping[str, Any] | None = None,
        replace_layers: bool | None = None,
        fallback_compute_dtype: torch.dtype | None = None,
    ) -> None:
        if replace_layers is False:
            raise MisconfigurationException(
                "TransformerEnginePrecision(replace_layers=False) leaves float8 to modules of transformer_engine, which are "
                "kernels for CUDA: leave the argument out, and linear layers multiply in float8"
            )
        self.weights_dtype = weights_dtype
        self.recipe = recipe
        self.replace_layers = replace_layers
        self.fallback_compute_dtype = fallback_compute_dtype or weights_dtype
        self.layers = EightBitLayers(self.precision, _of_recipe(recipe))

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self.layers.add(module)
        return module.to(dtype=self.weights_dtype)

    def convert_input(self, data: Any) -> Any:
        return converted(data, self.weights_dtype)

    def convert_output(self, data: Any) -> Any:
        return converted(data, torch.get_default_dtype())

    def forward_context(self) -> AbstractContextManager[Any]:
        dtype = self.fallback_compute_dtype
        # CPU and XLA compute float32 without a cast.
        autocast = torch.autocast(self.device, dtype, enabled=dtype != torch.float32, cache_enabled=False)
        return _both(default_dtype(self.weights_dtype), autocast, self.layers.context())

    def module_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype(self.weights_dtype)


_FORMATS = {"HYBRID": _FLOAT8, "E4M3": EightBits(torch.float8_e4m3fn, torch.float8_e4m3fn)}
_OF_EARLIER_STEPS = ("amax_history_len", "amax_compute_algo", "scaling_factor_compute_algo", "reduce_amax")


def _of_recipe(recipe: Any) -> EightBits:
    """Dtypes and scales by a recipe.

    Raises:
        MisconfigurationException: see :class:`TransformerEnginePrecision`.
    """
    if recipe is None:
        return _FLOAT8
    if not isinstance(recipe, Mapping):
        raise MisconfigurationException(
            f"TransformerEnginePrecision(recipe={recipe!r}): expected a dict of options of DelayedScaling, such as "
            "{'fp8_format': 'HYBRID', 'margin': 0}"
        )
    options = dict(recipe)
    form, margin = options.pop("fp8_format", "HYBRID"), options.pop("margin", 0)
    wide = tuple(options.pop("override_linear_precision", (False, False, False)))
    if options:
        reason = "scales are of the tensors of this step" if set(options) & set(_OF_EARLIER_STEPS) else "it has no meaning here"
        raise MisconfigurationException(
            f"TransformerEnginePrecision(recipe=…) with {', '.join(map(repr, options))}: {reason}; leave it out. The known "
            "options are 'fp8_format', 'margin' and 'override_linear_precision'"
        )
    if form not in _FORMATS or len(wide) != 3:
        raise MisconfigurationException(
            f"TransformerEnginePrecision(recipe={recipe!r}): expected fp8_format to be one of {', '.join(map(repr, _FORMATS))}, "
            "and override_linear_precision three bools, for the forward pass and the gradients by inputs and by weights"
        )
    dtypes = _FORMATS[form]
    return EightBits(dtypes.values, dtypes.gradients, margin=int(margin), wide=cast(Any, tuple(map(bool, wide))))


@contextlib.contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield
