"""The summaries that callbacks print."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich import get_console, reconfigure

from torch_compat.callbacks import ModelSummary, RichModelSummary
from torch_compat.core.module import LightningModule


class _Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 2).requires_grad_(False)
        self.example_input_array = torch.zeros(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _trainer(is_global_zero: bool = True) -> Any:
    return SimpleNamespace(is_global_zero=is_global_zero)


def test_summary_is_logged_on_process_zero(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        ModelSummary(max_depth=2).on_fit_start(_trainer(is_global_zero=False), _Net())
        assert caplog.text == ""
        ModelSummary(max_depth=2).on_fit_start(_trainer(), _Net())
    assert "body.0 | Linear" in caplog.text and "[3, 8]" in caplog.text
    assert "40        Trainable params" in caplog.text and "18        Non-trainable params" in caplog.text


def test_depth_zero_is_no_summary(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        ModelSummary(max_depth=0).on_fit_start(_trainer(), _Net())
    assert caplog.text == ""


def test_rich_summary_is_printed() -> None:
    before, screen = dict(get_console().__dict__), io.StringIO()
    try:
        reconfigure(file=screen, width=160)
        RichModelSummary(max_depth=2, header_style="bold").on_fit_start(_trainer(), _Net())
    finally:
        get_console().__dict__.update(before)
    text = screen.getvalue()
    for part in ("body.0", "Linear", "[3, 4]", "Trainable params: 40", "Non-trainable params: 18", "Modules in train mode: 4"):
        assert part in text, part


def test_arguments_reach_an_overridden_summarize() -> None:
    seen: dict[str, Any] = {}

    class Mine(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, *args: Any, **kwargs: Any) -> None:
            seen.update(kwargs, headers=[header for header, _ in summary_data])

    Mine(style="mine").on_fit_start(_trainer(), _Net())
    assert seen["style"] == "mine" and seen["total_flops"] > 0
    assert seen["headers"] == [" ", "Name", "Type", "Params", "Mode", "FLOPs", "In sizes", "Out sizes"]
