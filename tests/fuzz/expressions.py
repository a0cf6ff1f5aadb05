"""Random programs of small expressions: a value of a step, functions of it, and a use; what differs in type differs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Self

_MOST = 3
"""Expressions in a program."""


def _table(rows: str) -> tuple[tuple[str, ...], ...]:
    """Rows of ``kinds ~ one ~ another`` as a tuple for each one: the kinds, and it."""
    parts = [line.split(" ~ ") for line in rows.strip().splitlines()]
    return tuple((*kinds.split(), one) for kinds, *ones in parts for one in ones)


VALUES = _table("""
t ~ loss ~ h.mean() ~ x[0, 1] ~ self.buf.mean() ~ self.last ~ x.sum().detach() ~ h.std() * y[0, 0] ~ (y > 0).sum()
t ~ x.argmax() ~ self.layer.weight.norm() ~ self.count ~ x.double().mean()
n ~ loss.item() ~ x[0, 0].item() ~ batch_idx ~ self.global_step ~ self.current_epoch ~ self.kept ~ (y > 0).sum().item()
n ~ x.shape[0] ~ self.hooked ~ x[0].tolist()[1] ~ float(loss) ~ int(self.count) ~ self.optimizers().param_groups[0]['lr']
n ~ self.trainer.num_training_batches ~ self.drawn ~ np.float32(batch_idx + 0.5) ~ np.float64(self.global_step)
n ~ np.int64(batch_idx) ~ random.random() ~ np.random.rand() ~ float(x.numpy()[0, 0]) ~ x.numpy().max()
n ~ y.mean().numpy().item() ~ (0.0 if self.layer.weight.grad is None else self.layer.weight.grad.sum().item())
n ~ len(self.store)
b ~ bool((y > 0).any()) ~ (loss > 1).item() ~ batch_idx > 0 ~ self.training ~ (x[0, 0] > 0).item() ~ self.flag
b ~ np.bool_(batch_idx % 2) ~ self.trainer.is_last_batch ~ bool(loss > self.limit)
s ~ f'{loss:.2f}' ~ str(batch_idx) ~ f'{x[0, 0].item():.1f}' ~ f'e{self.current_epoch}' ~ self.name
s ~ str((y > 0).sum().item()) ~ '%d' % self.global_step ~ f'{self.kept:.1f}' ~ str(self.flag)
""")
"""Kinds (tensor, number, bool, text) and values."""

GRADIENTS = _table("""
t ~ self.layer.weight.grad.norm() ~ self.layer.bias.grad.sum() ~ self.layer.weight.grad[0, 1] ~ self.layer.weight.grad.abs().max()
t ~ sum(p.grad.square().sum() for p in self.parameters()) ~ torch.stack([p.grad.norm() for p in self.parameters()]).norm()
t ~ (self.layer.weight.grad * self.layer.weight).mean() ~ self.layer.weight.norm()
t ~ self.layer.weight.grad.detach().clone().mean()
t ~ torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5) ~ self.buf.mean() ~ self.last
n ~ self.layer.weight.grad.norm().item() ~ float(self.layer.bias.grad.sum()) ~ self.layer.weight.grad.tolist()[0][1]
n ~ max(p.grad.abs().max().item() for p in self.parameters()) ~ sum(p.grad.numel() for p in self.parameters()) ~ self.kept
n ~ float(self.layer.weight.grad.numpy()[0, 0]) ~ self.global_step ~ self.current_epoch
n ~ self.hooked ~ int((self.layer.weight.grad > 0).sum())
b ~ bool((self.layer.weight.grad > 0).any()) ~ bool(torch.isfinite(self.layer.bias.grad).all())
b ~ self.layer.weight.grad.norm().item() > 0.5
b ~ self.layer.weight.grad is None ~ self.flag
s ~ f'{self.layer.weight.grad.norm():.3f}' ~ str(tuple(self.layer.weight.grad.shape))
s ~ f'{self.layer.bias.grad.sum().item():.2f}' ~ self.name
""")
"""The same after a backward pass, outside of the step."""

FUNCTIONS = _table("""
tnb = ~ {} + 1 ~ 2 * {} - 0.5 ~ {} / 3 ~ {} // 2 ~ {} % 3 ~ {} * {} ~ +{} ~ 1 - {} ~ {} - 0.25
tn = ~ -{} ~ abs({}) ~ {} ** 2 ~ min({}, 2) ~ max({}, 0.5) ~ sum([{}, 1]) ~ divmod({}, 2)[1] ~ ({} if {} > 0.5 else 3)
tn = ~ [{}, 2][0] ~ {{'a': {}}}['a'] ~ (lambda v: v + 1)({}) ~ ({} and 2) ~ ({} or 4)
tnb n ~ int({}) ~ float({}) ~ math.floor({}) ~ math.sqrt(abs({})) ~ math.exp(-abs({})) ~ round(float({}), 2)
nb n ~ np.floor({}) ~ np.maximum({}, 2) ~ np.minimum(0.5, {}) ~ np.clip({}, 0, 1) ~ np.sqrt(abs({})) ~ np.mean([{}, 1.0])
nb n ~ np.float32({}) ~ np.float64({}) ~ np.int64({}) ~ np.abs({}) ~ np.sign({}) ~ np.array([{}, 1.0]).sum()
nb n ~ np.round({}, 1) ~ np.exp(-abs({})) ~ round({}, 2) ~ round({}) ~ np.ceil({}) ~ sorted([{}, 0.5, 3])[1] ~ math.ceil({})
nb n ~ math.pow({}, 2) ~ math.fmod({}, 2) ~ np.add({}, 1) ~ np.square({}) ~ [10, 20, 30][int({}) % 3]
nb n ~ {{0: 5, 1: 6}}.get(int({}), 7) ~ len(range(int(abs({})) % 4)) ~ hash(int({})) % 5
n n ~ float('%.2f' % {}) ~ complex({}, 1).real ~ math.trunc({}) ~ math.isclose({}, 1) ~ math.hypot({}, 1)
tnb b ~ bool({}) ~ {} > 1 ~ {} == 2 ~ not {} ~ 0 < {} < 2 ~ {} != 1 ~ {} in (0, 1) ~ bool({} > 0.5)
tnb t ~ torch.as_tensor({}) ~ torch.as_tensor({}).float() * 2 ~ h.mean() * {} ~ torch.full((2,), float({})).sum()
nb t ~ torch.tensor({}) ~ torch.tensor([{}, 1.0]).sum() ~ x[int({}) % 4].sum()
nb t ~ torch.maximum(h.mean(), torch.tensor(float({})))
t t ~ {}.detach() ~ {}.double() ~ {}.clamp(0, 1) ~ {}.reshape(1)[0] ~ torch.stack([{}, {}]).sum()
t t ~ torch.where({} > 0, 1, 2)
t n ~ {}.item() ~ {}.detach().numpy().item() ~ {}.tolist() ~ round({}.item(), 3)
tnb s ~ (lambda v: f'{{float(v):.2f}}')({}) ~ '%.2f' % float({}) ~ '{{:6.2f}}'.format(float({})) ~ str(int({}))
nb s ~ str({}) ~ (lambda v: f'{{v}}')({}) ~ repr({}) ~ (lambda v: f'v={{v}}')({}) ~ '%s' % {} ~ '_'.join(['a', str({})])
s s ~ {} + 'x' ~ {}.rjust(7) ~ (lambda v: f'{{v:>8}}')({}) ~ '-' + {} ~ {}.upper() ~ '%5s|' % {} ~ {}[:2] ~ max({}, '1')
s n ~ len({}) ~ len({}.split('.')) ~ int({}.startswith('1')) ~ {}.count('1')
""")
"""Kinds that it takes, the kind that it gives (``=``: what it takes), and a function."""

USES: tuple[tuple[str, str], ...] = (
    ("tn", "self.log('l{k}', {e})"),
    ("b", "self.log('l{k}', float({e}))"),
    ("tnb", "self.log('m{k}', {e} * 1.0, on_step=False, on_epoch=True)"),
    ("tnb", "loss = loss * (1 + 0.01 * {e})"),
    ("tnb", "loss = loss + 0.01 * {e}"),
    ("tnbs", "self.store.append({e})"),
    ("tnbs", "self.table['k{k}'] = {e}"),
    ("tnbs", "self.attr{k} = {e}"),
    ("tnbs", "self.nested['n'].append(({e}, {k}))"),
    ("tnb", "if {e}:\n            loss = loss * 1.1"),
    ("nb", "while len(self.store) < 3 and {e}:\n            self.store.append('again')"),
    ("nbs", "print('P', {e})"),
    ("tnb", "e = {e}\n        print(f'P{k} {{float(e):.2f}}', end='\\n')"),
    ("tnbs", "e = {e}\n        self.store.append(f'text {{e}}')"),
    ("tnb", "e = {e}\n        self.store.append(f'{{float(e):.2f}} of {{batch_idx}}')"),
    ("tnbs", "out['o{k}'] = {e}"),
    ("tnbs", "self.taker.take({e}, name='k{k}')"),
    ("nbs", "self.table[{e}] = batch_idx"),
    ("nb", "self.store.append([5, 6, 7][int({e}) % 3])"),
    ("nb", "self.kept = self.kept * 0.5 + float({e})"),
    ("t", "self.last = {e}.detach()"),
    ("tnb", "self.buf += float({e}) if not isinstance({e}, torch.Tensor) else {e}.detach()"),
    ("tnbs", "self.seen.add(str(type({e}).__name__))"),
    ("nb", "self.total = self.total + {e}"),
)
"""Kinds that it takes, and a statement in which ``{e}`` is used."""

_CHANGES: tuple[tuple[str, str], ...] = (
    ("tnb", "self.layer.weight.grad *= 1 + 0.1 * float({e})"),
    ("tn", "self.layer.bias.grad.add_(0.01 * {e})"),
    ("tnb", "if {e}:\n            self.layer.weight.grad.mul_(0.5)"),
    ("t", "self.layer.bias.grad = self.layer.bias.grad * {e}"),
    ("nb", "self.layer.weight.grad[0] = float({e})"),
    ("tn", "with torch.no_grad():\n            self.layer.bias.add_(0.01 * {e})"),
)
"""Kinds, and statements that change a gradient or a weight after a backward pass."""

_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_WHERE = ("training_step", "training_step", "training_step", "validation_step", *_HOOKS)
_IN_FABRIC = ("fabric_step", "fabric_step", "fabric_evaluation", "fabric_backward", "fabric_backward")

_HEAD = """
import math, operator, random, re, warnings
import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

