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
        for name, value in part.state_dict().items()}, "states": [
        {str(key): {name: one[name] for name in sorted(one)} for key, one in sorted(o.state_dict()["state"].items())}
        for o in optimizers]}
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


_SAME = "[v.shape for v in parts[{0}].parameters()] == [v.shape for v in parts[{1}].parameters()]"
_SUMS = "sum(v.double().abs().sum() for s in {}.values() for v in s.values() if isinstance(v, torch.Tensor) and v.ndim)"


def _state_of_another(i: int, j: int, k: int) -> str:
    same = f"type(optimizers[{i}].optimizer) is type(optimizers[{j}].optimizer) and {_SAME.format(i, j)}"
    return f"if {same}:\n    optimizers[{i}].load_state_dict(optimizers[{j}].state_dict())\n{_train(i, j, k)}\n{_train(j, i, k)}"


def _state_back(i: int, j: int, k: int) -> str:
    return f"""kept = copy.deepcopy(optimizers[{i}].state_dict())
{_train(i, j, k)}
{_train(j, i, k)}
optimizers[{i}].load_state_dict(kept)
{_train(j, i, k)}
{_train(i, j, k)}"""


def _state_edited(i: int, j: int, k: int) -> str:
    how = ("value.mul_(0.5)", "value.zero_()", "entry[name] = value * 2", "entry[name] = value.clone()")[k]
    return f"""for entry in optimizers[{i}].state.values():
    for name, value in list(entry.items()):
        if isinstance(value, torch.Tensor) and value.ndim:
            {how}
{_train(j, i, k)}
{_train(i, j, k)}"""


def _state_cleared(i: int, j: int, k: int) -> str:
    how = ("state.clear()", "state.popitem()", f"state.pop(next(iter(parts[{i}].parameters())), None)", "state.clear()")[k]
    return f"if len(optimizers[{i}].state):\n    optimizers[{i}].{how}\n{_train(j, i, k)}\n{_train(i, j, k)}"


def _state_held(i: int, j: int, k: int) -> str:
    return f"""held = [v for s in optimizers[{i}].state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.ndim]
{_train(i, j, k)}
note('held', sum(v.double().abs().sum() for v in held))
{_train(j, i, k)}
note('held', sum(v.double().abs().sum() for v in held))"""


def _group_edited(i: int, j: int, k: int) -> str:
    how = (
        "group['weight_decay'] = 0.1",
        f"optimizers[{i}].state.pop(group['params'].pop(), None)",
        "group.update(momentum=0.3) if group.get('momentum') else None",
        "group.update(betas=(0.5, 0.9)) if 'betas' in group else None",
    )[k]
    return f"for group in optimizers[{i}].param_groups:\n    {how}\n{_train(i, j, k)}\n{_train(j, i, k)}"


def _group_added(i: int, j: int, k: int) -> str:
    """Parameters of another module: both optimizers step them from now on."""
    listed = f"{{id(p) for group in optimizers[{i}].param_groups for p in group['params']}}"
    return f"""more = [p for p in parts[{j}].parameters() if id(p) not in {listed}]
if more:
    optimizers[{i}].add_param_group({{'params': more, 'lr': 0.01}})
{_ensemble(i, j, k)}
{_train(j, i, k)}"""


def _optimizer_anew(i: int, j: int, k: int) -> str:
    return f"""optimizers[{i}] = fabric.setup_optimizers(OPTIMIZERS[{k}](parts[{i}].parameters()))
steps[{i}] = made(parts[{i}], optimizers[{i}])
{_train(i, j, k)}"""


def _joint(i: int, j: int, k: int) -> str:
    """One optimizer of two modules, beside the two that they have."""
    return f"""both = dict.fromkeys([*parts[{i}].parameters(), *parts[{j}].parameters()])
both = fabric.setup_optimizers(OPTIMIZERS[{k}](list(both)))
for one in (0, {k}):
    both.zero_grad()
    loss = F.mse_loss(parts[{i}](batches[one]), goals[one]) + F.mse_loss(parts[{j}](batches[{k}]), goals[{k}])
    fabric.backward(loss)
    both.step()
    note('joint', loss)
note('joint state', {_SUMS.format("both.state_dict()['state']")})
{_train(j, i, k)}"""


