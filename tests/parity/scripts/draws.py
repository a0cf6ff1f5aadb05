"""Random numbers that torch draws in steps, on one CPU device: its own, and its generator is in every hook where it would be."""

from __future__ import annotations

import math
import random
from typing import Any, cast

import draws_in_loops  # noqa: F401
import numpy as np
import torch
import torch.nn.functional as F
from draws_models import Drawing, Places, fit, perceptron, rows, seed
from recording import GLOBAL_BATCH, Run, case, main
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


@case
def dropout(run: Run) -> None:
    trainer = fit(run, perceptron(), max_epochs=3)
    module = trainer.lightning_module
    trainer.test(module, run.loader(*rows(24)), verbose=False)
    predicted = cast(Any, trainer.predict(module, run.loader(*rows(24))))
    run.note("predicted", torch.cat(predicted))


@case
def accumulated_gradients(run: Run) -> None:
    fit(run, perceptron(), accumulate_grad_batches=2)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = self.encoder(x).chunk(2, -1)
        return self.decoder(torch.distributions.Normal(mean, deviation.exp()).rsample())


@case
def reparametrized_samples(run: Run) -> None:
    fit(run, Autoencoder())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.net, self.head = kind(2, 6, 3, dropout=0.3, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x.view(-1, 4, 2))[0][:, -1])


@case
def between_recurrent_layers(run: Run) -> None:
    fit(run, Recurrent(nn.LSTM))


@case
def between_gated_recurrent_layers(run: Run) -> None:
    fit(run, Recurrent(nn.GRU))


class Attention(nn.Module):
    def __init__(self, layers: int, kind: str = "layer") -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True, norm_first=True)
        norm = nn.LayerNorm(8)
        self.layers = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False) if kind == "layer" else None
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.flip(1), x.roll(1, 1)], 1)
        if self.layers is not None:
            return self.head(self.layers(x)[:, 0])
        attended = self.attention(x, x, x)[0] + self.attention(x, x, x, need_weights=False)[0]
        return self.head((attended + F.scaled_dot_product_attention(x, x, x, dropout_p=0.4))[:, 0])


@case
def encoder_layers(run: Run) -> None:
    fit(run, Attention(2))


@case
def layers_in_a_loop(run: Run) -> None:
    fit(run, Attention(16))


@case
def attention(run: Run) -> None:
    fit(run, Attention(0, "attention"))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout2d(self.conv(x.view(-1, 2, 2, 2)), 0.3)
        hidden = F.alpha_dropout(F.dropout(hidden, 0.2).permute(2, 0, 3, 1), 0.1, training=True).permute(1, 3, 0, 2)
        return self.head(F.feature_alpha_dropout(hidden, 0.2, training=True).flatten(1))


@case
def channels(run: Run) -> None:
    fit(run, Images())


@case
def default_generator_by_name(run: Run) -> None:
    def loss(self: Drawing, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.default_generator) + torch.empty(8).uniform_(
            generator=torch.default_generator
        )
        order = torch.randperm(len(x), generator=torch.default_generator)
        return F.mse_loss(self.net(x + noise)[order], y[order]) + torch.rand(())

    fit(run, nn.Linear(8, 2), loss)


@case
def slopes_that_values_count(run: Run) -> None:
    fit(run, nn.Sequential(nn.Linear(8, 16), nn.RReLU(), nn.Dropout(0.2), nn.Linear(16, 2)))


@case
def distributions_that_values_count(run: Run) -> None:
    def loss(self: Drawing, x: Tensor, y: Tensor) -> Tensor:
        rates = F.softplus(self.net(x)) + 0.1
        drawn = torch.distributions.Gamma(rates, 1.0).rsample() + torch.distributions.Beta(rates, rates).rsample()
        counts = torch.poisson(rates.detach()) + torch.binomial(torch.full_like(y, 5.0), torch.full_like(y, 0.4))
        return F.mse_loss(drawn, y) + (counts * self.net(x)).mean() + torch.distributions.Dirichlet(rates).rsample().mean()

    fit(run, nn.Linear(8, 2), loss)


@case
def noise_of_a_diffusion(run: Run) -> None:
    def loss(self: Drawing, x: Tensor, y: Tensor) -> Tensor:
        time = torch.randint(0, 100, (x.shape[0],))
        noise = torch.randn_like(x)
        return F.mse_loss(self.net(x * (1 - time[:, None] / 100) + noise * time[:, None] / 100), y)

    fit(run, nn.Linear(8, 2), loss)


@case
def sampled_actions(run: Run) -> None:
    def loss(self: Drawing, x: Tensor, y: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=self.net(x))
        action = policy.sample()
        several = torch.multinomial(policy.probs.detach().float(), 2)  # pyright: ignore[reportAttributeAccessIssue]
        again = torch.multinomial(torch.ones(3, 5), 7, replacement=True)
        gates = torch.bernoulli(torch.sigmoid(self.net(x)).detach()) + F.gumbel_softmax(self.net(x), hard=True)
        reward = y[:, 0] + several[:, 0] + again.float().mean()
        return -(policy.log_prob(action) * reward).mean() + (gates * self.net(x)).mean()

    fit(run, nn.Linear(8, 2), loss)


