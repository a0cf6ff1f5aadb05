"""Models on meshes of sixteen devices: ``python -m tests.torch_compat.strategies.on_sixteen MODEL AXES …``.

Prints, for each mesh, by how much losses and weights after two steps differ from those of one device. Axes are JSON.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

from torch_compat import LightningModule, Trainer
from torch_compat.strategies import MeshStrategy
from xlatrain.mesh.mesh import DATA_AXES

ROWS, LENGTH = 32, 16
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 1}
_OWN: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True, "sliding_window": None},
    "DeepseekV3": {  # one layer without experts, four with
        **_LATENT, **_GROUPS, "num_hidden_layers": 5, "num_key_value_heads": 4, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip


class Causal(LightningModule):
    """Keeps its losses."""

    def __init__(self, family: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**_SIZES | _OWN[family])
        self.model = getattr(transformers, f"{family}ForCausalLM")(config).double()
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def trained(family: str, axes: dict[str, int]) -> Causal:
    """A model after two steps."""
    parts, devices = math.prod(axes.get(axis, 1) for axis in DATA_AXES), math.prod(axes.values())
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    strategy = MeshStrategy(axes, min_size=1) if devices > 1 else "auto"
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, precision="64-true", **quiet)
    tokens: Any = torch.randint(0, 64, (2 * ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    module = Causal(family)
    trainer.fit(module, DataLoader(tokens, ROWS // parts))
    return module


def main(family: str, *meshes: str) -> None:
    expected = trained(family, {})
    weights = expected.state_dict()
    for mesh in meshes:
        found = trained(family, json.loads(mesh))
        loss = max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
        weight = max(float((value - weights[name]).abs().max()) for name, value in found.state_dict().items())
        print("FOUND", json.dumps({"losses": len(found.losses), "loss": loss, "weight": weight}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
