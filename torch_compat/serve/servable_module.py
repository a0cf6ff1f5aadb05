"""A module's description of how it is served. API: ``lightning.pytorch.serve.ServableModule``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class ServableModule(ABC, nn.Module):
    """A module that a server can serve: how a request becomes tensors, what is computed, how that becomes a response."""

    @abstractmethod
    def configure_payload(self) -> dict[str, Any]:
        """A request to check the module with, as JSON: ``{"body": {name: value, …}}``."""

    @abstractmethod
    def configure_serialization(self) -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]:
        """The converters: for each argument of :meth:`serve_step` from JSON, and for each of its outputs to JSON."""

    @abstractmethod
    def serve_step(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        """Compute a response: outputs by name."""

    def configure_response(self) -> dict[str, Any]:
        """The response to :meth:`configure_payload` that is expected, to check it; {} checks nothing."""
        return {}