def shown(v):
    if isinstance(v, torch.Tensor):
        return ["tensor", str(v.dtype), list(v.shape), v.detach().double().tolist()]
    if isinstance(v, str):
        number = r"-?\\d+\\.\\d+(?:e-?\\d+)?"
        return ["str", re.sub(number, "#", v), [float(one) for one in re.findall(number, v)]]
    if isinstance(v, dict):
        return ["dict", [[shown(key), shown(one)] for key, one in v.items()]]
    if isinstance(v, set):
        return ["set", sorted(v)]
    if isinstance(v, (list, tuple)):
        return [type(v).__name__, [shown(one) for one in v]]
    if v is None or isinstance(v, complex):
        return str(v)
    return [type(v).__name__, float(v)]

class Taker(pl.Callback):
    def __init__(self):
        self.taken = []
    def take(self, value, name):
        self.taken.append((name, value))

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("buf", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.last = torch.tensor(0.5)
        self.store, self.table, self.nested, self.seen, self.notes = [], {}, {"n": []}, set(), []
        self.kept, self.hooked, self.drawn, self.flag, self.limit, self.name, self.total = 0.5, 1, 0.25, False, 0.7, "n0", 0
        self.taker = Taker()
        random.seed(3)
        np.random.seed(3)
    def on_train_batch_start(self, batch, batch_idx):
        self.hooked += 1
        self.flag = not self.flag
        self.name = f"n{batch_idx}"
        self.drawn = 0.25 * (batch_idx + 1)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.notes.append(shown({key: one for key, one in outputs.items()} if isinstance(outputs, dict) else outputs))
        self.notes.append(shown({key: one for key, one in vars(self).items() if key.startswith("attr")}))
        self.notes.append(shown([self.kept, self.last, self.buf, self.total]))
        self.count += 1
    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.notes.append(shown(outputs))
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]
"""

_LOOP = """
from lightning.fabric import Fabric

