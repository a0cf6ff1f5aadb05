"""Programs that start from Lightning's hooks: what one of them changes, of every kind and in every place, and a step reads."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple


class Container(NamedTuple):
    """A kind of host state; ``@`` stands for it, ``$`` for a number that is written.

    Attributes:
        made: the expression that makes one.
        writes: statements that change it.
        reads: expressions that give a number.
    """

    made: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]


_LIST = ("@.append($)", "@[0] = $", "@.insert(0, $)", "@.extend([$, 1.0])", "@[:] = [$]", "@ += [$]", "@.reverse()")
_OF_LIST = ("sum(@)", "float(len(@))", "@[-1]", "max(@)", "float(3.0 in @)", "sum(one for one in @ if one > 1)", "sorted(@)[0]")
_DICT = ("@['a'] = $", "@.update(b=$)", "@.pop('b', None)", "@.setdefault('z', $)", "@['a'] += $", "@[str($)] = 1.0")
_OF_DICT = ("@['a']", "@.get('b', 0.5)", "float(len(@))", "sum(@.values())", "float('b' in @)", "sum(v for _, v in @.items())")
_NAMED = ("@.x = $", "@.x += $", "setattr(@, 'x', $)", "@.__dict__.update(x=$)")
_OF_NAMED = ("@.x", "getattr(@, 'x')", "vars(@)['x']", "@.x if hasattr(@, 'x') else 0.0")

CONTAINERS: dict[str, Container] = {
    "list": Container("[1.0, 2.0]", _LIST, _OF_LIST),
    "nested_list": Container("[[1.0], 2.0]", ("@[0].append($)", "@[0][0] = $"), ("sum(@[0])", "@[0][-1]", "float(len(@[0]))")),
    "deque": Container("collections.deque([1.0, 2.0], maxlen=3)", ("@.append($)", "@.appendleft($)", "@.rotate(1)"), _OF_LIST),
    "dict": Container("{'a': 1.0}", _DICT, _OF_DICT),
    "ordered_dict": Container(
        "collections.OrderedDict(a=1.0)", (*_DICT, "@.move_to_end('a')"), (*_OF_DICT, "list(@.values())[-1]")
    ),
    "defaultdict": Container(
        "collections.defaultdict(float, a=1.0)", ("@['a'] += $", "@['b'] = $"), ("@['a']", "sum(@.values())")
    ),
    "counter": Container(
        "collections.Counter(a=1)", ("@['a'] += 1", "@.update('ab')"), ("float(@['a'])", "float(sum(@.values()))")
    ),
    "chain_map": Container(
        "collections.ChainMap({'a': 1.0})", ("@['a'] = $", "@.maps[0]['b'] = $"), ("@['a']", "@.get('b', 0.5)")
    ),
    "set": Container(
        "{1.0}", ("@.add($)", "@.discard(1.0)", "@.update([$, 5.0])"), ("sum(@)", "float(len(@))", "float(3.0 in @)")
    ),
    "array": Container("array.array('d', [1.0, 2.0])", ("@[0] = $", "@.append($)"), ("sum(@)", "@[0]", "@[-1]", "float(len(@))")),
    "bytearray": Container("bytearray(b'ab')", ("@[0] = int($) % 9", "@.append(int($) % 9)"), ("sum(@) / 99", "@[0] / 99")),
    "numpy": Container(
        "np.array([1.0, 2.0])", ("@[0] = $", "@ += 0.5", "np.copyto(@, $)"), ("float(@[0])", "@.sum().item()", "@.mean()")
    ),
    "tensor": Container(
        "torch.tensor([1.0, 2.0])", ("@[0] = $", "@.add_(0.5)", "@.data[1] = $"), ("@.sum()", "@[0]", "@.max().item()")
    ),
    "namespace": Container("types.SimpleNamespace(x=1.0)", _NAMED, _OF_NAMED),
    "plain_object": Container("Plain()", (*_NAMED, "@.raise_to($)", "@.prop = $"), (*_OF_NAMED, "@.value()", "@.prop", "@()")),
    "dataclass": Container("Record()", (*_NAMED, "@.many.append($)"), (*_OF_NAMED, "sum(@.many)", "dataclasses.asdict(@)['x']")),
    "slots": Container("Slotted()", ("@.x = $", "@.x += $"), ("@.x", "getattr(@, 'x')")),
    "context_var": Container("contextvars.ContextVar('v', default=1.0)", ("@.set($)", "@.set(@.get() + 1)"), ("@.get()",)),
    "cell": Container("made_cell()", ("@[1]($)",), ("@[0]()",)),
    "ctypes": Container("ctypes.c_double(1.0)", ("@.value = $", "@.value += 1"), ("@.value",)),
    "partial": Container(
        "functools.partial(scaled, factor=1.0)", ("@.keywords['factor'] = $",), ("@(2.0)", "@.keywords['factor']")
    ),
}

PLACES = {
    "attribute": ("", "self.c{n} = {made}", "module.c{n}"),
    "class": ("", "type(self).c{n} = {made}", "type(module).c{n}"),
    "global": ("C{n} = {made}", "", "C{n}"),
    "held": ("BOX{n} = types.SimpleNamespace(c={made})", "", "BOX{n}.c"),
    "in_dict": ("", "self.d{n} = {{'c': {made}}}", "module.d{n}['c']"),
    "submodule": ("", "self.head.c{n} = {made}", "module.head.c{n}"),
    "callback": ("", "", "module.trainer.callbacks[0].c{n}"),
}
"""Where a container is: a statement of the script, one of ``__init__``, and how a method gets there from ``module``."""

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
WHEN = ("True", "True", "trainer.global_step == 2", "trainer.current_epoch == 1", "trainer.global_step % 2")
VALUES = ("3.0", "0.5", "float(trainer.global_step)", "trainer.current_epoch + 0.25", "len(SEEN) / 50")
READERS = (
    "arithmetic",
    "arithmetic",
    "branch",
    "loop",
    "in_head",
    "gradient_hook",
    "validation",
    "validation_branch",
    "returned",
)
EXTRAS = {
    "frozen": ("on_train_epoch_start", "module.head.requires_grad_(trainer.current_epoch != 1)"),
    "scaled_weight": ("on_train_batch_end", "module.head.weight.data.mul_(0.9)"),
    "no_grad_copy": ("on_train_batch_end", "with torch.no_grad(): module.head.bias.copy_(module.body.bias[:1])"),
    "halved_gradient": ("on_after_backward", "module.head.weight.grad.mul_(0.5)"),
    "rate": ("on_train_epoch_end", "trainer.optimizers[0].param_groups[0]['lr'] *= 0.5"),
    "evaluated": ("on_train_batch_start", "module.body.train(trainer.global_step % 2 == 0)"),
    "stopped": ("on_train_batch_end", "trainer.should_stop = trainer.global_step == 5"),
    "logged": ("on_train_batch_start", "module.log('h', float(trainer.global_step))"),
}
TRAINERS = ({}, {}, {"accumulate_grad_batches": 2}, {"val_check_interval": 2}, {"limit_train_batches": 2}, {"max_steps": 5})
ENTRIES = (
    "trainer.fit(net, TRAIN, VAL)",
    "trainer.fit(net, TRAIN, VAL); trainer.validate(net, VAL, verbose=False)",
    "trainer.validate(net, VAL, verbose=False); trainer.fit(net, TRAIN, VAL)",
    "trainer.fit(net, TRAIN, VAL); trainer.fit_loop.max_epochs = 4; trainer.fit(net, TRAIN, VAL)",
    "trainer.fit(net, TRAIN); SEEN.append(['p', trainer.predict(net, VAL)])",
)

_PRELUDE = """
import array, collections, contextvars, ctypes, dataclasses, functools, types
import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F

