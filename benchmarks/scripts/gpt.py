"""A step of a 4-layer GPT: the Trainer's, hand-written JAX's (``--lanes jax``) and eager torch's (``--lanes torch``)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from interleaved import Interleaved, Lane, parse_args, quiet_trainer, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LAYERS, WIDTH, HEADS, LENGTH, BATCH, N_TOKENS, LR = 4, 256, 8, 128, 8, 256, 3e-4


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(pl.LightningModule):
    def __init__(self, n_layers: int = LAYERS, width: int = WIDTH, n_heads: int = HEADS, length: int = LENGTH) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(N_TOKENS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(n_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, N_TOKENS, bias=False)
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        tokens, targets = batch
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.01)


def make_batches(n: int, batch: int = BATCH, length: int = LENGTH) -> TensorDataset:
    tokens = torch.randint(0, N_TOKENS, (n * batch, length + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def torch_lane(model: GPT) -> Lane:
    """Eager torch without any trainer."""
    model = copy.deepcopy(model)
    optimizer = model.configure_optimizers()

    def step(batch: Sequence[Tensor]) -> float:
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def jax_lane(model: GPT) -> Lane:
    """The same maths by hand."""
    from benchmarks.floors.gpt import make_step

    weights = {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
    step = make_step(weights, n_layers=len(model.blocks), n_heads=model.blocks[0].n_heads, lr=LR)
    return lambda batch: float(step(*(tensor.int().numpy() for tensor in batch)))


def main() -> None:
    args = parse_args()
    pl.seed_everything(0, verbose=False)
    model = GPT()
    data = make_batches(args.steps)
    timing = Interleaved(list(DataLoader(data, BATCH)))
    trainer = quiet_trainer(max_epochs=1, gradient_clip_val=1.0, callbacks=[timing])
    for name in args.lanes:
        timing.add(name, {"jax": jax_lane, "torch": torch_lane}[name](model))
    trainer.fit(model, DataLoader(data, BATCH))
    write(args.out, timing.result())


if __name__ == "__main__":
    main()
