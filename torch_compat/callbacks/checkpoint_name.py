"""Checkpoint names from templates: ``"{epoch}-{val_loss:.2f}"`` → ``"epoch=2-val_loss=0.12"``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_FIELD = re.compile(r"\{(?P<name>[^{}:]*)(?P<spec>:[^{}]*)?\}")


def format_name(template: str, metrics: Mapping[str, Any], insert_names: bool, equals: str = "=") -> str:
    """Fills ``{metric}`` and ``{metric:format}`` fields of ``template``; a metric that is not there counts as 0.

    Args:
        template: text with fields; a field's name may hold any character but ``{``, ``}`` and ``:``.
        metrics: name → number or tensor of one element.
        insert_names: write ``name=value`` instead of ``value``.
        equals: what stands between name and value.

    Raises:
        ValueError: a metric's value does not suit its format.
    """

    def fill(field: re.Match[str]) -> str:
        name, spec = field["name"], (field["spec"] or ":")[1:]
        value = metrics.get(name, 0)
        try:
            text = format(value, spec)
        except (TypeError, ValueError) as error:
            message = f"checkpoint name {template!r}: {name}={value!r} cannot be written with format {spec!r}: {error}"
            raise ValueError(message) from error
        return f"{name}{equals}{text}" if insert_names else text

    return _FIELD.sub(fill, template)
