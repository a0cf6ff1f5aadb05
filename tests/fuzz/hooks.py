"""Programs that start from Lightning's hooks: what one of them changes, of every kind and in every place, and a step reads."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

from tests.fuzz import models
from tests.fuzz.containers import CONTAINERS, PLACES
from tests.fuzz.models import CHANGES, FORMS, OPTIMIZERS, ORDERS, STIRRED, STIRS, WAYS

PRELUDE = Path(__file__).with_name("prelude.py")
HOOKS = {
    "on_fit_start": "",
    "on_train_start": "",
    "on_train_epoch_start": "",
    "on_train_batch_start": "batch, batch_idx",
    "on_before_zero_grad": "optimizer",
    "on_before_backward": "loss",
    "on_after_backward": "",
    "on_before_optimizer_step": "optimizer",
    "on_train_batch_end": "outputs, batch, batch_idx",
    "on_validation_start": "",
    "on_validation_epoch_start": "",
    "on_validation_batch_start": "batch, batch_idx, dataloader_idx=0",
    "on_validation_batch_end": "outputs, batch, batch_idx, dataloader_idx=0",
    "on_validation_epoch_end": "",
    "on_validation_end": "",
    "on_train_epoch_end": "",
    "on_train_end": "",
    "on_fit_end": "",
}
STEPS = ("training_step", "validation_step", "training_step")
"""Beside hooks, these write too; ``training_step`` is drawn twice as often."""
WHEN = ("True", "True", "trainer.global_step == 2", "trainer.current_epoch == 1", "trainer.global_step % 2")
VALUES = ("3.0", "0.5", "float(trainer.global_step)", "trainer.current_epoch + 0.25", "len(SEEN) / 50")
VALUES_OF_STEPS = ("3.0", "batch_idx + 0.5", "float(trainer.global_step)", "loss.item()", "float(loss.detach())")
READERS = {
    "arithmetic": ("training", "scale = scale * (0.5 + 0.1 * {found})"),
    "branch": ("training", "if {found} > 1.5:\n    scale = scale * 0.5"),
    "loop": ("training", "for _ in range(min(3, int({found}))):\n    h = h * 0.9"),
    "while": ("training", "left = float({found})\nwhile left > 0.75 and left < 9:\n    h, left = h * 0.9, left * 0.6"),
    "matched": ("training", "match float({found}):\n    case 1.0 | 0.5:\n        h = h * 0.7\n    case _:\n        h = h * 1.1"),
    "formatted": ("training", "scale = scale * (0.8 if '%.2f' % float({found}) == '1.00' else 1.0)"),
    "tried": ("training", "try:\n    scale = scale / (float({found}) - 3.0)\nexcept ZeroDivisionError:\n    scale = 0.5"),
    "where": ("training", "h = torch.where(h > float({found}) / 4, h, h * 0.5)"),
    "sliced": ("training", "h = torch.cat([h[:, : int({found}) % 4], h[:, int({found}) % 4 :] * 0.5], 1)"),
    "in_method": ("training", "h = h * (0.5 + 0.1 * module.read{n}())"),
    "in_head": ("head", "scale = scale * (0.5 + 0.1 * {found})"),
    "gradient_hook": ("training", "h.register_hook(lambda gradient: gradient * (0.5 + 0.1 * {found}))"),
    "forward_hook": (
        "training",
        "handle = module.body.register_forward_hook(lambda one, x, y: y * (0.5 + 0.1 * {found}))\n"
        "h = h + 0.1 * module.body(h)\nhandle.remove()",
    ),
    "stored": ("training", "scale = scale * (0.5 + 0.1 * module.k{n})\nmodule.k{n} = float({found})"),
    "returned": ("training", "self.log('read{n}', torch.as_tensor({found}, dtype=torch.float32))"),
    "validation": ("validation", "value = value + {found}"),
    "validation_branch": ("validation", "if {found} > 1.5:\n    value = value * 2"),
    "predicted": ("predict", "h = h * (0.5 + 0.1 * {found})"),
}
"""The step that reads a container, and how, where ``found`` is the number."""
TRAINERS = ({}, {}, {"accumulate_grad_batches": 2}, {"val_check_interval": 2}, {"limit_train_batches": 2}, {"max_steps": 5})
ENTRIES = (
    "trainer.fit(net, TRAIN, VAL)",
    "trainer.fit(net, TRAIN, VAL); trainer.validate(net, VAL, verbose=False)",
    "trainer.validate(net, VAL, verbose=False); trainer.fit(net, TRAIN, VAL)",
    "trainer.fit(net, TRAIN, VAL); trainer.fit_loop.max_epochs = 4; trainer.fit(net, TRAIN, VAL)",
    "trainer.fit(net, TRAIN); SEEN.append(['p', trainer.predict(net, VAL)])",
    "net = copy.deepcopy(net); OWNER[:] = [net]; trainer.fit(net, TRAIN, VAL)",
    "trainer.fit(net, TRAIN, VAL); net = copy.deepcopy(net); OWNER[:] = [net]; trainer = made(max_epochs=1); "
    "trainer.fit(net, TRAIN)",
    "trainer.fit(net, TRAIN, VAL); trainer.save_checkpoint('a.ckpt'); net = Net(); trainer = made(max_epochs=3); "
    "trainer.fit(net, TRAIN, VAL, ckpt_path='a.ckpt', weights_only=False)",
)

_HEAD = """
class Head(torch.nn.Linear):
    def forward(self, x):
        module, scale = self.owner(), 1.0
{in_head}
        return super().forward(x) * scale

