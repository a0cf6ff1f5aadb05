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

_WHERE = ("training_step", "training_step", "training_step", "validation_step")

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
        return cls(tuple((number, f"{rng.choice(_WHERE)}: {_statement(rng, number)}") for number in range(rng.randint(1, _MOST))))

    def without(self, number: int) -> Self:
        return replace(self, features=tuple(one for one in self.features if one[0] != number))

    def source(self) -> str:
        steps = ""
        for name in ("training_step", "validation_step"):
            lines = [text.partition(": ")[2] for _, text in self.features if text.startswith(name)]
            steps += _STEP.format(name=name, lines="\n        ".join(lines or ["pass"]))
        return _HEAD + steps + _TAIL


def _statement(rng: random.Random, number: int) -> str:
    while True:
        kind, text = rng.choice(VALUES)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2))):
            _, given, function = rng.choice([one for one in FUNCTIONS if kind in one[0]])
            count = function.count("{}")
            text = f"({function.format(*[text] * count) if '{{' in function else function.replace('{}', text)})"
            kind = ("n" if kind == "b" else kind) if given == "=" else given
        uses = [use for kinds, use in USES if kind in kinds]
        if uses:
            return rng.choice(uses).format(k=number, e=text)
