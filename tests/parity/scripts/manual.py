"""Manual optimization: ``training_step`` runs backward, clipping, its optimizers and schedulers itself, in one compiled program.

Cases about gradients are in ``manual_gradients.py``, those of automatic optimization among them; one process runs them all.
"""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import manual_gradients  # noqa: F401
import torch
import torch.nn.functional as F
from basics import class_data, regression_data
from manual_models import Manual, fit
from recording import Run, case, main, numbers, recording_hooks
from torch import Tensor, nn

IN_STEP_HOOKS = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]

# -- several optimizers ----------------------------------------------------------------------------------------------------


class Gan(pl.LightningModule):
    """A generator and a critic; noise comes with the batch, so that every backend has the same."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def noise(self, batch: Any) -> Tensor:
        return torch.cat([batch[1], batch[1] * batch[0][:, :2]], 1)

    def configure_optimizers(self) -> Any:
        of_generator = torch.optim.Adam(self.generator.parameters(), 0.01, betas=(0.5, 0.999))
        return of_generator, torch.optim.AdamW(self.critic.parameters(), 0.02, weight_decay=0.1)


class TwoSteps(Gan):
    """Lightning's documented example: the critic is trained against the generator that was just updated."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        real, z = batch[0], self.noise(batch)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        self.toggle_optimizer(of_generator)
        loss = F.binary_cross_entropy_with_logits(self.critic(self.generator(z)), ones)
        self.log("generator", loss, prog_bar=True)
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)
        with of_critic.toggle_model():
            loss = F.binary_cross_entropy_with_logits(self.critic(real), ones)
            loss = loss + F.binary_cross_entropy_with_logits(self.critic(self.generator(z).detach()), zeros)
            self.log("critic", loss, on_epoch=True)
            self.manual_backward(loss / 2)
            self.clip_gradients(of_critic, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            of_critic.step()
            of_critic.zero_grad()


@case
def gan(run: Run) -> None:
    model = recording_hooks(TwoSteps, [*IN_STEP_HOOKS, "on_train_batch_end"], "module")()
    callback = recording_hooks(pl.Callback, IN_STEP_HOOKS, "callback")()
    model.run = callback.run = run
    fit(run, model, callbacks=[callback])


@case
def wasserstein_gan_with_gradient_penalty(run: Run) -> None:
    class Penalised(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            of_generator, of_critic = self.optimizers()
            real, fake = batch[0], self.generator(self.noise(batch))
            share = torch.sigmoid(batch[1][:, :1])
            between = (share * real + (1 - share) * fake.detach()).requires_grad_(True)
            score = self.critic(between)
            slope = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)[0]
            penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
            loss = self.critic(fake.detach()).mean() - self.critic(real).mean() + 10 * penalty
            of_critic.zero_grad()
            self.manual_backward(loss)
            of_critic.step()
            self.log_dict({"critic": loss, "penalty": penalty})
            if (batch_idx + 1) % 3 == 0:  # the critic is trained more often
                of_generator.zero_grad()
                distance = -self.critic(self.generator(self.noise(batch))).mean()
                self.manual_backward(distance)
                of_generator.step()
                self.log("generator", distance)
            return {"loss": loss, "penalty": penalty}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            steps.append([self.global_step, batch_idx, numbers(outputs["penalty"])])

    steps: list[Any] = []
    fit(run, Penalised(), n=96)
    run.note("steps", steps)


@case
def weights_clamped(run: Run) -> None:
    class Clamped(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            of_generator, of_critic = self.optimizers(use_pl_optimizer=False)  # not counted as steps
            for _ in range(2):
                loss = self.critic(self.generator(self.noise(batch)).detach()).mean() - self.critic(batch[0]).mean()
                of_critic.zero_grad(set_to_none=False)
                loss.backward()
                of_critic.step()
                for parameter in self.critic.parameters():
                    parameter.data.clamp_(-0.1, 0.1)
            of_generator.zero_grad()
            loss = -self.critic(self.generator(self.noise(batch))).mean()
            loss.backward()
            of_generator.step()
            self.log("step", float(self.global_step))

    fit(run, Clamped())


@case
def parameters_of_two_optimizers(run: Run) -> None:
    class Shared(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.05, momentum=0.9), torch.optim.Adam(self.first.parameters(), 0.01)]

    fit(run, Shared())


# -- closures, several steps, flags ----------------------------------------------------------------------------------------


@case
def closures(run: Run) -> None:
    class Closed(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                return loss

            first = optimizer.step(closure)
            second = optimizer.step(closure=closure)
            self.schedule.step()
            self.log_dict({"first": first, "second": second})
            return {"loss": second, "gain": first - second}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 0.05)
            self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)  # which the Trainer does not know
            return optimizer

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            gains.append(numbers(outputs["gain"]))

    gains: list[Any] = []
    fit(run, Closed())
    run.note("gains", gains)


