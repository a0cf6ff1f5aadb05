"""Models that people train, small enough for a step of some tenths of a second on one core; each with a batch of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[pl.LightningModule, tuple[Tensor, ...]]
ZOO: dict[str, Callable[[], Made]] = {}


def model(function: Callable[[], Made]) -> Callable[[], Made]:
    ZOO[function.__name__] = function
    return function


class Task(pl.LightningModule):
    """A net that is trained on ``loss(net(*inputs), target)``; the last tensor of a batch is the target."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], sgd: bool = False) -> None:
        super().__init__()
        self.net = net
        self.loss = loss
        self.sgd = sgd

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        *inputs, target = batch
        return self.loss(self.net(*inputs), target)

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.net(*batch[:-1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind: Any = torch.optim.SGD if self.sgd else torch.optim.AdamW
        return kind(self.parameters(), **({"lr": 1e-3, "momentum": 0.9} if self.sgd else {"lr": 1e-4}))


def classes(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def images(batch: int, size: int, channels: int = 3, labels: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, channels, size, size), torch.randint(labels, (batch,))


def tokens(batch: int, length: int, words: int = 1000) -> tuple[Tensor, Tensor]:
    return torch.randint(words, (batch, length)), torch.randint(words, (batch, length))


# -- transformers ----------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Token or patch embeddings, layers of torch's own, a head."""

    def __init__(self, dim: int, depth: int, heads: int, length: int, *, words: int = 1000, causal: bool = False) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(words, dim), nn.Parameter(0.02 * torch.randn(length, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head, self.causal = nn.Linear(dim, words), causal

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        return self.head(self.layers(self.embedding(x) + self.place, mask, is_causal=self.causal))


@model
def gpt() -> Made:
    return Task(Transformer(256, 4, 8, 256, causal=True), classes), tokens(8, 256)


@model
def bert_tiny() -> Made:
    return Task(Transformer(128, 2, 2, 128), classes), tokens(32, 128)


@model
def vit_tiny() -> Made:
    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.place = nn.Conv2d(3, 192, 8, 8), nn.Parameter(0.02 * torch.randn(64, 192))
            layer = nn.TransformerEncoderLayer(192, 3, 768, 0.0, "gelu", batch_first=True, norm_first=True)
            self.layers, self.head = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(192, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(self.patches(x).flatten(2).mT + self.place).mean(1))

    return Task(Vit(), F.cross_entropy), images(32, 64)


@model
def mixture_of_experts() -> Made:
    class Experts(nn.Module):
        """Two of eight experts for each token, all of them computed: the usual form without a kernel."""

        def __init__(self, dim: int = 128, experts: int = 8) -> None:
            super().__init__()
            self.router = nn.Linear(dim, experts)
            self.up = nn.Parameter(0.02 * torch.randn(experts, dim, 2 * dim))
            self.down = nn.Parameter(0.02 * torch.randn(experts, 2 * dim, dim))

        def forward(self, x: Tensor) -> Tensor:
            best = self.router(x).softmax(-1).topk(2)
            weights = torch.zeros(*x.shape[:-1], self.up.shape[0]).scatter(-1, best.indices, best.values)
            inner = F.gelu(torch.einsum("btd,edf->betf", x, self.up))
            return x + torch.einsum("betf,efd,bte->btd", inner, self.down, weights)

    net = nn.Sequential(nn.Embedding(1000, 128), Experts(), nn.LayerNorm(128), Experts(), nn.Linear(128, 1000))
    return Task(net, classes), tokens(8, 128)


@model
def t5_small() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    class T5(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = T5Config(vocab_size=8000, d_model=512, d_ff=2048, num_layers=6, num_heads=8, dropout_rate=0.0)
            self.t5 = T5ForConditionalGeneration(config)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.t5(input_ids=x, decoder_input_ids=y).logits

    return Task(T5(), classes), (*tokens(4, 64, 8000), torch.randint(8000, (4, 64)))


# -- images ----------------------------------------------------------------------------------------------------------------


def conv(before: int, after: int, size: int = 3, stride: int = 1, groups: int = 1, act: Any = nn.ReLU) -> nn.Sequential:
    """Convolution, BatchNorm, activation."""
    layers = [nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(after)]
    return nn.Sequential(*layers, *([act()] if act else []))


class Added(nn.Module):
    """``after(x + body(x))``, or of ``side(x)``."""

    def __init__(self, body: nn.Module, side: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.side, self.after = body, side or nn.Identity(), after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.side(x) + self.body(x))


def head(channels: int, labels: int = 10) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, labels)]


def resnet_18() -> nn.Module:
    layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for after in (64, 128, 256, 512):
        for stride in (1 if after == 64 else 2, 1):
            body = nn.Sequential(conv(before, after, 3, stride), conv(after, after, act=None))
            side = conv(before, after, 1, stride, act=None) if stride == 2 else None
            layers.append(Added(body, side, nn.ReLU()))
            before = after
    return nn.Sequential(*layers, *head(512))


@model
def resnet_18_at_64() -> Made:
    return Task(resnet_18(), F.cross_entropy, sgd=True), images(32, 64)


@model
def resnet_18_at_128() -> Made:
    return Task(resnet_18(), F.cross_entropy, sgd=True), images(8, 128)


class Squeeze(nn.Module):
    """Channels weighted by what a small net says of their means."""

    def __init__(self, channels: int, inner: int, gate: Any = nn.Sigmoid) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inner, 1), nn.ReLU(), nn.Conv2d(inner, channels, 1), gate()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.net(x)


def inverted(before: int, after: int, inner: int, size: int, stride: int, act: Any, squeeze: nn.Module | None) -> nn.Module:
    wide = [conv(before, inner, 1, act=act)] if inner != before else []
    parts = [
        *wide,
        conv(inner, inner, size, stride, inner, act),
        *([squeeze] if squeeze else []),
        conv(inner, after, 1, act=None),
    ]
    body = nn.Sequential(*parts)
    return Added(body) if stride == 1 and before == after else body


@model
def efficientnet_b0() -> Made:
    stages = [(1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2), (6, 112, 3, 5, 1), (6, 192, 4, 5, 2)]
    layers: list[nn.Module] = [conv(3, 32, 3, 2, act=nn.SiLU)]
    before = 32
    for expand, after, count, size, stride in (*stages, (6, 320, 1, 3, 1)):
        for index in range(count):
            inner = before * expand
            squeeze = Squeeze(inner, max(before // 4, 1))
            layers.append(inverted(before, after, inner, size, stride if index == 0 else 1, nn.SiLU, squeeze))
            before = after
    return Task(nn.Sequential(*layers, conv(320, 1280, 1, act=nn.SiLU), *head(1280)), F.cross_entropy), images(8, 96)


@model
def mobilenet_v3() -> Made:
    stages = [
        *((3, 16, 16, True, nn.ReLU, 2), (3, 72, 24, False, nn.ReLU, 2), (3, 88, 24, False, nn.ReLU, 1)),
        *((5, 96, 40, True, nn.Hardswish, 2), (5, 240, 40, True, nn.Hardswish, 1), (5, 240, 40, True, nn.Hardswish, 1)),
        *((5, 120, 48, True, nn.Hardswish, 1), (5, 144, 48, True, nn.Hardswish, 1), (5, 288, 96, True, nn.Hardswish, 2)),
        *((5, 576, 96, True, nn.Hardswish, 1), (5, 576, 96, True, nn.Hardswish, 1)),
    ]
    layers: list[nn.Module] = [conv(3, 16, 3, 2, act=nn.Hardswish)]
    before = 16
    for size, inner, after, squeezes, act, stride in stages:
        squeeze = Squeeze(inner, inner // 4, nn.Hardsigmoid) if squeezes else None
        layers.append(inverted(before, after, inner, size, stride, act, squeeze))
        before = after
    return Task(nn.Sequential(*layers, conv(96, 576, 1, act=nn.Hardswish), *head(576)), F.cross_entropy), images(16, 128)


@model
def convnext_tiny() -> Made:
    class Norm(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.movedim(1, -1)).movedim(-1, 1)

    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), Norm(96)]
    before = 96
    for dim, count in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if dim != before:
            layers += [Norm(before), nn.Conv2d(before, dim, 2, 2)]
        for _ in range(count):
            inner = [nn.Conv2d(dim, 4 * dim, 1), nn.GELU(), nn.Conv2d(4 * dim, dim, 1)]
            layers.append(Added(nn.Sequential(nn.Conv2d(dim, dim, 7, padding=3, groups=dim), Norm(dim), *inner)))
        before = dim
    return Task(nn.Sequential(*layers, *head(768)), F.cross_entropy), images(4, 64)


class UNet(nn.Module):
    """A U-Net of two or three dims; with ``steps`` it knows a time of diffusion, and looks around at its smallest image."""

    def __init__(self, dims: int, widths: Sequence[int], channels: int, *, steps: bool = False) -> None:
        super().__init__()
        convolution: Any = (nn.Conv2d, nn.Conv3d)[dims - 2]
        up: Any = (nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 2]
        norm: Any = nn.GroupNorm
        self.pool: Any = (F.max_pool2d, F.max_pool3d)[dims - 2]

        def double(before: int, after: int) -> nn.Module:
            parts: list[nn.Module] = []
            for first in (before, after):
                parts += [convolution(first, after, 3, padding=1), norm(4, after), nn.ReLU()]
            return nn.Sequential(*parts)

        pairs = list(itertools.pairwise(widths))
        self.first, self.last = double(channels, widths[0]), convolution(widths[0], channels, 1)
        self.down = nn.ModuleList([double(a, b) for a, b in pairs])
        self.up = nn.ModuleList([up(b, a, 2, 2) for a, b in pairs[::-1]])
        self.joined = nn.ModuleList([double(2 * a, a) for a, _ in pairs[::-1]])
        self.time = nn.Sequential(nn.Linear(1, 64), nn.SiLU(), nn.Linear(64, widths[-1])) if steps else None
        self.attention = nn.MultiheadAttention(widths[-1], 4, batch_first=True) if steps else None

    def forward(self, x: Tensor, step: Tensor | None = None) -> Tensor:
        kept = [self.first(x)]
        for layer in self.down:
            kept.append(layer(self.pool(kept[-1], 2)))
        y = kept.pop()
        if self.time is not None and self.attention is not None and step is not None:
            y = y + self.time(step)[..., None, None]
            flat = y.flatten(2).mT
            y = y + self.attention(flat, flat, flat, need_weights=False)[0].mT.reshape(y.shape)
        for up, joined in zip(self.up, self.joined, strict=True):
            y = joined(torch.cat([kept.pop(), up(y)], 1))
        return self.last(y)


@model
def unet_at_64() -> Made:
    x = torch.randn(8, 3, 64, 64)
    return Task(UNet(2, (32, 64, 128), 3), F.mse_loss), (x, x)


@model
def unet_3d() -> Made:
    x = torch.randn(2, 1, 32, 32, 32)
    return Task(UNet(3, (16, 32, 64), 1), F.mse_loss), (x, x)


@model
def diffusion_unet() -> Made:
    x = torch.randn(8, 3, 32, 32)
    return Task(UNet(2, (64, 128, 256), 3, steps=True), F.mse_loss), (x, torch.rand(8, 1), x)


@model
def gan() -> Made:
    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            up: list[nn.Module] = [nn.Linear(64, 128 * 49), nn.Unflatten(1, (128, 7, 7)), nn.ReLU()]
            up += [nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 1, 4, 2, 1), nn.Tanh()]
            down = [nn.Conv2d(1, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2)]
            self.net, self.judge = nn.Sequential(*up), nn.Sequential(*down, nn.Flatten(), nn.Linear(128 * 49, 1))

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            noise, real = batch
            makes, judges = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
            ones = torch.ones(len(real), 1)
            loss = F.binary_cross_entropy_with_logits(self.judge(self.net(noise)), ones)
            makes.zero_grad()
            self.manual_backward(loss)
            makes.step()
            fake = F.binary_cross_entropy_with_logits(self.judge(self.net(noise).detach()), 0 * ones)
            both = fake + F.binary_cross_entropy_with_logits(self.judge(real), ones)
            judges.zero_grad()
            self.manual_backward(both)
            judges.step()
            return {"loss": loss + both}

        def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(net.parameters(), 2e-4) for net in (self.net, self.judge)]

    return Gan(), (torch.randn(64, 64), torch.randn(64, 1, 28, 28))


# -- others ----------------------------------------------------------------------------------------------------------------


@model
def mlp() -> Made:
    net = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return Task(net, F.cross_entropy), (torch.randn(128, 784), torch.randint(10, (128,)))


@model
def gnn() -> Made:
    class Gnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2 * 64, 64) for _ in range(3)])
            self.head = nn.Linear(64, 4)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            for layer in self.layers:
                around = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
                x = F.relu(layer(torch.cat([x, around], 1)))
            return self.head(x)

    return Task(Gnn(), F.cross_entropy), (torch.randn(2000, 64), torch.randint(2000, (2, 16_000)), torch.randint(4, (2000,)))


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embedding, self.cells, self.head = nn.Embedding(1000, 128), kind(128, 256, 2, batch_first=True), nn.Linear(256, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.embedding(x))[0])


@model
def lstm() -> Made:
    return Task(Recurrent(nn.LSTM), classes), tokens(16, 64)


@model
def gru() -> Made:
    return Task(Recurrent(nn.GRU), classes), tokens(16, 64)


@model
def wavenet() -> Made:
    class Wavenet(nn.Module):
        def __init__(self, dim: int = 48) -> None:
            super().__init__()
            self.first, self.last = nn.Conv1d(1, dim, 1), nn.Conv1d(dim, 1, 1)
            self.gates = nn.ModuleList([nn.Conv1d(dim, 2 * dim, 2, dilation=2**i) for i in range(8)])
            self.mixed = nn.ModuleList([nn.Conv1d(dim, 2 * dim, 1) for _ in range(8)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            total = torch.zeros_like(x)
            for gate, mixed in zip(self.gates, self.mixed, strict=True):
                left, right = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)  # pyright: ignore[reportIndexIssue]
                more, skip = mixed(left.tanh() * right.sigmoid()).chunk(2, 1)
                x, total = x + more, total + skip
            return self.last(F.relu(total))

    x = torch.randn(4, 1, 4000)
    return Task(Wavenet(), F.mse_loss), (x, x)