SEEN, OWNER = [], []


class Plain:
    def __init__(self):
        self.x = 1.0

    def raise_to(self, value):
        self.x = value

    def value(self):
        return self.x

    @property
    def prop(self):
        return self.x * 2

    @prop.setter
    def prop(self, value):
        self.x = value

    def __call__(self):
        return self.x + 1


@dataclasses.dataclass
class Record:
    x: float = 1.0
    many: list = dataclasses.field(default_factory=lambda: [1.0])


class Slotted:
    __slots__ = ("x",)

    def __init__(self):
        self.x = 1.0


def made_cell():
    value = 1.0

    def get():
        return value

    def put(new):
        nonlocal value
        value = new

    return get, put


def scaled(value, factor):
    return value * factor


class Head(torch.nn.Linear):
    def forward(self, x):
        module, scale = self.owner(), 1.0
{in_head}
        return super().forward(x) * scale


class Rows(pl.loggers.logger.Logger):
    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step):
        self.rows.append([step, {{name: float(value) for name, value in metrics.items()}}])


"""


@dataclass(frozen=True)
class Hooked:
    """A program of hooks.

    Attributes:
        features: ``CONTAINER:place:hook:owner:when:write:value:reader:read`` (the last five are indices), or a name of
            :data:`EXTRAS`, each with its number.
        trainer, entry: the index of the Trainer's arguments, and of what is called.
    """

    features: tuple[tuple[int, str], ...]
    trainer: int = 0
    entry: int = 0

    @classmethod
    def random(cls, seed: int) -> Hooked:
        """The program of a seed: one to four containers, up to two extras."""
        draw = random.Random(seed)
        chosen = []
        for _ in range(draw.randint(1, 4)):
            name = draw.choice(sorted(CONTAINERS))
            kind = CONTAINERS[name]
            parts = (name, draw.choice(sorted(PLACES)), draw.choice(sorted(HOOKS)), draw.choice(("module", "callback")))
            drawn = [len(one) for one in (WHEN, kind.writes, VALUES, READERS, kind.reads)]
            chosen.append(":".join(map(str, (*parts, *map(draw.randrange, drawn)))))
        chosen += draw.sample(sorted(EXTRAS), draw.randint(0, 2))
        return cls(tuple(enumerate(chosen)), draw.randrange(len(TRAINERS)), draw.randrange(len(ENTRIES)))

    def without(self, number: int) -> Hooked:
        """The same without one of its features."""
        return Hooked(tuple(one for one in self.features if one[0] != number), self.trainer, self.entry)

    def source(self) -> str:
        """The script."""
        parts = _Parts()
        for number, feature in self.features:
            if feature in EXTRAS:
                hook, line = EXTRAS[feature]
                parts.hooks["module"].setdefault(hook, []).append(line)
            else:
                _add(parts, number, feature)
        return parts.render(TRAINERS[self.trainer], ENTRIES[self.entry])


class _Parts:
    def __init__(self) -> None:
        self.module: list[str] = []
        self.init: list[str] = []
        self.on_callback: list[str] = []
        self.hooks: dict[str, dict[str, list[str]]] = {"module": {}, "callback": {}}
        self.steps: dict[str, list[str]] = {"training": [], "validation": [], "head": []}
        self.seen: list[str] = []

    def render(self, trainer: dict[str, int], entry: str) -> str:
        lines = [_PRELUDE.format(in_head=_indented(self.steps["head"] or ["pass"], 8)), *self.module]
        lines += ["class Watch(pl.Callback):", "    def __init__(self):", _indented(self.on_callback or ["pass"], 8)]
        for owner in ("callback", "module"):
            if owner == "module":
                lines += _net(self)
            for hook, signature in HOOKS.items():
                lines += _hook(self, owner, hook, signature)
        options = {"max_epochs": 2, "limit_val_batches": 2, "num_sanity_val_steps": 1, **trainer}
        arguments = ", ".join(f"{name}={value}" for name, value in options.items())
        return "\n".join([*lines, _MAIN.format(arguments=arguments, entry=_indented(entry.split("; "), 8))])


_MAIN = """
def main(devices):
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(16, 4, generator=draw)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    TRAIN = torch.utils.data.DataLoader(data, 4)
    VAL = torch.utils.data.DataLoader(data, 8)
    net, rows = Net(), Rows()
    trainer = pl.Trainer(accelerator="cpu", devices=devices, logger=rows, callbacks=[Watch()], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, {arguments})
    record = {{}}
    try:
{entry}
    except Exception as error:
        record = {{"error": type(error).__name__, "text": str(error)}}
    weights = {{name: value.clone() for name, value in net.state_dict().items()}}
    return {{"seen": SEEN, "rows": rows.rows, "weights": weights, **record}}, trainer