class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("buf", torch.zeros(2))
    def forward(self, x):
        return self.layer(x)

class Run:
    def __init__(self, fabric):
        torch.manual_seed(0)
        self.fabric = fabric
        net, head = Plain(), torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.05, momentum=0.5)
        self.net, self.optimizer = fabric.setup(net, self.optimizer)
        self.head = fabric.setup_module(head)
        self.layer, self.buf = self.net.layer, torch.zeros(2)
        self.count, self.last = torch.zeros((), dtype=torch.long), torch.tensor(0.5)
        self.store, self.table, self.nested, self.seen, self.notes, self.taken = [], {{}}, {{"n": []}}, set(), [], []
        self.kept, self.hooked, self.drawn, self.flag, self.limit, self.name, self.total = 0.5, 1, 0.25, False, 0.7, "n0", 0
        self.global_step, self.current_epoch, self.training, self.taker = 0, 0, True, self
        random.seed(3)
        np.random.seed(3)
    def parameters(self):
        return self.net.parameters()
    def log(self, name, value, **options):
        self.notes.append([name, shown(value)])
    def take(self, value, name):
        self.taken.append((name, value))
    def changed(self, batch_idx):
        self.hooked += 1
        self.flag, self.name, self.drawn = not self.flag, f"n{{batch_idx}}", 0.25 * (batch_idx + 1)
    def step(self, batch, batch_idx):
        x, y = batch
        h = self.head(self.net(x))
        loss = F.mse_loss(h, y)
        out = {{}}
        {fabric_step}
        self.fabric.backward(loss)
        self.after(batch_idx)
        out["loss"] = loss.detach()
        return out
    def after(self, batch_idx):
        out = {{}}
        {fabric_backward}
    def evaluate(self, batch, batch_idx):
        x, y = batch
        h = self.head(self.net(x))
        loss = F.mse_loss(h, y)
        out = {{}}
        {fabric_evaluation}
        out["loss"] = loss
        return out

