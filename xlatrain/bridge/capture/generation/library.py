"""``generate`` of the library while a step is captured: which decoding loops are loops of the program, and which stay eager.

The library decodes token by token in a Python loop. Captured as it runs, that would be a graph of every token, which takes
minutes to compile, and another one for each number of tokens. What has no loop here is refused: such a step runs eagerly.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xlatrain.bridge.capture.generation.beams import Beams
from xlatrain.bridge.capture.generation.decoding import Decoding, Selection, UnsteadyError
from xlatrain.bridge.capture.generation.processors import unknown
from xlatrain.bridge.capture.generation.sampling import Sampling
from xlatrain.bridge.capture.generation.uncut import uncut
from xlatrain.bridge.capture.traceable.while_loop import CapturePart
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.patches import patched

_LOOPS = ("_sample", "_beam_search", "_assisted_decoding")
"""The library's decoding loops, by the names of methods of ``GenerationMixin``."""
_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
_OPTIONS = (
    *("return_dict_in_generate", "prefill_chunk_size", "max_time", "stop_strings", "token_healing", "cache_implementation"),
    *("prompt_lookup_num_tokens", "penalty_alpha", "dola_layers", "watermarking_config", "guidance_scale"),
)
"""Options of a generation for which there is no loop."""
_ARGUMENTS = (
    *("prefix_allowed_tokens_fn", "assistant_model", "streamer", "custom_generate", "past_key_values", "negative_prompt_ids"),
)
"""Arguments of ``generate`` for which there is none."""


@contextlib.contextmanager
def generation_in_loops(capture_part: CapturePart) -> Iterator[None]:
    """Within the block decoding loops are loops of the program, or refused.

    Args:
        capture_part: see :class:`~xlatrain.bridge.capture.traceable.while_loop.CapturePart`.
    """
    library: Any = sys.modules.get("transformers.generation.utils")
    mixin = getattr(library, "GenerationMixin", None)
    if mixin is None:
        yield
        return
    patches: list[tuple[Any, str, Any]] = [(mixin, name, _stays_eager) for name in _LOOPS if name not in _SELECTIONS]
    patches += [(mixin, name, _looped(selection, capture_part)) for name, selection in _SELECTIONS.items()]
    with patched([*patches, (mixin, "generate", _looked_at(mixin))]):
        yield


def _sampling(model: Any, config: Any, prompt: int, max_length: int) -> Selection:
    return Sampling(max_length, draws=bool(config.do_sample))


_SELECTIONS: dict[str, Callable[[Any, Any, int, int], Selection]] = {"_sample": _sampling, "_beam_search": Beams}
"""The library's loops that are loops of the program, and how each chooses tokens: of model, config, and lengths."""


def _looped(selection: Callable[[Any, Any, int, int], Selection], capture_part: CapturePart) -> Callable[..., torch.Tensor]:
    """A decoding method of the library's as a loop of the program."""

    def decode(
        self: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        if names := [*unknown(logits_processor), *_other_criteria(stopping_criteria)]:
            raise _refusal(f"generate uses {', '.join(names)}")
        length = min(one.max_length for one in stopping_criteria if type(one).__name__ == "MaxLengthCriteria")
        eos, pad = _special_tokens(generation_config)
        fixed = {"processors": list(logits_processor), "eos": eos, "pad": pad}
        selected = selection(self, generation_config, input_ids.shape[1], length)
        decoding = Decoding(self, selected, generation_config, length, fixed, capture_part)
        try:
            kept = decoding.run(input_ids, model_kwargs)
        except UnsteadyError as error:
            raise _refusal(f"arguments or cache of {type(self).__name__} change from token to token: {error}") from error
        sequences = selected.sequences(kept)
        return sequences if eos is None else uncut(sequences, selected.length(kept))

    return decode


def _special_tokens(config: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tokens that end a sequence, int64[n], and the one that comes after them, an int64 scalar."""
    eos = None if config.eos_token_id is None else torch.as_tensor(config.eos_token_id).reshape(-1)
    if config.pad_token_id is None:
        return eos, None if eos is None else eos[0]
    return eos, torch.as_tensor(config.pad_token_id)


def _looked_at(mixin: Any) -> Callable[..., Any]:
    """``GenerationMixin.generate``, which looks first whether there is a loop: what it does before is done in vain else."""
    original = mixin.generate
    signature = inspect.signature(original)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given.update(given.pop("kwargs", {}))
        own = [name for name in _LOOPS if getattr(type(self), name, None) is not getattr(mixin, name)]
        if (reason := _reason(self, given, own)) is not None:
            raise _refusal(reason)
        return original(self, *args, **kwargs)

    return generate


def _reason(model: Any, given: dict[str, Any], own: list[str]) -> str | None:
    """Why a call of ``generate`` with these arguments has no loop of the program; None where it has one, as far as is known.

    Args:
        own: the decoding loops that the model's class has itself.
    """
    kind = type(model).__name__
    if own:
        return f"{kind} has a decoding loop of its own ({', '.join(own)})"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"transformers has no cache of a fixed size for {kind}"
    if hasattr(model, "_reorder_cache"):
        return f"{kind} orders its cache in a way of its own"
    options = {name: one for name, one in given.items() if name not in ("self", "inputs", "generation_config")}
    config, _ = model._prepare_generation_config(given.get("generation_config"), **options)
    named = [name for name in _ARGUMENTS if given.get(name) is not None]
    named += [name for name in _OPTIONS if getattr(config, name, None) not in (None, False)]
    if not config.use_cache:
        named.append("use_cache=False")
    if given.get("inputs_embeds") is not None and not model.config.is_encoder_decoder:
        named.append("inputs_embeds")
    named += unknown(given.get("logits_processor") or ())
    named += _other_criteria(given.get("stopping_criteria") or ())
    return f"generate is given {', '.join(named)}" if named else None


def _other_criteria(criteria: Any) -> list[str]:
    return [type(one).__name__ for one in criteria if type(one).__name__ not in _CRITERIA]


def _stays_eager(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise _refusal(f"{type(self).__name__}.generate decodes with an assistant")


def _refusal(reason: str) -> CaptureError:
    """The error for a decoding loop that stays on the host, with the user's line."""
    where = user_line(traceback.extract_stack()) or "the step"
    return CaptureError(
        f"{where}\n  cannot be captured: {reason}. The loop would stay in Python, with a pass over the model for each token: one "
        "graph of all tokens.\n  Fix: leave that out, or generate in a hook (on_validation_epoch_end), so that the steps stay "
        "compiled."
    )