"""


@dataclass(frozen=True)
class Hooked:
    """A program of hooks.

    Attributes:
        features: ``CONTAINER:place:hook:owner:when:write:value:reader:read`` (numbers are indices), ``parts:…`` (modules of
            one class), or a name of :data:`CHANGES`, each with its number.
        trainer, entry, optimizer: the index of the Trainer's arguments, of what is called, and of how it optimizes.
    """

    features: tuple[tuple[int, str], ...]
    trainer: int = 0
    entry: int = 0
    optimizer: int = 0

    @classmethod
    def random(cls, seed: int) -> Hooked:
        """The program of a seed: one to four containers, up to two changes of the model, and up to two groups of modules."""
        draw = random.Random(seed)
        chosen = [_random_container(draw) for _ in range(draw.randint(1, 4))]
        chosen += draw.sample(sorted(CHANGES), draw.choice((0, 0, 1, 1, 2)))
        chosen += [_random_parts(draw) for _ in range(draw.choice((0, 0, 1, 1, 2)))]
        return cls(tuple(enumerate(chosen)), *(draw.randrange(len(one)) for one in (TRAINERS, ENTRIES, OPTIMIZERS)))

    def without(self, number: int) -> Hooked:
        """The same without one of its features."""
        return replace(self, features=tuple(one for one in self.features if one[0] != number))

    def source(self) -> str:
        """The script."""
        parts = _Parts()
        for number, feature in self.features:
            if feature in CHANGES:
                _add_change(parts, feature)
            elif feature.startswith("parts:"):
                _add_parts(parts, number, feature)
            else:
                _add_container(parts, number, feature)
        trainer, optimizing = dict(TRAINERS[self.trainer]), OPTIMIZERS[self.optimizer]
        if optimizing.manual:
            trainer.pop("accumulate_grad_batches", None)  # Lightning refuses it
        if "ckpt_path" in ENTRIES[self.entry]:
            trainer.pop("max_steps", None)  # Lightning begins with an epoch without batches then (docs/checkpoints.md)
        return parts.render(trainer, ENTRIES[self.entry], optimizing)


def _random_container(draw: random.Random) -> str:
    name = draw.choice(sorted(CONTAINERS))
    kind = CONTAINERS[name]
    writer = draw.choice((*sorted(HOOKS), *STEPS))
    numbers = [draw.randrange(len(one)) for one in (WHEN, kind.writes, VALUES)]
    rest = (draw.choice(sorted(READERS)), draw.randrange(len(kind.reads)))
    return ":".join(map(str, (name, draw.choice(sorted(PLACES)), writer, draw.choice(("module", "callback")), *numbers, *rest)))


def _random_parts(draw: random.Random) -> str:
    chosen = (sorted(FORMS), sorted(ORDERS), sorted(WAYS), sorted(STIRS), STIRRED, ("training", "validation", "both", "both"))
    return ":".join(("parts", str(draw.randint(2, 4)), *map(draw.choice, chosen)))


class _Parts:
    def __init__(self) -> None:
        self.module: list[str] = []
        self.init: list[str] = []
        self.on_callback: list[str] = []
        self.on_trainer: list[str] = []
        self.methods: list[str] = []
        self.hooks: dict[str, dict[str, list[str]]] = {"module": {}, "callback": {}}
        self.steps: dict[str, list[str]] = {
            name: [] for name in ("training", "validation", "predict", "head", "parts", "val_parts")
        }
        self.after: dict[str, list[str]] = {"training_step": [], "validation_step": []}

    def render(self, trainer: dict[str, int], entry: str, optimizing: models.Optimizing) -> str:
        head = _HEAD.format(in_head=_indented(self.steps["head"] or ["pass"], 8))
        lines = [PRELUDE.read_text(), head, *self.module]
        lines += ["class Watch(pl.Callback):", "    def __init__(self):", _indented(self.on_callback or ["pass"], 8)]
        for owner in ("callback", "module"):
            if owner == "module":
                lines += _net(self, optimizing)
            for hook, signature in HOOKS.items():
                lines += _hook(self, owner, hook, signature)
        options = {"max_epochs": 2, "limit_val_batches": 2, "num_sanity_val_steps": 1, **trainer}
        added = _indented(self.on_trainer or ["pass"], 8)
        return "\n".join([*lines, _MAIN.format(options=options, added=added, entry=_indented(entry.split("; "), 8))])


_MAIN = """
def main(devices):
    os.environ.pop("XLA_FUZZ", None)
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(16, 4, generator=draw)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    TRAIN = torch.utils.data.DataLoader(data, 4)
    VAL = torch.utils.data.DataLoader(data, 8)
    rows = Rows()

    def made(**options):
        trainer = pl.Trainer(accelerator="cpu", devices=devices, logger=rows, callbacks=[Watch()], enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, **{{**{options}, **options}})
{added}
        return trainer

    net, trainer = Net(), made()
    record = {{}}
    try:
{entry}
    except Exception as error:
        record = {{"error": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}}
    weights = {{name: value.clone() for name, value in net.state_dict().items()}}
    return {{"seen": SEEN, "rows": rows.rows, "weights": weights, **record}}, trainer