@case
def policy_gradient(run: Run) -> None:
    """Clipped policy gradients: a rollout without gradients, then several epochs over it, as PPO does."""

    class Agent(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
            self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
            self.register_buffer("episodes", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            states, actions = batch
            optimizer = self.optimizers()
            with torch.no_grad():
                before = torch.distributions.Categorical(logits=self.actor(states)).log_prob(actions)
                values = self.critic(states).squeeze(1)
                rewards = states[:, 0] * (actions == 1) - 0.1 * actions
                advantage = rewards - values
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            for _ in range(3):
                policy = torch.distributions.Categorical(logits=self.actor(states))
                ratio = (policy.log_prob(actions) - before).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                error = F.mse_loss(self.critic(states).squeeze(1), rewards)
                loss = 0.5 * error - gain - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                nn.utils.clip_grad_norm_(self.parameters(), 0.5)
                optimizer.step()
            self.episodes += 1
            self.log_dict({"loss": loss, "ratio": ratio.mean(), "step": float(self.trainer.global_step)})

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    run.fit(Agent(), run.trainer(max_epochs=2), run.loader(*class_data()))


@case
def trained_in_turns(run: Run) -> None:
    """``requires_grad`` set in the step stays set; an optimizer left toggled."""

    class Turns(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            if batch_idx == 1:
                self.layer.bias.requires_grad_(False)
            if batch_idx == 2:
                self.toggle_optimizer(second)
            loss = self.loss(batch)
            self.manual_backward(loss)
            first.step()
            second.step()
            self.zero_grad()
            if batch_idx == 3:
                self.untoggle_optimizer(second)
            self.log("trained", sum(float(p.requires_grad) for p in self.parameters()))

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.first.parameters(), 0.1), torch.optim.Adam(self.layer.parameters(), 0.02)]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            flags.append([p.requires_grad for p in self.parameters()])

    flags: list[Any] = []
    fit(run, Turns(), n=96)
    run.note("flags", flags)


# -- schedulers and options ------------------------------------------------------------------------------------------------


@case
def schedulers_by_hand(run: Run) -> None:
    class Scheduled(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            every_batch, every_epoch = self.lr_schedulers()
            for _ in range(2):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
                every_batch.step()
            self.log("rate", every_batch.get_last_lr()[0])
            self.log("half", optimizer.param_groups[0]["lr"] / 2)
            self.log("stepped", float(self.global_step))
            if self.trainer.is_last_batch:
                every_epoch.step()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
            every_batch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [every_batch, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    fit(run, Scheduled(), n=56)


@case
def scheduler_on_a_plateau(run: Run) -> None:
    class Plateau(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("loss", loss, on_step=False, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            self.lr_schedulers().step(self.trainer.callback_metrics["loss"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.5)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}

    fit(run, Plateau(), max_epochs=4)


@case
def rates_by_hand(run: Run) -> None:
    class Warm(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            rate = 0.1 * min(1.0, (self.global_step + 1) / 5)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[1]["weight_decay"] = 0.01 * batch_idx
            self.log("rate", optimizer.param_groups[0]["lr"])
            self.manual_backward(self.loss(batch))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            groups = [{"params": self.first.parameters()}, {"params": self.layer.parameters(), "weight_decay": 0.1}]
            return torch.optim.AdamW(groups, 0.1)

    fit(run, Warm())


class StatesOfOne(pl.Callback):
    """Gives back the state of one of the optimizers, changes another's, and looks at it again."""

    kept: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        first, second = trainer.optimizers
        if trainer.global_step in (4, 12):
            self.kept = copy.deepcopy(first.state_dict())
        elif trainer.global_step == 8:
            first.load_state_dict(self.kept)
        elif trainer.global_step == 10:
            for entry in second.state.values():
                entry["exp_avg"].zero_()
            module.run.note("first", [numbers(entry["exp_avg"]) for entry in first.state.values()])
        elif trainer.global_step == 16:
            second.state.clear()
            first.load_state_dict(self.kept)


@case
def state_of_one_of_two_optimizers(run: Run) -> None:
    model = TwoSteps()
    model.run = run
    fit(run, model, callbacks=[StatesOfOne()], max_epochs=2)


class HeldStates(pl.Callback):
    """Holds tensors of states through steps, and a ``state_dict()`` that is no copy, which it loads."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        first, second = trainer.optimizers
        if trainer.global_step == 4:
            self.tensors = [value for entry in first.state.values() for value in entry.values()]
            self.kept = second.state_dict()
        elif trainer.global_step == 8:
            module.run.note("held", [numbers(one) for one in self.tensors])
            self.tensors[1].mul_(0.5)
        elif trainer.global_step == 12:
            module.run.note("loaded", [numbers(entry["exp_avg"]) for entry in self.kept["state"].values()])
            second.load_state_dict(self.kept)
        elif trainer.global_step == 14:
            module.run.note("again", [numbers(one) for one in self.tensors])

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        module.run.note("at the end", [numbers(one) for one in self.tensors])
        module.run.note("the same", [self.tensors[1] is next(iter(trainer.optimizers[0].state.values()))["exp_avg"]])


@case
def held_states_of_optimizers(run: Run) -> None:
    model = TwoSteps()
    model.run = run
    fit(run, model, callbacks=[HeldStates()], max_epochs=2)


class ShownStates(pl.Callback):
    """Keeps a view and an array of a state, which steps write to."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 4:
            entry = next(iter(trainer.optimizers[0].state.values()))
            self.kept = entry["exp_avg"][0], entry["exp_avg_sq"].numpy()
        elif trainer.global_step > 4:
            module.run.note(f"shown {trainer.global_step}", [self.kept[0].tolist(), self.kept[1].tolist()])


@case
def shown_states_of_optimizers(run: Run) -> None:
    model = TwoSteps()
    model.run = run
    fit(run, model, callbacks=[ShownStates()], max_epochs=1)


class SharedStates(pl.Callback):
    """Gives one optimizer the state of another of equal parameters: torch copies no tensor, both step it from then on."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 6:
            first, second = trainer.optimizers
            second.load_state_dict(first.state_dict())


class TwoAlike(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(8, 2)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(one.parameters(), lr=0.02) for one in (self.layer, self.other)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.mse_loss(self.layer(batch[0]) + self.other(batch[0]), batch[1])
        self.log("loss", loss)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


@case
def states_shared_by_two_optimizers(run: Run) -> None:
    fit(run, TwoAlike(), callbacks=[SharedStates()], max_epochs=2)


# -- checkpoints -----------------------------------------------------------------------------------------------------------


@case
def manual_run_resumed(run: Run) -> None:
    path = run.root / "mid.ckpt"
    first = run.trainer(max_epochs=1)
    model = TwoSteps()
    run.initialise(model)
    data = run.loader(*regression_data())
    first.fit(model, data)
    first.save_checkpoint(path)
    second, model = run.trainer(max_epochs=3), TwoSteps()
    second.fit(model, data, ckpt_path=path)
    run.finish(model, second)
    states = [optimizer.state_dict()["state"] for optimizer in second.optimizers]
    run.note("states", [[{k: numbers(v) for k, v in sorted(one.items())} for one in state.values()] for state in states])


if __name__ == "__main__":
    main()
