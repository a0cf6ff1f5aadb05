"""Scripts as people write them: an agent that plays and learns in one step, a variational autoencoder."""

from __future__ import annotations

import random
from collections import deque, namedtuple
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
import wild_habits  # noqa: F401
import wild_kinds  # noqa: F401
import wild_numbers  # noqa: F401
import wild_stored  # noqa: F401
from basics import class_data
from recording import Run, case, main
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

Experience = namedtuple("Experience", ["state", "action", "reward", "done", "new_state"])


class Walk:
    """Walk along a line to its end: an environment without a package."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.reset()

    def reset(self) -> np.ndarray:
        self.position = np.array([0.0, self.rng.uniform()], dtype=np.float32)
        return self.position.copy()

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        self.position[0] += 0.25 if action == 1 else -0.25
        done = abs(self.position[0]) >= 1
        return self.position.copy(), float(self.position[0] >= 1), bool(done)


class ReplayBuffer:
    def __init__(self, capacity: int) -> None:
        self.buffer: deque[Experience] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self.buffer)

    def append(self, experience: Experience) -> None:
        self.buffer.append(experience)

    def sample(self, size: int) -> tuple[np.ndarray, ...]:
        indices = np.random.choice(len(self.buffer), size, replace=False)
        columns = zip(*[self.buffer[index] for index in indices], strict=True)
        states, actions, rewards, dones, next_states = (np.array(column) for column in columns)
        return states, actions, rewards.astype(np.float32), dones, next_states


class RLDataset(IterableDataset):
    def __init__(self, buffer: ReplayBuffer, size: int) -> None:
        self.buffer, self.size = buffer, size

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*self.buffer.sample(self.size), strict=True)


class Agent:
    def __init__(self, env: Walk, buffer: ReplayBuffer) -> None:
        self.env, self.buffer = env, buffer
        self.state = env.reset()

    @torch.no_grad()
    def play_step(self, net: nn.Module, epsilon: float = 0.0) -> tuple[float, bool]:
        if random.random() < epsilon:
            action = random.randrange(2)
        else:
            action = int(net(torch.tensor(self.state)[None]).argmax(1).item())
        new_state, reward, done = self.env.step(action)
        self.buffer.append(Experience(self.state, action, reward, done, new_state))
        self.state = self.env.reset() if done else new_state
        return reward, done


class DQN(pl.LightningModule):
    def __init__(self, size: int, gamma: float = 0.9, sync_rate: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target_net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.buffer = ReplayBuffer(100)
        self.agent = Agent(Walk(), self.buffer)
        self.total_reward = self.episode_reward = 0.0

    def populate(self, steps: int) -> None:
        for _ in range(steps):
            self.agent.play_step(self.net, epsilon=1.0)

    def training_step(self, batch: Any, nb_batch: int) -> Tensor:
        epsilon = max(0.1, 1.0 - self.global_step / 10)
        reward, done = self.agent.play_step(self.net, epsilon)
        self.episode_reward += reward
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
            next_values[dones] = 0.0
        loss = F.mse_loss(values, next_values * self.hparams["gamma"] + rewards)
        if done:
            self.total_reward, self.episode_reward = self.episode_reward, 0.0
        if self.global_step % self.hparams["sync_rate"] == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"reward": reward, "train_loss": loss, "epsilon": epsilon})
        self.log("total_reward", self.total_reward, prog_bar=True)
        return loss

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(self.net.parameters(), lr=0.01)]


@case
def dqn(run: Run) -> None:
    random.seed(0)
    np.random.seed(0)
    model = DQN(16)
    run.initialise(model)
    model.populate(40)
    loader = DataLoader(RLDataset(model.buffer, 16), batch_size=run.batch_size)
    run.fit(model, run.trainer(max_epochs=8), loader)
    run.note("buffer", [[list(map(float, e.state)), e.action, e.reward] for e in model.buffer.buffer])


class VAE(pl.LightningModule):
    """The noise is drawn with numpy, so that it is the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.fc_mu, self.fc_var = nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.log_scale = nn.Parameter(torch.tensor([0.0]))
        self.kl_weight = 0.0

    def gaussian_likelihood(self, x_hat: Tensor, log_scale: Tensor, x: Tensor) -> Tensor:
        return torch.distributions.Normal(x_hat, torch.exp(log_scale)).log_prob(x).sum(dim=1)

    def kl_divergence(self, z: Tensor, mu: Tensor, std: Tensor) -> Tensor:
        p = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(std))
        q = torch.distributions.Normal(mu, std)
        return (q.log_prob(z) - p.log_prob(z)).sum(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, noise = batch
        hidden = self.encoder(x)
        mu, log_var = self.fc_mu(hidden), self.fc_var(hidden)
        std = torch.exp(log_var / 2)
        z = mu + std * noise
        recon = self.gaussian_likelihood(self.decoder(z), self.log_scale, x)
        kl = self.kl_divergence(z, mu, std)
        elbo = (self.kl_weight * kl - recon).mean()
        self.log_dict({"elbo": elbo, "kl": kl.mean(), "recon_loss": recon.mean(), "kl_weight": self.kl_weight})
        return elbo

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kl_weight = min(1.0, self.kl_weight + 0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@case
def vae(run: Run) -> None:
    x, _ = class_data(64)
    noise = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    run.fit(VAE(), run.trainer(max_epochs=2), run.loader(x, noise))


if __name__ == "__main__":
    main()