"""


def _indented(lines: list[str], by: int) -> str:
    return "\n".join(" " * by + line for one in lines for line in one.splitlines())


def _body(lines: list[str], *first: str) -> str:
    """Statements of a method: names of the script's that they bind are declared ahead of all."""
    found = [line for one in lines for line in one.splitlines()]
    bound = sorted({line.split()[1] for line in found if line.startswith("global ")})
    kept = [line for line in found if not line.startswith("global ")]
    return _indented([*([f"global {', '.join(bound)}"] if bound else []), *first, *kept], 8)


def _net(parts: _Parts, optimizing: models.Optimizing) -> list[str]:
    steps, manual = parts.steps, [optimizing.manual] if optimizing.manual else []
    loss = ["loss = F.mse_loss(self.head(h) * scale, batch[1])", "self.log('loss', loss)", *manual]
    value = [
        "value = F.mse_loss(self.head(h), batch[1])",
        *steps["validation"],
        "self.log('val', value)",
        "loss = value.detach()",
    ]
    begun = ("module, trainer, scale = self, self.trainer, 1.0", "h = torch.tanh(self.body(batch[0]))")
    return [
        "class Net(pl.LightningModule):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.body, self.head = torch.nn.Linear(4, 4), Head(4, 1)",
        "        self.head.owner = lambda: OWNER[0]",
        f"        self.automatic_optimization = {not manual}",
        "        OWNER[:] = [self]",
        _indented(parts.init or ["pass"], 8),
        *parts.methods,
        "    def training_step(self, batch, batch_idx):",
        _body([*steps["parts"], *steps["training"], *loss, *parts.after["training_step"], "return loss"], *begun),
        "    def validation_step(self, batch, batch_idx):",
        _body([*steps["val_parts"], *value, *parts.after["validation_step"]], *begun),
        "    def predict_step(self, batch, batch_idx):",
        _body([*steps["predict"], "return self.head(h)"], *begun),
        "    def configure_optimizers(self):",
        _indented([optimizing.configured], 8),
    ]


