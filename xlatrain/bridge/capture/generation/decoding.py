"""A decoding loop: the prompt in one pass, then tokens in a loop of the program, with caches of a fixed size."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.utils.stateless import _reparametrize_module

from xlatrain.bridge.capture.generation.object_trees import outline, tensors_of, with_tensors
from xlatrain.bridge.capture.traceable.while_loop import CapturePart, while_loop

_BY_TOKEN = ("position_ids", "decoder_position_ids", "token_type_ids", "mm_token_type_ids")
"""Arguments of a model with one column a token, of which a pass over one token takes the last."""


class Selection(Protocol):
    """The choice of tokens: what it keeps, tensors by name, and how it goes on."""

    def first(self, ids: torch.Tensor, fixed: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Begin with a prompt: int64[B, T]."""
        ...

    def choose(
        self, kept: dict[str, torch.Tensor], logits: torch.Tensor, fixed: dict[str, Any]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Take the next tokens, by logits float32[B, V]; and give the rows that the cache's rows come from, if they do.

        ``going`` of what it keeps is whether there is a further token.

        Args:
            fixed: what does not change: ``processors``, ``eos``, ``pad``.
        """
        ...

    def last(self, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        """The tokens that were chosen last: int64[B]."""
        ...

    def sequences(self, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        """The sequences, int64[B, max_length]."""
        ...

    def length(self, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        """The number of columns of :meth:`sequences` that are there: an int64 scalar."""
        ...


class UnsteadyError(Exception):
    """A model's arguments or its cache change otherwise than in values from one token to the next; the text says how."""


@dataclass(frozen=True)
class Decoding:
    """A decoding loop.

    Attributes:
        model: of the library.
        selection: chooses the tokens.
        config: the generation's, as ``generate`` has prepared it.
        max_length: of the sequences.
        fixed: see :meth:`Selection.choose`.
        capture_part: captures the loop's body.
    """

    model: Any
    selection: Selection
    config: Any
    max_length: int
    fixed: dict[str, Any]
    capture_part: CapturePart

    def run(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Decode, and give what the selection has kept at the end.

        Args:
            ids: the prompt, int64[B, T].
            kwargs: of the model's forward.

        Raises:
            UnsteadyError: the loop has no body.
        """
        kwargs = {**kwargs, "past_key_values": self._cache(kwargs)}
        mask_name = "decoder_attention_mask" if self.model.config.is_encoder_decoder else "attention_mask"
        mask = kwargs.get(mask_name)
        outputs = self.model._prefill(ids, self.config, kwargs, is_first_iteration=True)
        kwargs = self._after(outputs, {name: one for name, one in kwargs.items() if name != mask_name})
        if mask is not None:  # tokens that come later are hidden by the causal mask
            kwargs[mask_name] = torch.cat([mask, mask.new_ones((mask.shape[0], self.max_length - 1 - mask.shape[1]))], dim=1)
        kept = self._choose(self.selection.first(ids, self.fixed), kwargs, outputs.logits, self.fixed)
        names = list(kept)

        def body(carried: list[torch.Tensor], constants: list[torch.Tensor]) -> list[torch.Tensor]:
            given = iter(carried)
            now = {name: next(given) for name in names}
            inner = with_tensors(kwargs, given)
            given = iter(constants)
            state = {name: next(given) for name in self._state()}
            fixed = with_tensors(self.fixed, given)
            with _reparametrize_module(self.model, state, tie_weights=True, stack_weights=True):
                return self._turn(now, inner, mask_name, fixed)

        carried = [*kept.values(), *tensors_of(kwargs)]
        constants = [*self._state().values(), *tensors_of(self.fixed)]
        return dict(zip(names, while_loop(self.model, body, carried, constants, self.capture_part), strict=False))

    def _turn(
        self, kept: dict[str, torch.Tensor], kwargs: dict[str, Any], mask_name: str, fixed: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Decode one token, and give what is kept and the tensors of the arguments afterwards."""
        before = outline(kwargs)
        token = self.selection.last(kept)[:, None]
        inputs = self.model.prepare_inputs_for_generation(token, next_sequence_length=1, **kwargs)
        outputs = self.model(**inputs, return_dict=True)
        mask = {name: one for name, one in kwargs.items() if name == mask_name}
        after = self._after(outputs, {name: one for name, one in kwargs.items() if name != mask_name})
        after = {name: {**after, **mask}[name] for name in kwargs}
        kept = self._choose(kept, after, outputs.logits, fixed)
        if (now := outline(after)) != before:
            different = [(old, new) for old, new in zip(before, now, strict=False) if old != new]
            raise UnsteadyError(f"{different[0][0]} becomes {different[0][1]}" if different else "they become more, or fewer")
        return [*kept.values(), *tensors_of(after)]

    def _choose(
        self, kept: dict[str, torch.Tensor], kwargs: dict[str, Any], logits: torch.Tensor, fixed: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        kept, rows = self.selection.choose(kept, logits[:, -1].to(torch.float32, copy=True), fixed)
        if rows is not None:
            cache = kwargs["past_key_values"]
            moved = [one.index_select(0, rows) if one.ndim else one for one in tensors_of(cache)]
            kwargs["past_key_values"] = with_tensors(cache, iter(moved))
        return kept

    def _after(self, outputs: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments for the pass over the next token."""
        found = self.model._update_model_kwargs_for_generation(
            outputs, dict(kwargs), is_encoder_decoder=self.model.config.is_encoder_decoder
        )
        return {name: one[..., -1:] if name in _BY_TOKEN and one is not None else one for name, one in found.items()}

    def _cache(self, kwargs: dict[str, Any]) -> Any:
        """A cache of a fixed size, in which no layer forgets: what a window hides, the mask hides."""
        library: Any = sys.modules["transformers.cache_utils"]
        config = self.model.config.get_text_config(decoder=True)
        cache = _without_windows(
            library, library.StaticCache(config=config, max_cache_len=self.max_length - 1), self.max_length - 1
        )
        if not self.model.config.is_encoder_decoder:
            return cache
        encoded = kwargs["encoder_outputs"][0].shape[1]
        return library.EncoderDecoderCache(cache, library.StaticCache(config=config, max_cache_len=encoded))

    def _state(self) -> dict[str, torch.Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}


def _without_windows(library: Any, cache: Any, length: int) -> Any:
    layers: Sequence[Any] = cache.layers
    windows = library.StaticSlidingWindowLayer
    cache.layers = [library.StaticLayer(max_cache_len=length) if type(one) is windows else one for one in layers]
    return cache
