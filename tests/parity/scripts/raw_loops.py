"""Fabric: loops in the user's hands. Each loop runs as it is, and as a step that ``fabric.compile`` compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from basics import class_data, regression_data
from lightning.fabric import Fabric
from models import GPT
from recording import RecordingLogger, Run, case, main, numbers
from semantics_models import Reversible
from torch import Tensor, nn

Step = Callable[..., Any]


def fabric_of(run: Run, **options: Any) -> Fabric:
    fabric = Fabric(
        accelerator=run.accelerator,
        devices=run.devices,
        num_nodes=run.nodes,
        strategy=run.strategy,
        loggers=RecordingLogger(run),
        **options,
    )
    fabric.launch()
    return fabric


def compiled(fabric: Fabric, step: Step) -> Step:
    """``fabric.compile(step)``, which stock does not have."""
    return fabric.compile(step) if hasattr(fabric, "compile") else step


def as_it_is(fabric: Fabric, step: Step) -> Step:
    return step


def note_loss(run: Run, fabric: Fabric, loss: Tensor) -> None:
    """The loss of the global batch: the mean over processes."""
    run.record["losses"].append(numbers(fabric.all_reduce(loss.detach())))


def finish(run: Run, **modules: nn.Module) -> None:
    found = {f"{key}.{name}": value for key, module in modules.items() for name, value in module.state_dict().items()}
    run.weights = {name: value.detach().float().cpu().numpy() for name, value in found.items()}


# -- an image classifier ---------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Convolution, batch norm over the global batch, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


def images(n: int = 64) -> tuple[Tensor, Tensor]:
    x, y = class_data(n)
    return torch.cat([x, x.flip(1), x.roll(1, 1), -x, x * x], 1)[:, :36].reshape(n, 1, 6, 6), y


def train_classifier(run: Run, how: Callable[[Fabric, Step], Step]) -> None:
    fabric = fabric_of(run)
    net = Classifier()
    run.initialise(net)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = fabric.setup_dataloaders(run.loader(*images(), shuffle=True))
    norms = []

    def step(batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    step = how(fabric, step)
    for epoch in range(2):
        for i, batch in enumerate(loader):
            loss, norm = step(batch)
            scheduler.step()
            note_loss(run, fabric, loss)
            norms.append(numbers(norm))
            if i % 2 == 0:
                fabric.log("loss", fabric.all_reduce(loss.detach()), step=4 * epoch + i)
    model.eval()
    with torch.no_grad():
        run.note("logits", model(images(8)[0]))
    run.note("norms", norms)
    run.note("lr", optimizer.param_groups[0]["lr"])
    finish(run, model=model)


@case
def classifier(run: Run) -> None:
    train_classifier(run, as_it_is)


@case
def made_in_init_module(run: Run) -> None:
    fabric = fabric_of(run)
    fabric.seed_everything(5)
    with fabric.init_module():
        net = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 3))
    run.note("drawn", torch.rand(2))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    for x, y in fabric.setup_dataloaders(run.loader(*class_data())):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        note_loss(run, fabric, loss)
    finish(run, model=model)


@case
def classifier_compiled(run: Run) -> None:
    train_classifier(run, compiled)


# -- a language model with accumulation ------------------------------------------------------------------------------------


class Language(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train_gpt(run: Run, how: Callable[[Fabric, Step], Step]) -> None:
    fabric = fabric_of(run)
    net = Language()
    run.initialise(net)
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1))
    tokens = (torch.arange(96)[:, None] * 7 + torch.arange(13)[None] * torch.arange(1, 97)[:, None]) % 32
    loader = fabric.setup_dataloaders(run.loader(tokens))

    def step(batch: Any, i: int) -> Tensor:
        (tokens,) = batch
        accumulating = i % 3 != 2
        with fabric.no_backward_sync(model, enabled=accumulating):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            fabric.backward(loss / 3)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, clip_val=0.05)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss

    step = how(fabric, step)
    for i, batch in enumerate(loader):
        note_loss(run, fabric, step(batch, i))
    finish(run, model=model)


@case
def gpt(run: Run) -> None:
    train_gpt(run, as_it_is)


@case
def gpt_compiled(run: Run) -> None:
    train_gpt(run, compiled)


# -- a GAN -----------------------------------------------------------------------------------------------------------------


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8))


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def train_gan(run: Run, how: Callable[[Fabric, Step], Step]) -> None:
    fabric = fabric_of(run)
    both = nn.ModuleDict({"generator": Generator(), "critic": Critic()})
    run.initialise(both)
    g_optimizer = torch.optim.Adam(both["generator"].parameters(), 1e-2, betas=(0.5, 0.9))
    c_optimizer = torch.optim.RMSprop(both["critic"].parameters(), 1e-2)
    generator, g_optimizer = fabric.setup(both["generator"], g_optimizer)
    critic, c_optimizer = fabric.setup(both["critic"], c_optimizer)
    loader = fabric.setup_dataloaders(run.loader(*regression_data()))

    def step(batch: Any) -> tuple[Tensor, Tensor]:
        real, noise = batch
        ones = torch.ones(real.shape[0], 1)
        fake = generator(noise)
        c_loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        c_loss = c_loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), torch.zeros_like(ones))
        c_optimizer.zero_grad()
        fabric.backward(c_loss)
        c_optimizer.step()
        g_loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
        g_optimizer.zero_grad()
        fabric.backward(g_loss)
        g_optimizer.step()
        return c_loss, g_loss

    step = how(fabric, step)
    for batch in loader:
        for loss in step(batch):
            note_loss(run, fabric, loss)
    finish(run, generator=generator, critic=critic)


@case
def gan(run: Run) -> None:
    train_gan(run, as_it_is)


@case
def gan_compiled(run: Run) -> None:
    train_gan(run, compiled)


def train_reversible(run: Run, how: Callable[[Fabric, Step], Step]) -> None:
    fabric = fabric_of(run)
    net = nn.Sequential(Reversible(), nn.Linear(8, 3))
    run.initialise(net)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        fabric.backward(loss)
        optimizer.step()
        return loss

    step = how(fabric, step)
    for batch in fabric.setup_dataloaders(run.loader(*class_data(64))):
        note_loss(run, fabric, step(batch))
    finish(run, model=model)


@case
def reversible(run: Run) -> None:
    train_reversible(run, as_it_is)


@case
def reversible_compiled(run: Run) -> None:
    train_reversible(run, compiled)


# -- gradients that are asked for, and the optimizer's state ---------------------------------------------------------------


def train_critic(run: Run, loss_of: Callable[[nn.Module, Any, Tensor], Tensor]) -> None:
    fabric, net = fabric_of(run), Critic()
    run.initialise(net)
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), 1e-2))
    for real, _ in fabric.setup_dataloaders(run.loader(*regression_data())):
        loss = loss_of(model, optimizer, real)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        note_loss(run, fabric, loss)
    finish(run, model=model)


@case
def gradients_that_are_returned(run: Run) -> None:
    """They are not added to ``p.grad``: of a batch, of parameters, and of one that alone is to be filled."""

    def loss_of(model: nn.Module, optimizer: Any, real: Tensor) -> Tensor:
        last = model.module[2].weight
        given = real.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(given).square().mean(), given)
        out = model(real + 0.1 * slope.sign())
        size, slim = out.square().mean(), (out - 1).abs().mean()
        ones = [torch.autograd.grad(one, last, retain_graph=True)[0].norm() for one in (size, slim)]
        model(real).mean().backward(inputs=[last])
        run.note("filled", [param.grad is not None for param in model.parameters()])
        optimizer.zero_grad()
        return size + ones[0] / ones[1] * slim

    train_critic(run, loss_of)


@case
def gradient_penalty(run: Run) -> None:
    """A graph of gradients, beside calls that are differentiated before and after it."""

    def loss_of(model: nn.Module, optimizer: Any, real: Tensor) -> Tensor:
        given = real.clone().requires_grad_()
        before = model(real).mean()
        (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return before - model(0.5 * real).mean() + 10 * penalty

    train_critic(run, loss_of)


@case
def state_of_the_optimizer_by_hand(run: Run) -> None:
    """Units begin again, with their moments."""
    moments = run.record.setdefault("moments", [])

    def loss_of(model: nn.Module, optimizer: Any, real: Tensor) -> Tensor:
        first = model.module[0].weight
        if first in optimizer.state:
            moments.append(numbers(optimizer.state[first]["exp_avg"].abs().sum()))
            with torch.no_grad():
                first[:3] = 0.1
            for key in ("exp_avg", "exp_avg_sq"):
                optimizer.state[first][key][:3] = 0
        return (model(real) - real[:, :1]).square().mean()

    train_critic(run, loss_of)


if __name__ == "__main__":
    main()
