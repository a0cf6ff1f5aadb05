"""Details of Fabric's API in one script, for stock Lightning and here: ``details_script.py PACKAGE`` prints one line of JSON."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

if sys.argv[1] == "torch_compat":
    importlib.import_module("torch_compat").install()

from lightning.fabric import Fabric
from lightning.fabric.accelerators import ACCELERATOR_REGISTRY
from lightning.fabric.loggers.tensorboard import TensorBoardLogger
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import STRATEGY_REGISTRY, SingleDeviceStrategy  # pyright: ignore[reportPrivateImportUsage]
from lightning.fabric.utilities.throughput import Throughput, ThroughputMonitor
from lightning.pytorch import LightningModule, Trainer

X = torch.linspace(-1, 1, 32).reshape(8, 4)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 2)
        self.example_input_array = X

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch).square().mean() * (batch_idx + 1)
        self.log("loss", loss)
        self.log_dict({"plain": 1.5, "twice": loss.detach() * 2})
        self.log("not", loss, logger=False)
        return loss


class Log:
    """A logger that remembers what it is given."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append({name: (type(value).__name__, round(float(value), 4)) for name, value in metrics.items()})


class Unscaling(Precision):
    """Says when it is asked."""

    told: ClassVar[list[str]] = []

    def unscale_gradients(self, optimizer: Any) -> None:
        self.told.append(type(optimizer).__name__)


class Writer:
    """Stands for TensorBoard's."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def add_graph(self, model: Any, example: Any) -> None:
        self.told.append((type(model).__name__, str(type(example))))


def error(call: Any) -> str:
    """The name of what a call raises, and the beginning of what it says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as raised:
            return f"{type(raised).__name__}: {str(raised)[:40]}"
    return ", ".join(f"{one.category.__name__}: {str(one.message)[:40]}" for one in caught) or "nothing"


def fabric_of(**options: Any) -> Any:
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    fabric.launch()
    return fabric


def modules(found: dict[str, Any]) -> None:
    log = Log()
    fabric = fabric_of(loggers=[log])
    model: Any = Model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for index in range(2):
        optimizer.zero_grad()
        loss = model.training_step(X, index)
        fabric.backward(loss)
        optimizer.step()
        losses.append(round(loss.item(), 4))
    found["losses"], found["logged"] = losses, log.rows
    found["fabric"] = [model.fabric is fabric, model.module.trainer.global_rank]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.module.layer.weight.zero_()
        found["copy"] = [round(float(one(X).sum()), 4) for one in (copied, model)]
    alone = fabric_of().setup(Model())
    found["no logger"] = [error(lambda: alone.module.logger), error(lambda: alone.module.log("x", {"a": 1}))]
    other = Model()
    other.fabric = fabric
    found["assigned"] = type(other.fabric).__name__


def calls(found: dict[str, Any]) -> None:
    fabric = fabric_of()
    model: Any = torch.nn.Linear(4, 2)
    model = fabric.setup(model)
    found["launch"] = [fabric.launch(functools.partial(lambda f, a, b: (a, b), a=1), b=2), error(lambda: fabric.launch(3))]
    with_control = SingleDeviceStrategy()
    found["warnings"] = [
        error(lambda: fabric.sharded_model()),
        error(lambda: fabric.no_backward_sync(model)),
        with_control._backward_sync_control,
    ]
    fabric.seed_everything(3)
    found["workers"] = fabric.setup_dataloaders(DataLoader(X)).worker_init_fn is not None  # pyright: ignore[reportArgumentType]
    path = Path(tempfile.mkdtemp()) / "a.ckpt"
    state = {"model": model, "number": 3, "dict": {"x": 1, "y": 2}}
    chosen = {"model": lambda name, value: False, "number": lambda name, value: False, "dict": lambda name, value: name == "x"}
    fabric.save(path, state, filter=chosen)
    found["saved"] = fabric.load(path)
    strict = fabric_of(plugins=[Unscaling()])
    part: Any = torch.nn.Linear(4, 2)
    part, its = strict.setup(part, torch.optim.SGD(part.parameters(), lr=0.1))
    strict.backward(part(X).sum())
    strict.clip_gradients(part, its, max_norm=0.1)
    strict.clip_gradients(part, its, clip_val=0.01)
    found["clipped"] = [Unscaling.told, round(float(part.weight.grad.abs().max()), 5)]
    logger = TensorBoardLogger(tempfile.mkdtemp())
    logger._experiment = writer = Writer()  # pyright: ignore[reportAttributeAccessIssue]
    known = fabric.setup(Model())
    found["graphs"] = [
        error(lambda: logger.log_graph(model)),
        error(lambda: logger.log_graph(model, X)),
        error(lambda: logger.log_graph(known)),
        error(lambda: logger.log_graph(known, [X])),  # pyright: ignore[reportArgumentType]
        writer.told,
    ]


