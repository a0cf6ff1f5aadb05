"""Models of transformers that record outputs (``output_hidden_states=True``) by hooks: the step that asks first installs them.

They stay for all steps that follow, and do nothing where nothing is recorded. A capture takes back what a step changed, so
they are installed before it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from xlatrain.bridge.patches import patched


class HooksWantedError(BaseException):
    """A step asks for the outputs of a model that has no hooks to record them yet."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def install(self) -> None:
        """Install them, where no step is captured."""
        sys.modules["transformers.utils.output_capturing"].maybe_install_capturing_hooks(self._model)


@contextlib.contextmanager
def no_hooks_installed() -> Iterator[None]:
    """In the block a model that would get hooks raises.

    Raises:
        HooksWantedError: for the first.
    """
    library: Any = sys.modules.get("transformers.utils.output_capturing")

    def install(model: Any, prefix: str | None = None) -> None:
        raise HooksWantedError(model)

    with patched([] if library is None else [(library, "install_all_output_capturing_hooks", install)]):
        yield
