"""Random loops of Fabric: modules that train, look, copy and teach each other in a random order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_PRELUDE = '''
import copy, gc
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

FACTOR = 1.0


class Part(nn.Module):
    """4 numbers to 4 numbers; the seed decides about its width, and whether it normalises."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 3 + seed % 3, bias=not seed % 2)  # before a norm it would have noise for gradients
        self.last = nn.Linear(3 + seed % 3, 4)
        self.norm = nn.BatchNorm1d(3 + seed % 3) if seed % 2 else nn.Identity()
        self.scale = 1.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        h = torch.tanh(self.norm(self.first(x)))
        return self.last(h) * self.scale if self.training else self.last(h)

    def score(self, x):
        return self(x).square().mean() * FACTOR


class Policy(nn.Sequential):
    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(4, 6 + seed % 2), nn.ReLU(), nn.Linear(6 + seed % 2, 4))

    def score(self, x):
        return self(x).abs().mean() * FACTOR


class Signs(torch.optim.Optimizer):
    """An optimizer of the user's."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.mul_(0.5).add_(p.grad, alpha=0.5)
                    p.add_(torch.tanh(average * 10), alpha=-group["lr"])
        return loss


OPTIMIZERS = [
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
    lambda params: torch.optim.Adam(params, lr=0.02, eps=1e-2),
    lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-2),
    lambda params: torch.optim.RMSprop(params, lr=0.01, eps=1e-2),
    lambda params: Signs(params, lr=0.02),
]


def main(devices):
    fabric = Fabric(accelerator="cpu", devices=devices)
    fabric.launch()
    draw = torch.Generator().manual_seed(3)
    batches = [torch.randn(8, 4, generator=draw) for _ in range(4)]
    goals = [batch.roll(1, 1) for batch in batches]
    parts, optimizers, steps, seen = [], [], [], []

    def made(m, o):
        def step(x, goal):
            o.zero_grad()
            loss = F.mse_loss(m(x), goal)
            fabric.backward(loss)
            o.step()
            return loss.detach()

        return fabric.compile(step) if hasattr(fabric, "compile") else step

    def add(module, kind, optimizer=None):
        o = OPTIMIZERS[kind](module.parameters())
        if isinstance(module, (Part, Policy)):
            module, o = fabric.setup(module, o)
        else:
            o = fabric.setup_optimizers(o)
        module.mark_forward_method("score")
        parts.append(module)
        optimizers.append(o)
        steps.append(made(module, o))

    def note(name, value):
        seen.append([name, value.detach().double().sum().item() if isinstance(value, torch.Tensor) else value])

    def train(i, loss_of):
        optimizers[i].zero_grad()
        loss = loss_of(parts[i])
        fabric.backward(loss)
        optimizers[i].step()
        note("loss", loss)

{actions}
    record = {"seen": seen, "weights": {f"{i}.{name}": value for i, part in enumerate(parts)
        for name, value in part.state_dict().items()}}
    return record, fabric
'''


def _train(i: int, j: int, k: int) -> str:
    return f"train({i}, lambda m: F.mse_loss(m(batches[{k}]), goals[{k}]))"


def _look(i: int, j: int, k: int) -> str:
    return f"with torch.no_grad():\n    note('look', parts[{i}](batches[{k}]))"


def _evaluate(i: int, j: int, k: int) -> str:
    return f"parts[{i}].eval()\n{_look(i, j, k)}\nparts[{i}].train()"


def _score(i: int, j: int, k: int) -> str:
    return (
        f"train({i}, lambda m: m.score(batches[{k}]))\nwith torch.no_grad():\n    note('score', parts[{j}].score(batches[{k}]))"
    )


def _target(i: int, j: int, k: int) -> str:
    goal = f"with torch.no_grad():\n    goal = goals[{k}] * 0.5 + 0.5 * parts[{j}](batches[{k}])"
    return f"{goal}\ntrain({i}, lambda m: F.mse_loss(m(batches[{k}]), goal))"


def _adversarial(i: int, j: int, k: int) -> str:
    return f"""fake = parts[{i}](batches[{k}])