def main(devices):
    fabric = Fabric(accelerator="cpu", devices=devices)
    fabric.launch()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, generator=generator) * torch.linspace(0.5, 2, 16)[:, None]
    data = TensorDataset(x, x[:, :2] * 0.7 + 0.3)
    run, loader = Run(fabric), fabric.setup_dataloaders(DataLoader(data, 4))
    for run.current_epoch in range(2):
        for batch_idx, batch in enumerate(loader):
            run.changed(batch_idx)
            waits = {waits}
            with fabric.no_backward_sync(run.net, enabled=waits), fabric.no_backward_sync(run.head, enabled=waits):
                out = run.step(batch, batch_idx)
            if not waits:
                run.optimizer.step()
                run.optimizer.zero_grad()
                run.global_step += 1
            run.notes.append(shown(out))
            run.notes.append(shown({{key: one for key, one in vars(run).items() if key.startswith("attr")}}))
            run.notes.append(shown([run.kept, run.last, run.buf, run.total]))
            run.count += 1
        run.net.eval(), run.head.eval()
        run.training = False
        with torch.no_grad():
            for batch_idx, batch in enumerate(loader):
                run.notes.append(shown(run.evaluate(batch, batch_idx)))
        run.net.train(), run.head.train()
        run.training = True
    found = {{"notes": run.notes, "store": shown(run.store), "table": shown(run.table), "nested": shown(run.nested)}}
    found |= {{"taken": shown(run.taken), "seen": sorted(run.seen), "weights": run.net.layer.weight.tolist()}}
    found |= {{"head": run.head.weight.tolist()}}
    return found, fabric