def _hook(parts: _Parts, owner: str, hook: str, signature: str) -> list[str]:
    lines = parts.hooks[owner].get(hook, [])
    if not lines:
        return []
    names = ["self", *(("trainer", "module") if owner == "callback" else ()), *([signature] if signature else ())]
    first = "pass" if owner == "callback" else "module, trainer = self, self.trainer"
    return [f"    def {hook}({', '.join(names)}):", _body(lines, first)]


def _add_container(parts: _Parts, number: int, feature: str) -> None:
    """A container, what changes it, and a step that reads it; it is seen at the end of each batch."""
    name, place, writer, owner, when, write, value, reader, read = feature.split(":")
    kind = CONTAINERS[name]
    for_module, for_init, path = (one.format(n=number, made=kind.made) for one in PLACES[place])
    if for_module:
        parts.module.append(for_module)
    if for_init:
        parts.init.append(for_init)
    if place in ("callback", "trainer"):
        where, who = (parts.on_callback, "self") if place == "callback" else (parts.on_trainer, "trainer")
        where.append(f"{who}.c{number} = {kind.made}")
    values = VALUES_OF_STEPS if writer in parts.after else VALUES
    written = kind.writes[int(write)].replace("@", path).replace("$", values[int(value)])
    binds = place == "global" and written.startswith(f"C{number} ")
    shown = "" if writer in parts.after else " and len(SEEN) < 40"
    lines = (f"global C{number}\n" if binds else "") + f"if {WHEN[int(when)]}{shown}:\n    {written}"
    if writer in parts.after:
        parts.after[writer].append(lines)
    else:
        parts.hooks[owner].setdefault(writer, []).append(lines)
    found = f"({kind.reads[int(read)].replace('@', path)})"
    step, text = READERS[reader]
    parts.steps[step].append(text.format(found=found, n=number))
    if reader == "stored":
        parts.init.append(f"self.k{number} = 1.0")
    if reader == "in_method":
        parts.methods += [f"    def read{number}(self):", f"        module = self\n        return {found}"]
    parts.hooks["module"].setdefault("on_train_batch_end", []).append(f"SEEN.append([trainer.global_step, float({found})])")


def _add_change(parts: _Parts, name: str) -> None:
    change = CHANGES[name]
    for hook, line in ((change.hook, change.line), *change.also):
        parts.hooks["module"].setdefault(hook, []).append(line)
    if change.init:
        parts.init.append(change.init)
    if change.step:
        parts.steps["parts"].append(change.step)


def _add_parts(parts: _Parts, number: int, feature: str) -> None:
    """Modules of one class: how they are made, called in each step, and changed by a hook."""
    _, many, form, order, way, stir, hook, where = feature.split(":")
    names = {"n": number, "k": int(many)}
    parts.init += [FORMS[form].format(**names), f"self.pick{number} = 0"]
    if way == "bound":
        parts.init.append(f"self.calls{number} = [one.encoded for one in self.parts{number}]")
    if way == "net_method":
        parts.methods += [f"    def through{number}(self, h, i):", f"        return self.parts{number}[i].encoded(h)"]
    called = f"for i in {ORDERS[order].format(**names)}:\n" + _indented([WAYS[way].format(**names)], 4)
    if where in ("training", "both"):
        parts.steps["parts"].append(called)
    if where in ("validation", "both"):
        parts.steps["val_parts"].append(called)
    parts.hooks["module"].setdefault(hook, []).append(STIRS[stir].format(**names))
    parts.hooks["module"].setdefault("on_train_batch_end", []).append(
        f"SEEN.append([-1, *[one.calls for one in self.parts{number}]])"
    )