class Lookahead(torch.optim.Optimizer):
    """Holds another optimizer, whose attributes it shows, and does without those of its own class."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.count = inner, 0
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        fast = [p for group in self.param_groups for p in group["params"]]
        for p, slow in zip(fast, self.slow, strict=True):
            if self.count % 2 == 0:
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Bare(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        self.param_groups, self.state, self.defaults = [{"params": list(params), "lr": 0.1}], {}, {}  # pyright: ignore[reportAttributeAccessIssue]

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None


class Trained(Model):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters())


def optimizers(found: dict[str, Any]) -> None:
    """Optimizers whose classes do not call ``super().__init__()``."""
    kinds = {"lookahead": lambda params: Lookahead(torch.optim.Adam(params, lr=0.05)), "bare": Bare}
    for name, kind in kinds.items():
        fabric, module = fabric_of(), Model()
        model, optimizer = fabric.setup(module, kind(module.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            fabric.backward(model(X).square().mean())
            optimizer.step()
        trained = Trained(kind)
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, enable_model_summary=False, **quiet)
        trainer.fit(trained, DataLoader(X, batch_size=2))  # pyright: ignore[reportArgumentType]
        found[name] = [round(float(one.layer.weight.detach().sum()), 4) for one in (model.module, trained)]


class Doubling(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.mul_(2))


def written_batches(found: dict[str, Any]) -> None:
    fabric = fabric_of()
    torch.manual_seed(1)
    module = Doubling(4, 2)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.01))
    x, sums = X / 4, []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        sums += [round(float(loss.detach()), 4), round(float(x.abs().sum()), 4)]
        fabric.backward(loss)
        optimizer.step()
    found["written"] = sums

    def step(fabric: Any, model: Any, optimizer: Any, x: torch.Tensor, by: float = 0.5) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() * by
        fabric.backward(loss)
        optimizer.step()
        return loss

    one = fabric.compile(step) if hasattr(fabric, "compile") else step
    found["given"] = [round(float(one(fabric, model, optimizer, x).detach()), 3), round(float(x.abs().sum()), 3)]


def throughput(found: dict[str, Any]) -> None:
    both = Throughput(available_flops=100, world_size=2, window_size=3)
    found["empty"] = error(both.compute).partition(":")[0]
    for index in range(1, 5):
        both.update(time=index * 2.0, batches=index, samples=index * 3, lengths=index * 7, flops=index * 10)
    found["rates"] = {name: round(float(value), 4) for name, value in both.compute().items()}
    found["refused"] = [
        error(lambda: Throughput().update(time=1, batches=4, samples=2)),
        error(lambda: Throughput().update(time=1, batches=1, samples=2, lengths=1)),
        error(lambda: both.update(time=1, batches=9, samples=20)),
    ]
    log = Log()
    monitor = ThroughputMonitor(fabric_of(loggers=[log]), window_size=2)
    for index in (1, 2):
        monitor.update(time=float(index), batches=index, samples=index)
        monitor.compute_and_log()
    found["monitor"] = [log.rows, monitor.step, error(lambda: ThroughputMonitor(fabric_of(), world_size=2)).partition(":")[0]]


def registries(found: dict[str, Any]) -> None:
    for name, registry in (("strategy", STRATEGY_REGISTRY), ("accelerator", ACCELERATOR_REGISTRY)):
        registry.register("mine", Log, description="of mine", size=3)  # pyright: ignore[reportArgumentType]
        entry: Any = registry["mine"]
        found[name] = [{key: str(value) for key, value in sorted(entry.items())}, str(registry).partition(":")[0]]
        found[f"{name} twice"] = error(lambda registry=registry: registry.register("mine", Log))  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    results: dict[str, Any] = {}
    for part in (modules, calls, optimizers, written_batches, throughput, registries):
        part(results)
    print(json.dumps(results))
