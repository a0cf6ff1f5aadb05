"""Stored names converted as ``transformers`` converts them on loading: some renamed, experts' weights joined into one tensor."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from xlatrain.init.joined import Joined
from xlatrain.init.safetensors import StoredTensor


def convert_names(
    module: torch.nn.Module, opened: Mapping[str, StoredTensor], wanted: Mapping[str, Any]
) -> dict[str, StoredTensor | Joined]:
    """Stored tensors by the names of ``module``, where its ``transformers`` models know their checkpoints by other names.

    Transformers 5 keeps the experts of a layer in one parameter, while checkpoints have a tensor for each; and some layers have
    changed their names. Its own table says which. Names that ``module`` has stay as they are; so does what is converted in
    other ways than renaming, stacking and concatenating.

    Args:
        module: which is loaded.
        opened: stored tensors by name.
        wanted: the names of ``module``.
    """
    result: dict[str, StoredTensor | Joined] = dict(opened)
    for prefix, model in _models(module):
        other = [name for name in opened if name.startswith(prefix) and name not in wanted]
        if other:
            _convert(prefix, model, sorted(other, key=_natural), result, wanted)
    return result


def _models(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The outermost ``transformers`` models, with their prefix."""
    if "transformers" not in sys.modules or importlib.util.find_spec("transformers.conversion_mapping") is None:
        return  # transformers 4 stores what its modules have
    from transformers import PreTrainedModel

    found: list[str] = []
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, PreTrainedModel) and not any(prefix.startswith(outer) for outer in found):
            found.append(prefix)
            yield prefix, part


def _convert(
    prefix: str, model: Any, names: list[str], result: dict[str, StoredTensor | Joined], wanted: Mapping[str, Any]
) -> None:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, dict[str, list[str]]] = {}
    for name in names:
        target, pattern = rename_source_key(name.removeprefix(prefix), renamings, converters)
        target = prefix + target
        if target in result or target not in wanted:
            continue
        groups.setdefault(target, {}).setdefault(pattern or "", []).append(name)
    for target, sources in groups.items():
        stored = {pattern: [result[name] for name in members] for pattern, members in sources.items()}
        converter = by_pattern.get(next(iter(sources)))
        joined = stored[""][0] if converter is None else _joined(converter, stored)
        if joined is not None:
            result[target] = joined
            for name in [name for members in sources.values() for name in members]:
                del result[name]


def _joined(converter: Any, stored: Mapping[str, list[Any]]) -> Joined | None:
    """The tensors of each pattern, joined as the converter's operations do; None for operations of other kinds."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    parts = [stored[pattern] for pattern in converter.source_patterns if pattern in stored]
    if len(parts) != len(converter.source_patterns):
        return None
    kinds = [type(operation) for operation in converter.operations]
    if kinds[:1] == [MergeModulelist] and converter.operations[0].dim == 0:
        parts = [[Joined.stack(tensors)] for tensors in parts]
        kinds.pop(0)
    flat = [tensor for tensors in parts for tensor in tensors]
    try:
        if kinds == [Concatenate]:
            return Joined.concatenate(flat, converter.operations[-1].dim)
    except ValueError:  # shapes that do not go together
        return None
    return flat[0] if not kinds and len(flat) == 1 else None


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts ``experts.10`` after ``experts.9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
