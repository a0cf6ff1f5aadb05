"""The state of ``torch.compiler`` during a capture: libraries are told that the step is being compiled."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from xlatrain.bridge.capture.attention import fused_attention
from xlatrain.bridge.capture.decompositions.ctc import traceable_ctc
from xlatrain.bridge.capture.offloading import offloading_save_on_cpu
from xlatrain.bridge.capture.rematerialization import kept_recomputation
from xlatrain.bridge.capture.traceable.cumulative_batch_norm import traceable_cumulative_batch_norm
from xlatrain.bridge.capture.traceable.recurrent import scanned_recurrence
from xlatrain.bridge.capture.traceable.scripted import traceable_scripted_functions
from xlatrain.bridge.capture.traceable.transformers_attention import grouped_attention
from xlatrain.bridge.capture.traceable.value_checks import without_value_checks
from xlatrain.bridge.capturing import capturing
from xlatrain.bridge.patches import patched


@contextlib.contextmanager
def compiling_state() -> Iterator[None]:
    """Within the block ``torch.compiler.is_compiling()`` is true, as while ``torch.compile`` or ``torch.export`` trace.

    Libraries (transformers' attention masks and experts, ``torch.optim``, ``nn.TransformerEncoder``) then take the path without
    data-dependent branches. What torch does with values on the host is done otherwise (``traceable/``), what checkpointing
    recomputes is kept apart (``rematerialization.py``), and ``save_on_cpu`` means the host of the mesh's devices
    (``offloading.py``).
    """
    with (
        capturing(),
        patched([(torch.compiler, "_is_compiling_flag", True)]),
        without_value_checks(),
        scanned_recurrence(),
        kept_recomputation(),
        offloading_save_on_cpu(),
        traceable_ctc(),
        fused_attention(),
        traceable_cumulative_batch_norm(),
        traceable_scripted_functions(),
        grouped_attention(),
        _without_dynamo(),
    ):
        yield


def _without_dynamo() -> contextlib.AbstractContextManager[Any]:
    """Keep ``torch.compile`` from tracing user code: XLA compiles all of the step, and Dynamo would trace our fake tensors."""
    # A script that compiles anything has imported Dynamo; importing it here would take seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