"""

_STEP = """
    def {name}(self, batch, batch_idx):
        x, y = batch
        h = self.layer(x)
        loss = F.mse_loss(h, y)
        out = {{}}
        {lines}
        out["loss"] = loss
        return out
"""

_TAIL = """
def main(devices):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, generator=generator) * torch.linspace(0.5, 2, 16)[:, None]
    data = TensorDataset(x, x[:, :2] * 0.7 + 0.3)
    model = Model()
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    options |= dict(accelerator="cpu", devices=devices, num_sanity_val_steps=0, callbacks=[model.taker])
    trainer = pl.Trainer(max_epochs=2, **options)
    trainer.fit(model, DataLoader(data, 4), DataLoader(data, 8))
    found = {"notes": model.notes, "store": shown(model.store), "table": shown(model.table), "nested": shown(model.nested)}
    found |= {"taken": shown(model.taker.taken), "seen": sorted(model.seen), "weights": model.layer.weight.tolist()}
    found |= {"metrics": sorted((key, float(one)) for key, one in trainer.callback_metrics.items())}
    return found, trainer
"""


@dataclass(frozen=True)
class Expressions:
    """A program of numbered expressions, each the name of its step and a statement."""

    features: tuple[tuple[int, str], ...]

    @classmethod
    def random(cls, seed: int) -> Self:
        rng = random.Random(seed)
        places = rng.choice((_WHERE, _WHERE, _IN_FABRIC))
        chosen = [(number, rng.choice(places)) for number in range(rng.randint(1, _MOST))]
        return cls(tuple((number, f"{where}: {_statement(rng, number, where)}") for number, where in chosen))

    def without(self, number: int) -> Self:
        return replace(self, features=tuple(one for one in self.features if one[0] != number))

    def source(self) -> str:
        texts = [text.partition(": ") for _, text in self.features]
        steps = ""
        for name in ("training_step", "validation_step"):
            lines = [text for where, _, text in texts if where == name]
            steps += _STEP.format(name=name, lines="\n        ".join(lines or ["pass"]))
        for name, arguments in zip(_HOOKS, ("self", "self, optimizer"), strict=True):
            lines = [text for where, _, text in texts if where == name]
            steps += (
                f"\n    def {name}({arguments}):\n        out = {{}}\n        " + "\n        ".join(lines) + "\n" if lines else ""
            )
        if not any(where in _IN_FABRIC for where, _, _ in texts):
            return _HEAD + steps + _TAIL
        lines = {name: "\n        ".join(text for where, _, text in texts if where == name) or "pass" for name in _IN_FABRIC}
        return _HEAD + _LOOP.format(**lines, waits="batch_idx % 2 == 0" if len(texts) % 2 else "False")


def _statement(rng: random.Random, number: int, where: str) -> str:
    after = where in _HOOKS or where == "fabric_backward"
    values = GRADIENTS if after else VALUES
    if where in _IN_FABRIC:
        values = [one for one in values if "self.trainer" not in one[1] and "self.optimizers" not in one[1]]
    choices = (
        [(kinds, use) for kinds, use in USES if not ("loss" in use or "batch_idx" in use)] + list(_CHANGES) if after else USES
    )
    functions = [one for one in FUNCTIONS if not (after and ("h.mean" in one[2] or "x[" in one[2]))]
    while True:
        kind, text = rng.choice(values)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2))):
            _, given, function = rng.choice([one for one in functions if kind in one[0]])
            count = function.count("{}")
            text = f"({function.format(*[text] * count) if '{{' in function else function.replace('{}', text)})"
            kind = ("n" if kind == "b" else kind) if given == "=" else given
        uses = [use for kinds, use in choices if kind in kinds]
        if uses:
            return rng.choice(uses).format(k=number, e=text)
