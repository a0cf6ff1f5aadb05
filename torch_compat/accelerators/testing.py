"""Conditions under which a test can run. API: ``_runif_reasons`` of ``lightning.pytorch.utilities.testing``."""

from __future__ import annotations

import operator
import os
import platform
import sys

import torch
from lightning_utilities.core.imports import RequirementCache, compare_version
from torch._dynamo.eval_frame import is_dynamo_supported

from torch_compat.accelerators import CUDAAccelerator, MPSAccelerator, XLAAccelerator


def _runif_reasons(
    *,
    min_cuda_gpus: int = 0,
    min_torch: str | None = None,
    max_torch: str | None = None,
    min_python: str | None = None,
    bf16_cuda: bool = False,
    tpu: bool = False,
    mps: bool | None = None,
    skip_windows: bool = False,
    standalone: bool = False,
    deepspeed: bool = False,
    dynamo: bool = False,
    rich: bool = False,
    omegaconf: bool = False,
    psutil: bool = False,
    sklearn: bool = False,
    onnx: bool = False,
    linux_only: bool = False,
    onnxscript: bool = False,
    tensorrt: bool = False,
) -> tuple[list[str], dict[str, bool]]:
    """The reasons to skip a test, and pytest's marks for it.

    Args:
        min_cuda_gpus: so many GPUs that JAX sees.
        min_torch, max_torch, min_python: versions; the greatest torch is excluded.
        bf16_cuda: a GPU; XLA computes bfloat16 on each that it drives.
        tpu: a TPU.
        mps: True: one of Apple's GPUs; False: none.
        skip_windows, linux_only: the operating system.
        standalone: ``PL_RUN_STANDALONE_TESTS=1``.
        deepspeed: never here.
        dynamo: ``torch.compile``.
        rich, omegaconf, psutil, sklearn, onnx, onnxscript, tensorrt: packages.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    missing = {
        f"GPUs>={min_cuda_gpus}": min_cuda_gpus > 0 and CUDAAccelerator.auto_device_count() < min_cuda_gpus,
        f"torch>={min_torch}, {torch.__version__} installed": bool(min_torch) and not _torch(operator.ge, min_torch),
        f"torch<{max_torch}, {torch.__version__} installed": bool(max_torch) and not _torch(operator.lt, max_torch),
        f"python>={min_python}": min_python is not None and _older(python, min_python),
        "CUDA device bf16": bf16_cuda and not CUDAAccelerator.is_available(),
        "unimplemented on Windows": skip_windows and sys.platform == "win32",
        "only supported on Linux": linux_only and platform.system() != "Linux",
        "TPU": tpu and not XLAAccelerator.is_available(),
        "MPS" if mps else "not MPS": mps is not None and mps != MPSAccelerator.is_available(),
        "Standalone execution": standalone and os.getenv("PL_RUN_STANDALONE_TESTS", "0") != "1",
        "Deepspeed": deepspeed,
        "torch dynamo": dynamo and not is_dynamo_supported(),
        "Rich": rich and not RequirementCache("rich>=10.2.2"),
        "omegaconf": omegaconf and not RequirementCache("omegaconf"),
        "psutil": psutil and not RequirementCache("psutil"),
        "scikit-learn": sklearn and not RequirementCache("scikit-learn"),
        "onnx": onnx and not RequirementCache("onnx"),
        "onnxscript": onnxscript and not RequirementCache("onnxscript"),
        "torch-tensorrt": tensorrt and not RequirementCache("torch_tensorrt"),
    }
    wanted = {"min_cuda_gpus": min_cuda_gpus > 0, "tpu": tpu, "standalone": standalone}
    return [reason for reason, is_missing in missing.items() if is_missing], {name: True for name, on in wanted.items() if on}


def _torch(compare: object, version: str) -> bool:
    return compare_version("torch", compare, version, use_base_version=True)  # pyright: ignore[reportArgumentType]


def _older(found: str, wanted: str) -> bool:
    return tuple(map(int, found.split("."))) < tuple(map(int, wanted.split(".")))