"""


def _indented(lines: list[str], by: int) -> str:
    return "\n".join(" " * by + line for one in lines for line in one.splitlines())


def _net(parts: _Parts) -> list[str]:
    return [
        "class Net(pl.LightningModule):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.body, self.head = torch.nn.Linear(4, 4), Head(4, 1)",
        "        self.head.owner = lambda: OWNER[0]",
        "        OWNER[:] = [self]",
        _indented(parts.init or ["pass"], 8),
        "    def training_step(self, batch, batch_idx):",
        "        module, scale = self, 1.0",
        "        h = torch.tanh(self.body(batch[0]))",
        _indented(parts.steps["training"] or ["pass"], 8),
        "        loss = F.mse_loss(self.head(h) * scale, batch[1])",
        "        self.log('loss', loss)",
        "        return loss",
        "    def validation_step(self, batch, batch_idx):",
        "        module, value = self, F.mse_loss(self.head(torch.tanh(self.body(batch[0]))), batch[1])",
        _indented(parts.steps["validation"] or ["pass"], 8),
        "        self.log('val', value)",
        "    def predict_step(self, batch, batch_idx):",
        "        return self.head(torch.tanh(self.body(batch[0])))",
        "    def configure_optimizers(self):",
        "        return torch.optim.SGD(self.parameters(), lr=0.05)",
    ]


def _hook(parts: _Parts, owner: str, hook: str, signature: str) -> list[str]:
    lines = parts.hooks[owner].get(hook, [])
    if not lines:
        return []
    names = ["self", *(("trainer", "module") if owner == "callback" else ()), *([signature] if signature else ())]
    first = "pass" if owner == "callback" else "module, trainer = self, self.trainer"
    globals_ = sorted({line.split()[1] for one in lines for line in one.splitlines() if line.startswith("global ")})
    body = [f"global {', '.join(globals_)}"] if globals_ else []
    body += [first, *("\n".join(line for line in one.splitlines() if not line.startswith("global ")) for one in lines)]
    return [f"    def {hook}({', '.join(names)}):", _indented(body, 8)]


def _add(parts: _Parts, number: int, feature: str) -> None:
    """A container, a hook that changes it, and a step that reads it; both are seen at the end of each batch."""
    name, place, hook, owner, *rest = feature.split(":")
    when, write, value, reader, read = map(int, rest)
    kind = CONTAINERS[name]
    for_module, for_init, path = (one.format(n=number, made=kind.made) for one in PLACES[place])
    if for_module:
        parts.module.append(for_module)
    if for_init:
        parts.init.append(for_init)
    if place == "callback":
        parts.on_callback.append(f"self.c{number} = {kind.made}")
    written = kind.writes[write].replace("@", path).replace("$", VALUES[value])
    named = f"global C{number}\n" if place == "global" and " += " in written and written.startswith(f"C{number} ") else ""
    lines = f"{named}if {WHEN[when]} and len(SEEN) < 40:\n    {written}"
    parts.hooks[owner].setdefault(hook, []).append(lines)
    found = kind.reads[read].replace("@", path)
    _read(parts, READERS[reader], found, number)
    parts.hooks["module"].setdefault("on_train_batch_end", []).append(f"SEEN.append([trainer.global_step, float({found})])")


def _read(parts: _Parts, reader: str, found: str, number: int) -> None:
    train, validation = parts.steps["training"], parts.steps["validation"]
    if reader == "arithmetic":
        train.append(f"scale = scale * (0.5 + 0.1 * {found})")
    elif reader == "branch":
        train.append(f"if {found} > 1.5:\n    scale = scale * 0.5")
    elif reader == "loop":
        train.append(f"for _ in range(min(3, int({found}))):\n    h = h * 0.9")
    elif reader == "in_head":
        parts.steps["head"].append(f"scale = scale * (0.5 + 0.1 * {found})")
    elif reader == "gradient_hook":
        train.append(f"h.register_hook(lambda gradient: gradient * (0.5 + 0.1 * {found}))")
    elif reader == "validation":
        validation.append(f"value = value + {found}")
    elif reader == "validation_branch":
        validation.append(f"if {found} > 1.5:\n    value = value * 2")
    else:
        train.append(f"self.log('read{number}', torch.as_tensor({found}, dtype=torch.float32))")
