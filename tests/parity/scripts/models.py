"""Models that people train: a CNN with BatchNorm, a GPT, a recurrent net, mixed precision."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from basics import Classifier, class_data
from recording import Run, case, main
from torch import Tensor, nn


def image_data(n: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 12, 12, generator=generator)
    return x, (x.mean((2, 3)) * torch.tensor([1.0, 2.0, -1.0])).argmax(1)


def token_data(n: int = 64, length: int = 16, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 32, (n, 1), generator=generator)
    return ((start + 3 * torch.arange(length + 1)) % 32,)


class ConvNet(pl.LightningModule):
    """Two convolutions with BatchNorm, pooling, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        # No bias before BatchNorm: its gradient is zero, and Adam would make its rounding noise visible.
        self.net = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Without bias: that of the keys has a zero gradient, and Adam would make its rounding noise visible.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(pl.LightningModule):
    """Tied output layer; AdamW with two groups, cosine schedule with warm-up by steps."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32, bias=False)
        self.head.weight = self.tokens.weight

    def loss(self, batch: Any) -> Tensor:
        tokens = batch[0]
        x = self.tokens(tokens[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_perplexity", self.loss(batch).exp())

    def configure_optimizers(self) -> dict:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
        total = int(self.trainer.estimated_stepping_batches)
        cosine = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 3) * 0.5 * (1 + math.cos(math.pi * step / total))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


@case
def convolutions_and_batch_norm(run: Run) -> None:
    run.fit(ConvNet(), run.trainer(max_epochs=3), run.loader(*image_data(56)), run.loader(*image_data(24, 1)))


@case
def gpt(run: Run) -> None:
    trainer = run.trainer(max_epochs=3, gradient_clip_val=0.5, accumulate_grad_batches=2)
    run.fit(GPT(), trainer, run.loader(*token_data(80)), run.loader(*token_data(24, seed=1)))


@case
def made_in_configure_model(run: Run) -> None:
    """Initial weights are those that the hook's constructors draw, and what is drawn afterwards is what comes after them."""

    class Late(Classifier):
        def configure_model(self) -> None:
            if not hasattr(self, "scale"):
                self.net = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 600), nn.LayerNorm(600), nn.Linear(600, 3))
                self.scale = nn.Parameter(nn.init.trunc_normal_(torch.empty(8), 1.0, 0.02))
                nn.init.orthogonal_(self.net[0].weight)

        def on_fit_start(self) -> None:
            run.note("drawn", torch.rand(2))

        def step(self, batch: Any, prefix: str) -> Tensor:
            return super().step([batch[0] * self.scale, batch[1]], prefix)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    torch.manual_seed(3)
    model, trainer = Late(), run.trainer(max_epochs=2)
    trainer.fit(model, run.loader(*class_data()), run.loader(*class_data(32, 1)))
    run.finish(model, trainer)


@case
def recurrent(run: Run) -> None:
    class Recurrent(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
            self.out = nn.Linear(12, 3)
            self.net = nn.Identity()

        def step(self, batch: Any, prefix: str) -> Tensor:
            hidden, _ = self.lstm(batch[0].unsqueeze(1).expand(-1, 5, -1))
            loss = F.cross_entropy(self.out(hidden[:, -1]), batch[1])
            self.log(f"{prefix}_loss", loss)
            return loss

    run.fit(Recurrent(), run.trainer(max_epochs=2), run.loader(*class_data()), run.loader(*class_data(32, 1)))


@case
def bf16_mixed(run: Run) -> None:
    run.fit(Classifier(), run.trainer(max_epochs=3, precision="bf16-mixed"), run.loader(*class_data()))


@case
def bf16_true(run: Run) -> None:
    class Cast(Classifier):
        def step(self, batch: Any, prefix: str) -> Tensor:
            return super().step([batch[0].to(self.net[0].weight.dtype), batch[1]], prefix)

    run.fit(Cast(), run.trainer(max_epochs=2, precision="bf16-true"), run.loader(*class_data()))


@case
def adam_on_everything(run: Run) -> None:
    class Adam(ConvNet):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-3, amsgrad=True)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    run.fit(Adam(), run.trainer(max_epochs=2), run.loader(*image_data()), run.loader(*image_data(24, 1)))


if __name__ == "__main__":
    main()
