"""Public architectures of transformers as LightningModules, for ``xlatrain preflight``: shapes only, nothing is downloaded.

xlatrain preflight --topology v5e:16x16 --output DIR benchmarks/scripts/preflight_models.py llama-8b --strategy fsdp
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
import transformers
from torch.utils.data import DataLoader, Dataset

from torch_compat.strategies import MeshStrategy


def llama(layers: int, hidden: int, mlp: int, heads: int, vocabulary: int) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )


CONFIGS = {
    "llama-8b": lambda: llama(32, 4096, 14336, 32, 128256),
    "llama-70b": lambda: llama(80, 8192, 28672, 64, 128256),
    "llama-tiny": lambda: llama(4, 256, 512, 8, 1000),
    "mixtral-8x7b": lambda: transformers.MixtralConfig(use_cache=False),
    "bert-large": lambda: transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "vit-huge": lambda: transformers.ViTConfig(
        hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120, patch_size=14, num_labels=1000
    ),
}


class Tokens(Dataset):
    """Rows of one shape; what is in them does not matter."""

    def __init__(self, model: str, length: int) -> None:
        self.model, self.length = model, length

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.model.startswith("vit"):
            return {"pixel_values": torch.zeros(3, 224, 224), "labels": torch.tensor(index % 10)}
        return {"input_ids": torch.full((self.length,), index % 100), "labels": torch.full((self.length,), index % 100)}


class Pretraining(pl.LightningModule):
    def __init__(self, model: str, remat: bool) -> None:
        super().__init__()
        self.kind, self.remat = model, remat

    def configure_model(self) -> None:
        config = CONFIGS[self.kind]()
        if self.kind.startswith("vit"):
            self.model = transformers.ViTForImageClassification(config)
        elif self.kind.startswith("bert"):
            self.model = transformers.BertForMaskedLM(config)
        else:
            self.model = transformers.AutoModelForCausalLM.from_config(config)
        if self.remat:
            self.model.activation_checkpointing_enable()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, weight_decay=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--mesh", nargs=2, type=int, metavar=("FSDP", "TENSOR"), help="in place of --strategy")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--remat", action="store_true")
    args = parser.parse_args()
    loader = DataLoader(Tokens(args.model, args.length), batch_size=args.batch_size)
    strategy = args.strategy
    if args.mesh:
        strategy = MeshStrategy({"fsdp": args.mesh[0], "tensor": args.mesh[1]})
    trainer = pl.Trainer(strategy=strategy, precision=args.precision, max_steps=100)
    trainer.fit(Pretraining(args.model, args.remat), loader)


if __name__ == "__main__":
    main()