def _swapped(i: int, j: int, k: int) -> str:
    """Each of two modules is given the parameters of the other: what an optimizer steps is its parameter, wherever that is."""
    return f"""if {_SAME.format(i, j)} and {i} != {j}:
    for (_, p), (_, q) in zip(parts[{i}].named_parameters(), parts[{j}].named_parameters()):
        p.data, q.data = q.data.clone(), p.data.clone()
{_train(i, j, k)}
{_train(j, i, k)}"""


def _scheduled(i: int, j: int, k: int) -> str:
    made = (
        "torch.optim.lr_scheduler.StepLR({}, 1, 0.5)",
        "torch.optim.lr_scheduler.CosineAnnealingLR({}, 5)",
        "torch.optim.lr_scheduler.LambdaLR({}, lambda step: 1 / (1 + step))",
        "torch.optim.lr_scheduler.ExponentialLR({}, 0.8)",
    )[k].format(f"optimizers[{i}]")
    return f"""scheduler = {made}
{_train(i, j, k)}
scheduler.step()
kept = copy.deepcopy(scheduler.state_dict())
{_train(i, j, k)}
scheduler.step()
{_train(i, j, k)}
scheduler.load_state_dict(kept)
scheduler.step()
note('rates', scheduler.get_last_lr())
{_train(i, j, k)}"""


def _moving_average(i: int, j: int, k: int) -> str:
    return f"""average = copy.deepcopy(parts[{i}])
for one in (0, {k}):
    train({i}, lambda m: F.mse_loss(m(batches[one]), goals[one]))
    with torch.no_grad():
        for name, value in average.state_dict().items():
            if value.is_floating_point():
                value.lerp_(parts[{i}].state_dict()[name], 0.3)
with torch.no_grad():
    note('average', average(batches[{k}]))
kept = {{name: value.clone() for name, value in parts[{i}].state_dict().items()}}
parts[{i}].load_state_dict(average.state_dict())
{_evaluate(i, j, k)}
parts[{i}].load_state_dict(kept)
{_train(i, j, k)}"""


def _saved(i: int, j: int, k: int) -> str:
    state = f"{{'one': parts[{i}], 'optimizer': optimizers[{i}], 'other': optimizers[{j}], 'count': {k}}}"
    return f"""fabric.save('kept.ckpt', {state})
{_train(i, j, k)}
{_train(j, i, k)}
note('rest', sorted(fabric.load('kept.ckpt', {state})))
{_train(j, i, k)}
{_train(i, j, k)}"""


def _gradients_kept(i: int, j: int, k: int) -> str:
    """Zeroed gradients step too; what is missing does not."""
    return f"""{_train(i, j, k)}
optimizers[{i}].zero_grad(set_to_none={k % 2 == 1})
optimizers[{i}].step()
note('gradients', [p.grad is None for p in parts[{i}].parameters()])"""


def _gradient_edited(i: int, j: int, k: int) -> str:
    how = ("p.grad.mul_(0.5)", "p.grad = p.grad * 0.5", "p.grad = None", "p.grad.data.clamp_(-0.01, 0.01)")[k]
    return f"""optimizers[{i}].zero_grad()
fabric.backward(F.mse_loss(parts[{i}](batches[{k}]), goals[{k}]))
for p in list(parts[{i}].parameters())[:2]:
    if p.grad is not None:
        {how}
optimizers[{i}].step()"""


def _inner_optimizer(i: int, j: int, k: int) -> str:
    """The optimizer itself, which Fabric's wraps."""
    return f"""kept = copy.deepcopy(optimizers[{i}].optimizer.state_dict())
{_train(i, j, k)}
optimizers[{i}].optimizer.load_state_dict(kept)
{_train(i, j, k)}
note('inner', {_SUMS.format(f"optimizers[{i}].optimizer.state")})"""


ACTIONS: dict[str, Callable[[int, int, int], str]] = {
    action.__name__.removeprefix("_"): action
    for action in (
        *(_train, _look, _evaluate, _score, _target, _adversarial, _copied, _load, _average, _ensemble, _clipped, _accumulated),
        *(_penalty, _frozen, _chained, _input_gradient, _policy, _compiled, _rate, _scaled, _gone, _replaced, _factor, _state),
        *(_reloaded, _closure, _state_of_another, _state_back, _state_edited, _state_cleared, _state_held, _group_edited),
        *(_group_added, _optimizer_anew, _joint, _swapped, _scheduled, _moving_average, _saved, _gradients_kept),
        *(_gradient_edited, _inner_optimizer),
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