train({j}, lambda m: m(goals[{k}]).sigmoid().mean() - m(fake.detach()).sigmoid().mean())
optimizers[{i}].zero_grad()
loss = parts[{j}](parts[{i}](batches[{k}])).sigmoid().mean()
fabric.backward(loss)
optimizers[{i}].step()
note('fooled', loss)"""


def _copied(i: int, j: int, k: int) -> str:
    return f"add(copy.deepcopy(parts[{i}]), {k})"


def _load(i: int, j: int, k: int) -> str:
    same = f"[v.shape for v in parts[{i}].state_dict().values()] == [v.shape for v in parts[{j}].state_dict().values()]"
    return f"if {same}:\n    parts[{i}].load_state_dict(parts[{j}].state_dict())\n    note('loaded', 1)"


def _average(i: int, j: int, k: int) -> str:
    return f"""with torch.no_grad():
    for p, q in zip(parts[{i}].parameters(), parts[{j}].parameters()):
        if p.shape == q.shape:
            p.mul_(0.75).add_(q, alpha=0.25)"""


def _ensemble(i: int, j: int, k: int) -> str:
    return f"""for one in {{{i}, {j}}}:
    optimizers[one].zero_grad()
loss = F.mse_loss(parts[{i}](batches[{k}]), goals[{k}]) + F.mse_loss(parts[{j}](batches[{k}]), goals[{k}])
fabric.backward(loss)
for one in {{{i}, {j}}}:
    optimizers[one].step()
note('ensemble', loss)"""


def _clipped(i: int, j: int, k: int) -> str:
    how = ("max_norm=0.05", "clip_val=0.01", "max_norm=0.1, norm_type=float('inf')")[k % 3]
    return f"""optimizers[{i}].zero_grad()
fabric.backward(F.mse_loss(parts[{i}](batches[{k}]), goals[{k}]))
norm = fabric.clip_gradients(parts[{i}], optimizers[{i}], {how})
optimizers[{i}].step()
note('norm', 0.0 if norm is None else norm)"""


def _accumulated(i: int, j: int, k: int) -> str:
    return f"""optimizers[{i}].zero_grad()
for one in (0, {k}):
    fabric.backward(F.mse_loss(parts[{i}](batches[one]), goals[one]) / 2)
note('gradient', sum(p.grad.abs().sum() for p in parts[{i}].parameters() if p.grad is not None))
optimizers[{i}].step()"""


def _penalty(i: int, j: int, k: int) -> str:
    return f"train({i}, lambda m: F.mse_loss(m(batches[{k}]), goals[{k}]) + 0.01 * sum(p.square().sum() for p in m.parameters()))"


def _frozen(i: int, j: int, k: int) -> str:
    return f"next(parts[{i}].parameters()).requires_grad_({k % 2 == 1})\n{_train(i, j, k)}"


def _chained(i: int, j: int, k: int) -> str:
    return f"train({i}, lambda m: F.mse_loss(parts[{j}](m(batches[{k}])), goals[{k}]))"


def _input_gradient(i: int, j: int, k: int) -> str:
    return f"""x = batches[{k}].clone().requires_grad_()
note('input', torch.autograd.grad(parts[{i}](x).square().sum(), x)[0].abs())"""


def _policy(i: int, j: int, k: int) -> str:
    advantage = f"with torch.no_grad():\n    advantage = parts[{j}](batches[{k}]).mean(1)"
    loss = f"-(torch.distributions.Categorical(logits=m(batches[{k}])).log_prob(torch.arange(8) % 4) * advantage).mean()"
    return f"{advantage}\ntrain({i}, lambda m: {loss})"


def _compiled(i: int, j: int, k: int) -> str:
    return f"for one in ({i}, {j}):\n    note('compiled', steps[one](batches[{k}], goals[{k}]))"


def _rate(i: int, j: int, k: int) -> str:
    return f"optimizers[{i}].param_groups[0]['lr'] *= 0.5\n{_train(i, j, k)}"


def _scaled(i: int, j: int, k: int) -> str:
    return f"parts[{i}].scale = {k + 1} / 2\n{_look(i, j, k)}"


def _gone(i: int, j: int, k: int) -> str:
    return f"""if len(parts) > 3:
    del parts[-1], optimizers[-1], steps[-1]
    gc.collect()