@case
def every_distribution(run: Run) -> None:
    def loss(self: Drawing, x: Tensor, y: Tensor) -> Tensor:
        drawn = [
            torch.rand(5),
            torch.rand_like(x.t()).t()[0],
            torch.empty(3, 7).uniform_(-2, 3),
            torch.empty(40).normal_(3, 2),
            torch.empty(40)[::3].normal_(1, 2),
            torch.normal(x, 0.5),
            torch.normal(0.3, x.abs() + 1),
            torch.normal(x, x.abs() + 1),
            torch.empty(20).exponential_(0.5),
            torch.empty(20).geometric_(0.3),
            torch.empty(20).log_normal_(0.1, 0.2),
            torch.empty(20).cauchy_(0.1, 0.2).clamp(-5, 5),
            torch.empty(20).random_(3, 9),
            torch.empty(20, dtype=torch.int32).random_() % 7,
            torch.randint(-3, 900, (6,)),
            torch.randint_like(y, 5),
            torch.randperm(11)[:4],
            torch.empty(4, 5).bernoulli_(torch.linspace(0, 1, 5)),
            torch.randn(3, dtype=torch.complex64).abs(),
            torch.randn(33, dtype=torch.bfloat16),
            torch.randn(33, dtype=torch.float64),
            torch.native_dropout(y, 0.5, True)[0],
        ]
        return F.mse_loss(self.net(x), y) * torch.stack([one.float().mean() for one in drawn]).abs().sum()

    fit(run, nn.Linear(8, 2), loss)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def block(self, x: Tensor, layer: nn.Module) -> Tensor:
        return F.dropout(layer(F.dropout(x, 0.1)).relu(), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = cast(Tensor, checkpoint(self.block, x, self.first, use_reentrant=False))
        x = cast(Tensor, checkpoint(self.block, x, self.second, use_reentrant=True))
        return self.head(F.dropout(x, 0.1))


@case
def recomputed(run: Run) -> None:
    fit(run, Checkpointed())


@case
def generator_set_back(run: Run) -> None:
    def loss(self: Drawing, x: Tensor, y: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            inside = torch.rand(3)
        torch.randn(5)  # of no use but to move the generator
        state = torch.get_rng_state()
        dropped = F.dropout(self.net(x), 0.2)
        torch.set_rng_state(state)
        again = F.dropout(self.net(x), 0.2) + torch.rand(2)
        torch.set_rng_state(state)
        return F.mse_loss(dropped + again, y) + inside.mean() + torch.rand(1).mean()

    fit(run, nn.Linear(8, 2), loss)


@case
def draws_of_the_host_between(run: Run) -> None:
    def loss(self: Drawing, x: Tensor, y: Tensor) -> Tensor:
        out = F.dropout(self.net(x), 0.2) * random.random() + np.random.rand()
        if torch.rand(1).item() < 0.5:
            out = out + torch.randn(2)
        return F.mse_loss(F.dropout(out, 0.3), y) * (1 + torch.rand(()))

    fit(run, nn.Linear(8, 2), loss)


@case
def numbers_that_python_asks_for(run: Run) -> None:
    """Drawn before the step for Python, and in it: an entry, a place, arguments of ``math``."""

    def loss(self: Drawing, x: Tensor, y: Tensor) -> Tensor:
        time = torch.randint(0, 10, (1,)).item()
        rate = (torch.linspace(0, 1, 10)[time] + torch.full((len(x),), time).float().mean() / 10) / 2
        x = F.dropout(x, 0.2)
        begin = int(torch.randint(0, 5, size=(1,)).item())
        window = x[:, begin : begin + 4].mean(1, keepdim=True)
        ratio = torch.empty(1).uniform_(0.5, 2.0).item()
        x = x * math.exp(-ratio) + window * math.sqrt(ratio)
        angle = math.radians(float(torch.empty(1).uniform_(-30.0, 30.0).item()))
        x = x + torch.tensor([math.cos(angle), math.sin(angle)]).sum()
        mixed = 0.7 * ratio + 0.3
        self.log("ratio", mixed)
        return F.mse_loss(F.dropout(self.net(x * mixed), 0.3), y) * (rate + 0.5)

    fit(run, nn.Linear(8, 2), loss)


@case
def numbers_that_python_asks_for_in_double_precision(run: Run) -> None:
    """Whose default dtype is that of what is drawn, in steps alone."""

    def loss(self: Drawing, x: Tensor, y: Tensor) -> Tensor:
        ratio = torch.empty(1).uniform_(0.5, 2.0).item()
        return F.mse_loss(self.net(x * math.exp(-ratio)), y) * torch.rand(1).item()

    fit(run, nn.Linear(8, 2), loss, precision="64-true")


@case
def numbers_that_python_decides_by(run: Run) -> None:
    def loss(self: Drawing, x: Tensor, y: Tensor) -> Tensor:
        x = F.dropout(x, 0.2)
        if torch.rand(1) < 0.5:
            x = x.flip(1)
        for one in torch.randperm(2).tolist():
            x = x.tanh() if one else x + 0.1
        width = int(torch.randint(2, 4, (1,)))
        return F.mse_loss(self.net(x), y) + x[:, :width].mean().abs()

    fit(run, nn.Linear(8, 2), loss, max_epochs=3)


@case
def numbers_that_python_asks_for_in_a_window(run: Run) -> None:
    def loss(self: Drawing, x: Tensor, y: Tensor) -> Tensor:
        share = torch.rand(1).item()
        x = x * share + x.flip(0) * (1 - share)
        if torch.rand(1).item() < 0.5:
            x = x + torch.randn(8)
        return F.mse_loss(self.net(x), y)

    fit(run, perceptron(), loss, accumulate_grad_batches=2)


@case
def numbers_that_python_asks_for_after_draws_of_another_order(run: Run) -> None:
    """Torch draws in the order of memory, and for tensors in an order of their own by another kernel."""

    def loss(self: Drawing, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.empty(8, len(x)).t().normal_()
        scale = torch.rand(1).item()
        return F.mse_loss(self.net(x + scale * noise), y)

    fit(run, nn.Linear(8, 2), loss)


class Adversaries(Drawing):
    def __init__(self, net: nn.Module, how: Any = None) -> None:
        super().__init__(net, how)
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, y = batch
        of_net, of_critic = cast(Any, self.optimizers())
        made = self.net(torch.randn(x.shape[0], 8))
        loss = F.softplus(-self.critic(made)).mean()
        of_net.zero_grad()
        self.manual_backward(loss)
        of_net.step()
        made = self.net(torch.randn(x.shape[0], 8)).detach()
        judged = F.softplus(self.critic(made)).mean() + F.softplus(-self.critic(y)).mean()
        of_critic.zero_grad()
        self.manual_backward(judged)
        of_critic.step()
        self.log_dict({"net": loss, "critic": judged})

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), 1e-2), torch.optim.Adam(self.critic.parameters(), 1e-2)


@case
def adversaries_by_hand(run: Run) -> None:
    fit(run, nn.Linear(8, 2), module=Adversaries)


class Words(Drawing):
    """Sequences of any length."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 2))
        self.words, self.gate = nn.Embedding(20, 8), nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        words, lengths = batch
        hidden = F.dropout(self.words(words), 0.3)
        hidden = hidden + F.dropout(self.gate(hidden.transpose(1, 2).contiguous().transpose(1, 2)).relu(), 0.1)
        mask = torch.arange(words.shape[1]) < lengths[:, None]
        loss = ((self.net(hidden).square().sum(-1) - torch.rand(words.shape)) * mask).sum() / mask.sum()
        self.log("loss", loss)
        return loss


def padded(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    return pad_sequence(samples, batch_first=True), torch.tensor([len(one) for one in samples])


@case
def lengths(run: Run) -> None:
    generator = torch.Generator().manual_seed(5)
    most = [2 + (5 * batch) % 13 for batch in range(8)]
    samples = [
        torch.randint(0, 20, (most[i // GLOBAL_BATCH] - (i % 2) * (i % GLOBAL_BATCH > 0),), generator=generator)
        for i in range(8 * GLOBAL_BATCH)
    ]
    model = Words()
    run.initialise(model)
    seed()
    loader = DataLoader(cast(Any, samples), batch_size=run.batch_size, collate_fn=padded)
    run.fit(model, run.trainer(max_epochs=1, callbacks=[Places(run)]), loader)


def language_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


@case
def language_model_of_a_library(run: Run) -> None:
    class Language(Drawing):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.net(input_ids=batch[0], labels=batch[0]).loss
            self.log("loss", loss)
            return loss

    model = Language(language_model())
    run.initialise(model)
    seed()
    words = torch.randint(0, 32, (48, 12), generator=torch.Generator().manual_seed(2))
    run.fit(model, run.trainer(max_epochs=2, callbacks=[Places(run)]), run.loader(words, shuffle=True))


@case
def whole_numbers_that_need_64_bits(run: Run) -> None:
    """They are drawn, and found too large, after others; the step runs eagerly, with the same ones."""

    def loss(model: Drawing, x: Tensor, y: Tensor) -> Tensor:
        found = F.mse_loss(model.net(F.dropout(x, 0.5)), y)
        return found + (torch.randint(0, 2**40, (3,)) % 5).sum() * found

    fit(run, nn.Linear(8, 2), loss)


if __name__ == "__main__":
    main()
