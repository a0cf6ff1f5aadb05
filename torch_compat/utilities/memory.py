"""Memory helpers (``lightning.pytorch.utilities.memory``)."""

from __future__ import annotations

import gc
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from xlatrain.step.device_memory import Shortage


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """``in_dict`` (any nesting) with its tensors detached, and moved to the CPU if asked."""

    def detach(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return tensor.cpu() if to_cpu else tensor

    return apply_to_collection(in_dict, torch.Tensor, detach)


def is_oom_error(exception: BaseException) -> bool:
    """Whether memory ran out: of CUDA, of the host, or of an accelerator that XLA drives."""
    return (
        is_cuda_out_of_memory(exception) or is_cudnn_snafu(exception) or is_out_of_cpu_memory(exception) or _is_xla_oom(exception)
    )


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Whether torch's CUDA allocator gave up."""
    return isinstance(exception, RuntimeError) and "CUDA" in _text(exception) and "out of memory" in _text(exception)


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Whether cuDNN reported a failure that a lack of memory causes."""
    return isinstance(exception, RuntimeError) and "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED." in _text(exception)


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Whether torch's CPU allocator gave up."""
    return isinstance(exception, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in _text(exception)


def _is_xla_oom(exception: BaseException) -> bool:
    return isinstance(exception, RuntimeError) and Shortage.from_error(exception) is not None


def _text(exception: BaseException) -> str:
    return str(exception.args[0]) if exception.args else ""


def garbage_collection_cuda() -> None:
    """Collects garbage, then returns torch's cached CUDA memory, if there is CUDA."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
