"""The GPUs that ``devices=`` means, among those that JAX sees. API: ``lightning.fabric.utilities.device_parser``."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

from torch_compat.accelerators import CPUAccelerator, CUDAAccelerator, XLAAccelerator
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.types import _DEVICE


def _determine_root_gpu_device(gpus: list[_DEVICE] | None) -> _DEVICE | None:
    """The first of the GPUs; None without any.

    Raises:
        TypeError: no list.
    """
    if gpus is None:
        return None
    if not isinstance(gpus, list):
        raise TypeError("GPUs should be a list")
    if not gpus:
        raise AssertionError("GPUs should be a non-empty list")
    return gpus[0]


def _parse_gpu_ids(gpus: int | str | list[int] | None, include_cuda: bool = False, include_mps: bool = False) -> list[int] | None:
    """Indices of GPUs: of a number that many, of -1 all, of ``"0, 2"`` or a list those; None for 0 or none.

    Raises:
        TypeError: something else.
        MisconfigurationException: GPUs that are not there, or that are named twice.
    """
    _check_data_type(gpus)
    if gpus is None or (isinstance(gpus, int) and gpus == 0) or str(gpus).strip() in ("0", "[]"):
        return None
    wanted = _normalize_parse_gpu_string_input(gpus)
    ids = _normalize_parse_gpu_input_to_list(wanted, include_cuda, include_mps)
    if not ids:
        raise MisconfigurationException("GPUs requested but none are available; accelerator='cpu' runs without.")
    _check_unique(ids)
    return _sanitize_gpu_ids(ids, include_cuda, include_mps)


def _normalize_parse_gpu_string_input(s: int | str | list[int]) -> int | list[int]:
    if not isinstance(s, str):
        return s
    if s == "-1":
        return -1
    return [int(part) for part in s.split(",") if part.strip()] if "," in s else int(s.strip())


def _normalize_parse_gpu_input_to_list(
    gpus: int | list[int] | tuple[int, ...] | None, include_cuda: bool, include_mps: bool
) -> list[int] | None:
    if isinstance(gpus, MutableSequence | tuple):
        return list(gpus)
    if not gpus:
        return None
    return _get_all_available_gpus(include_cuda, include_mps) if gpus == -1 else list(range(gpus))


def _sanitize_gpu_ids(gpus: list[int], include_cuda: bool = False, include_mps: bool = False) -> list[int]:
    """``gpus``, all of which must be there."""
    available = _get_all_available_gpus(include_cuda, include_mps)
    if any(gpu not in available for gpu in gpus):
        raise MisconfigurationException(f"You requested gpu: {gpus}\n But your machine only has: {available}")
    return gpus


def _get_all_available_gpus(include_cuda: bool = False, include_mps: bool = False) -> list[int]:
    """Indices of the GPUs that JAX sees. Apple's are never driven."""
    return list(range(CUDAAccelerator.auto_device_count())) if include_cuda else []


def _check_unique(device_ids: list[int]) -> None:
    if len(device_ids) != len(set(device_ids)):
        raise MisconfigurationException("Device ID's (GPU) must be unique: name each once.")


def _check_data_type(device_ids: Any) -> None:
    message = "Device IDs (GPU/TPU) must be an int, a string, or a list or tuple of ints, found"
    if device_ids is None:
        raise TypeError(f"{message} None")
    if isinstance(device_ids, MutableSequence | tuple):
        for one in device_ids:
            if type(one) is not int:
                raise TypeError(f"{message} a sequence of {type(one).__name__}.")
    elif type(device_ids) not in (int, str):
        raise TypeError(f"{message} {device_ids!r}.")


def _select_auto_accelerator() -> str:
    """The accelerator that ``accelerator="auto"`` takes: the best that JAX sees."""
    if XLAAccelerator.is_available():
        return XLAAccelerator.name()
    return CUDAAccelerator.name() if CUDAAccelerator.is_available() else CPUAccelerator.name()
