"""Models of transformers that record outputs (``output_hidden_states=True``) by hooks: the step that asks first installs them.

They stay for all steps that follow, and do nothing where nothing is recorded. A capture takes back what a step changed, so
they are installed before it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch_compat.step.capture.outside import OutsideFirstError
from xlatrain.bridge.patches import patched


@contextlib.contextmanager
def no_hooks_installed() -> Iterator[None]:
    """In the block a model that would get hooks raises.

    Raises:
        OutsideFirstError: for the first; it installs them.
    """
    library: Any = sys.modules.get("transformers.utils.output_capturing")

    def install(model: Any, prefix: str | None = None) -> None:
        raise OutsideFirstError(functools.partial(library.maybe_install_capturing_hooks, model))

    with patched([] if library is None else [(library, "install_all_output_capturing_hooks", install)]):
        yield
