"""A module is served over HTTP before it is trained, and its answer compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_compat import Trainer
from torch_compat.demos import BoringModel
from torch_compat.serve import ServableModule, ServableModuleValidator


class Served(BoringModel, ServableModule):
    """Doubles what it is asked about, and says in which mode it does."""

    answer: Any = None

    def configure_payload(self) -> dict[str, Any]:
        return {"body": {"x": [1.0, 2.0]}}

    def configure_serialization(self) -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]:
        return {"x": torch.tensor}, {"y": torch.Tensor.tolist, "training": bool}

    def serve_step(self, x: torch.Tensor) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.served = [torch.is_grad_enabled(), self.layer.weight.shape == (2, 32)]
        return {"y": 2 * x, "training": self.training}

    def configure_response(self) -> dict[str, Any]:
        return {} if self.answer is None else self.answer


class Broken(Served):
    def serve_step(self, x: torch.Tensor) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ArithmeticError("no answer")


def train(module: BoringModel, callback: ServableModuleValidator) -> None:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=2, max_steps=1, limit_val_batches=0, callbacks=[callback], **options)
    trainer.fit(module)


@pytest.mark.parametrize("answer", [None, {"y": [2.0, 4.0], "training": False}])
def test_a_module_that_can_be_served(answer: Any) -> None:
    module, callback = Served(), ServableModuleValidator(port=0)
    module.answer = answer
    assert callback.successful is None
    train(module, callback)
    assert callback.successful is True
    assert callback.resp == {"y": [2.0, 4.0], "training": False}
    assert module.served == [False, True]
    assert module.training
    assert callback.state_dict() == {"successful": True, "optimization": None, "server": "fastapi"}


def test_another_answer_than_promised() -> None:
    module = Served()
    module.answer = {"y": [1.0]}
    with pytest.raises(RuntimeError, match=r"isn't servable: .* doesn't match the generated one .*'y': \[2\.0, 4\.0\]"):
        train(module, ServableModuleValidator(port=0))


def test_a_module_that_fails_may_be_trained() -> None:
    module, callback = Broken(), ServableModuleValidator(port=0, exit_on_failure=False)
    train(module, callback)
    assert callback.successful is False
    assert "ArithmeticError: no answer" in str(callback.error)
    assert module.trainer.global_step == 1


def test_what_cannot_be_checked() -> None:
    with pytest.raises(TypeError, match=r"should be subclass of ServableModule, found BoringModel"):
        train(BoringModel(), ServableModuleValidator(port=0))
    for argument in ({"optimization": "onnx"}, {"server": "sagemaker"}):
        with pytest.raises(NotImplementedError, match="leave it out"):
            ServableModuleValidator(**argument)
