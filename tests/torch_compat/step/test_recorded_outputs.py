"""Models of transformers whose steps ask for hidden states or router logits, which they record by hooks of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaModel

from torch_compat import LightningModule, Trainer

IDS = torch.randint(1, 32, (6, 8), generator=torch.Generator().manual_seed(0))


class Recording(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.model = LlamaModel(LlamaConfig(**sizes))
        self.losses: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        states = self.model(input_ids=batch[0], output_hidden_states=True).hidden_states
        loss = torch.stack([state.square().mean() for state in states]).sum() + len(states)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_hidden_states_are_recorded_once_in_compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for executor in ("compiled", "eager"):
        monkeypatch.setenv("XLATRAIN_EXECUTOR", executor)
        module = Recording()
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, enable_checkpointing=False, **quiet)
        trainer.fit(module, DataLoader(TensorDataset(IDS), 2))
        hooks = [len(layer._forward_hooks) for layer in module.model.layers]
        found[executor] = [float(loss) for loss in module.losses]
        assert hooks == [1, 1] and found[executor][0] > 3, "two layers and the embeddings"
    assert found["compiled"] == pytest.approx(found["eager"], rel=1e-5)
