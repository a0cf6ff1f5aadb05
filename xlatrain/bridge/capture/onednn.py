"""oneDNN, switched off while a function is captured: its kernels are for CPUs only, and have no place in a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.patches import patched

_SWITCH = torch._C._set_mkldnn_enabled


@contextlib.contextmanager
def with_onednn() -> Iterator[None]:
    """Within the block, in one of :func:`without_onednn`, oneDNN is as it is outside of both, for ops that really run."""
    _SWITCH(torch._C._get_mkldnn_enabled())
    try:
        yield
    finally:
        _SWITCH(False)


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Switch oneDNN off, as ``torch.backends.mkldnn.flags(enabled=False)`` would, which also sets TF32 and warns on some
    processors; who asks for the setting within the block, or changes it for a time, has what it is without us.

    Raises:
        CaptureError: the block leaves another setting behind.
    """
    get, switch = torch._C._get_mkldnn_enabled, _SWITCH
    outside = shown = get()

    def show(enabled: bool) -> None:
        nonlocal shown
        shown = enabled

    setting = vars(type(torch.backends.mkldnn))["enabled"]
    functions = {"getter": lambda: shown, "setter": show}
    names = {"_get_mkldnn_enabled": functions["getter"], "_set_mkldnn_enabled": show}
    switch(False)
    try:
        with patched([*((setting, *one) for one in functions.items()), *((torch._C, *one) for one in names.items())]):
            yield
    finally:
        switch(outside)
    if shown != outside:
        raise CaptureError(
            "the step cannot be captured: it leaves torch.backends.mkldnn.enabled with another value, which a compiled step "
            "would do only once.\n  Fix: change it before the run, or for a time (with torch.backends.mkldnn.flags(...))."
        )
