"""Availability of packages and versions, under Lightning's names.

API: ``lightning.pytorch.utilities.imports``, ``lightning.fabric.utilities.imports``.
"""

from __future__ import annotations

import importlib
import operator
import platform
import sys
from typing import Any

import torch
from lightning_utilities.core.imports import RequirementCache, compare_version, module_available, package_available

from torch_compat.utilities.rank_zero import rank_zero_warn

__all__ = ["RequirementCache", "compare_version", "module_available", "package_available", "rank_zero_warn"]

_IS_WINDOWS = platform.system() == "Windows"
_IS_INTERACTIVE = hasattr(sys, "ps1") or bool(sys.flags.interactive)
_PYTHON_GREATER_EQUAL_3_8_0 = sys.version_info >= (3, 8)
_PYTHON_GREATER_EQUAL_3_10_0 = sys.version_info >= (3, 10)
_PYTHON_GREATER_EQUAL_3_11_0 = sys.version_info >= (3, 11)

# The oldest torch here is 2.11 (2.9 under torch-xla): what asks for less is true.
_TORCH_GREATER_EQUAL_2_0 = _TORCH_GREATER_EQUAL_2_1 = _TORCH_GREATER_EQUAL_2_2 = _TORCH_GREATER_EQUAL_2_3 = True
_TORCH_GREATER_EQUAL_2_4 = _TORCH_GREATER_EQUAL_2_4_1 = _TORCH_GREATER_EQUAL_2_5 = _TORCH_GREATER_EQUAL_2_6 = True
_TORCH_GREATER_EQUAL_2_8 = True
_TORCH_EQUAL_2_4_0 = _TORCH_LESS_EQUAL_2_6 = False
_TORCH_EQUAL_2_8 = RequirementCache("torch>=2.8.0,<2.9.0")
_TORCH_EQUAL_2_9 = RequirementCache("torch>=2.9.0,<2.10.0")

_TORCHMETRICS_GREATER_EQUAL_0_8_0 = RequirementCache("torchmetrics>=0.8.0")
_TORCHMETRICS_GREATER_EQUAL_0_9_1 = RequirementCache("torchmetrics>=0.9.1")
_TORCHMETRICS_GREATER_EQUAL_0_11 = RequirementCache("torchmetrics>=0.11.0")
_TORCHMETRICS_GREATER_EQUAL_1_0_0 = RequirementCache("torchmetrics>=1.0.0")

_KINETO_AVAILABLE: bool = torch.profiler.kineto_available()
_OMEGACONF_AVAILABLE: bool = package_available("omegaconf")
_NUMPY_AVAILABLE = RequirementCache("numpy")
_PSUTIL_AVAILABLE = RequirementCache("psutil")
_REQUESTS_AVAILABLE = RequirementCache("requests")
_RICH_AVAILABLE = RequirementCache("rich>=10.2.2")
_TORCHVISION_AVAILABLE = RequirementCache("torchvision")
_MATPLOTLIB_AVAILABLE = RequirementCache("matplotlib")
_CLICK_AVAILABLE = RequirementCache("click")
_HYDRA_AVAILABLE = RequirementCache("hydra-core")
_ONNX_AVAILABLE = RequirementCache("onnx")
_ONNXSCRIPT_AVAILABLE = RequirementCache("onnxscript")
_TORCH_TRT_AVAILABLE = RequirementCache("torch_tensorrt")
_MPI4PY_AVAILABLE = RequirementCache("mpi4py")
_TENSORBOARD_AVAILABLE = RequirementCache("tensorboard")
_TENSORBOARDX_AVAILABLE = RequirementCache("tensorboardX")
_JSONARGPARSE_SIGNATURES_AVAILABLE = RequirementCache("jsonargparse[signatures]>=4.39.0")
_XLA_AVAILABLE = RequirementCache("torch_xla>=1.13", "torch_xla")
_XLA_GREATER_EQUAL_2_1 = RequirementCache("torch_xla>=2.1")
_XLA_GREATER_EQUAL_2_5 = RequirementCache("torch_xla>=2.5")
_BITSANDBYTES_AVAILABLE = RequirementCache("bitsandbytes")
_TRANSFORMER_ENGINE_AVAILABLE = RequirementCache("transformer_engine")
# DeepSpeed is never used here, installed or not: what asks first goes another way.
_DEEPSPEED_AVAILABLE = _DEEPSPEED_GREATER_EQUAL_0_16 = False


def _try_import_module(module_name: str) -> bool:
    """Whether a module can be imported; with a warning if it is there and its import fails."""
    try:
        importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == module_name.partition(".")[0]:
            return False
        rank_zero_warn(f"Import of {module_name} package failed for some compatibility issues:\n{error}")
        return False
    except ImportError as error:
        rank_zero_warn(f"Import of {module_name} package failed for some compatibility issues:\n{error}")
        return False
    return True


def __getattr__(name: str) -> Any:
    """``_TORCH_GREATER_EQUAL_1_13`` and the like, of versions that nobody has to ask for any more."""
    if name.startswith("_TORCH_GREATER_EQUAL_"):
        return compare_version("torch", operator.ge, ".".join(name.removeprefix("_TORCH_GREATER_EQUAL_").split("_")))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
