"""Export of a LightningModule to ONNX and TorchScript."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_compat.utilities.rank_zero import rank_zero_deprecation

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule


def export_onnx(module: LightningModule, file_path: Any, input_sample: Any, **kwargs: Any) -> Any:
    """See ``LightningModule.to_onnx``.

    Raises:
        ModuleNotFoundError: a package is missing.
        ValueError: neither a path nor ``dynamo=True``; no sample of the input.
    """
    _need("onnx", f"`{type(module).__name__}.to_onnx()` requires `onnx` to be installed.")
    if kwargs.get("dynamo", False):
        _need("onnxscript", "`LightningModule.to_onnx(dynamo=True)` requires `onnxscript` to be installed.")
    elif file_path is None:
        raise ValueError("`to_onnx(file_path=None)` returns the program only with `dynamo=True`; give a path or a buffer.")
    sample = _sample(
        module, input_sample, "Could not export to ONNX since neither `input_sample` nor `model.example_input_array` is set."
    )
    if not isinstance(sample, tuple):
        sample = (sample,)
    target = str(file_path) if isinstance(file_path, Path) else file_path
    with eval_mode(module):
        if target is None:
            return torch.onnx.export(module, sample, **kwargs)
        return torch.onnx.export(module, sample, target, **kwargs)


def export_torchscript(module: LightningModule, file_path: Any, method: str | None, example_inputs: Any, **kwargs: Any) -> Any:
    """See ``LightningModule.to_torchscript``.

    Raises:
        ValueError: ``method`` is neither ``"script"`` nor ``"trace"``; no example of the inputs to trace.
    """
    rank_zero_deprecation(
        "`LightningModule.to_torchscript` has been deprecated, as TorchScript is in PyTorch. Use `torch.export.export()` for"
        " model exporting instead."
    )
    if method not in ("script", "trace"):
        raise ValueError(f"The 'method' parameter only supports 'script' or 'trace', but value given was: {method}")
    if method == "trace":
        needed = "Choosing method=`trace` requires either `example_inputs` or `model.example_input_array` to be defined."
        example_inputs = _sample(module, example_inputs, needed)
    with eval_mode(module), _scripting(module):
        if method == "script":
            compiled = torch.jit.script(module, **kwargs)
        else:
            compiled = torch.jit.trace(func=module, example_inputs=example_inputs, **kwargs)
    if file_path is not None:
        torch.jit.save(compiled, str(file_path))
    return compiled


def _need(package: str, message: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(message, name=package)


def _sample(module: LightningModule, given: Any, refusal: str) -> Any:
    """The given input or the module's example, after the batch hooks, on the module's device."""
    sample = module.example_input_array if given is None else given
    if sample is None:
        raise ValueError(refusal)
    return module._apply_batch_transfer_handler(module._on_before_batch_transfer(sample))


@contextmanager
def eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """Eval mode in the block, then each submodule's own mode again."""
    modes = {submodule: submodule.training for submodule in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for submodule, mode in modes.items():
            submodule.training = mode


@contextmanager
def _scripting(module: LightningModule) -> Iterator[None]:
    """Let torch.jit read ``trainer`` of a module without a run, and forget it of a module with a run."""
    attached = module._trainer
    module._trainer = None
    type(module)._jit_is_scripting = True
    try:
        yield
    finally:
        type(module)._jit_is_scripting = False
        module._trainer = attached
