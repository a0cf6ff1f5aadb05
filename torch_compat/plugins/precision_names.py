"""The precision plugin for a name."""

from __future__ import annotations

import torch

from torch_compat.plugins.eight_bits import EightBitPrecision, TransformerEnginePrecision
from torch_compat.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch_compat.utilities.exceptions import ArgumentValueError
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn

_ALIASES = {
    "32": "32-true", "32-true": "32-true", "64": "64-true", "64-true": "64-true", "16": "16-mixed", "16-mixed": "16-mixed",
    "bf16": "bf16-mixed", "bf16-mixed": "bf16-mixed", "bf16-true": "bf16-true", "16-true": "16-true",
    "int8-mixed": "int8-mixed", "float8-mixed": "float8-mixed",
    "transformer-engine": "transformer-engine", "transformer-engine-float16": "transformer-engine-float16",
}  # fmt: skip
_EIGHT_BITS = ("int8-mixed", "float8-mixed")  # ours; stock's name of its float8 is that of its library
_WEIGHTS = {"transformer-engine": torch.bfloat16, "transformer-engine-float16": torch.float16}


def make_precision(precision: str | int | None, platform: str, owner: str = "Trainer") -> Precision:
    """The plugin for ``Trainer(precision=…)``, or Fabric's as ``owner``, on a JAX platform (``"cpu"``, ``"gpu"``, ``"tpu"``).

    Raises:
        ArgumentValueError: an unknown one.
    """
    name = str(32 if precision is None else precision)
    if name not in _ALIASES:
        raise ArgumentValueError(f"Precision {precision!r} is invalid. Allowed precision values: {', '.join(sorted(_ALIASES))}")
    if name in ("16", "bf16"):
        rank_zero_warn(
            f"`precision={name}` is supported for historical reasons but its usage is discouraged: it means "
            f"{_ALIASES[name]}; write that instead"
        )
    name = _ALIASES[name]
    if name == "16-mixed" and platform != "gpu":
        rank_zero_warn(
            f"You passed `{owner}(accelerator={platform!r}, precision='16-mixed')` but AMP with fp16 is not supported on "
            f"{platform.upper()}. Using `precision='bf16-mixed'` instead."
        )
        name = "bf16-mixed"
    if name == "64-true":
        return DoublePrecision()
    if name in _EIGHT_BITS:
        return EightBitPrecision(name)
    if name in _WEIGHTS:
        return TransformerEnginePrecision(weights_dtype=_WEIGHTS[name])
    if name.endswith("-mixed"):
        rank_zero_info(f"Using {'16bit' if name == '16-mixed' else 'bfloat16'} Automatic Mixed Precision (AMP)")
        return MixedPrecision(name)
    return HalfPrecision(name) if name != "32-true" else Precision()