add(Part({i + 5}), {k})"""


def _replaced(i: int, j: int, k: int) -> str:
    return f"""add(Policy({i + k}), {k})
parts[{i}], parts[-1] = parts[-1], parts[{i}]
optimizers[{i}], optimizers[-1] = optimizers[-1], optimizers[{i}]
steps[{i}], steps[-1] = steps[-1], steps[{i}]"""


def _factor(i: int, j: int, k: int) -> str:
    return f"globals()['FACTOR'] = {k}.5\nwith torch.no_grad():\n    note('factor', parts[{i}].score(batches[{k}]))"


def _state(i: int, j: int, k: int) -> str:
    return f"""note('state', sum(v.double().abs().sum() for s in optimizers[{i}].state_dict()['state'].values()
    for v in s.values() if isinstance(v, torch.Tensor)))"""


def _reloaded(i: int, j: int, k: int) -> str:
    return f"""kept = copy.deepcopy(parts[{i}].state_dict()), copy.deepcopy(optimizers[{i}].state_dict())
{_train(i, j, k)}
parts[{i}].load_state_dict(kept[0])
optimizers[{i}].load_state_dict(kept[1])
{_train(i, j, k)}"""


def _closure(i: int, j: int, k: int) -> str:
    return f"""def closure():
    optimizers[{i}].zero_grad()
    loss = F.mse_loss(parts[{i}](batches[{k}]), goals[{k}])
    fabric.backward(loss)
    return loss
note('closure', optimizers[{i}].step(closure))"""


ACTIONS: dict[str, Callable[[int, int, int], str]] = {
    action.__name__.removeprefix("_"): action
    for action in (
        *(_train, _look, _evaluate, _score, _target, _adversarial, _copied, _load, _average, _ensemble, _clipped, _accumulated),
        *(_penalty, _frozen, _chained, _input_gradient, _policy, _compiled, _rate, _scaled, _gone, _replaced, _factor, _state),
        *(_reloaded, _closure),
    )
}
_PARTS = 3


@dataclass(frozen=True)
class Loop:
    """A loop: its modules, and what it does with them in turn.

    Attributes:
        features: actions, ``NAME:i:j:k``: with the modules i and j, and the batch (or kind of optimizer) k, each with its number.
        parts: the modules at the beginning: ``(class, seed, kind of optimizer)``.
    """

    features: tuple[tuple[int, str], ...]
    parts: tuple[tuple[str, int, int], ...]

    @classmethod
    def random(cls, seed: int) -> Loop:
        """The loop of a seed: three modules, eight to sixteen actions."""
        draw = random.Random(seed)
        kind = draw.choice(("Part", "Policy"))
        parts = [(draw.choice((kind, kind, "Part")), draw.randint(0, 3), draw.randint(0, 4)) for _ in range(_PARTS)]
        actions = []
        for _ in range(draw.randint(8, 16)):
            places = (draw.randrange(_PARTS), draw.randrange(_PARTS), draw.randrange(4))
            actions.append(":".join(map(str, (draw.choice(sorted(ACTIONS)), *places))))
        return cls(tuple(enumerate(actions)), tuple(parts))

    def without(self, number: int) -> Loop:
        """The same without one of its actions."""
        return Loop(tuple(one for one in self.features if one[0] != number), self.parts)

    def source(self) -> str:
        """The script."""
        lines = [f"add({kind}({seed}), {optimizer})" for kind, seed, optimizer in self.parts]
        for _, feature in self.features:
            name, *places = feature.split(":")
            lines += ACTIONS[name](*map(int, places)).splitlines()
        return _PRELUDE.replace("{actions}", "\n".join(f"    {line}" for line in lines))
