"""Fabric, what it wraps, and the optimizers that both wrap."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from answering import ask, ask_each, attempt
from lightning.fabric import Fabric, is_wrapped
from lightning.fabric.plugins import Precision
from lightning.fabric.wrappers import _FabricDataLoader, _FabricModule, _FabricOptimizer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch import nn
from torch.utils.data import DataLoader


def fabric(**options: Any) -> Fabric:
    return Fabric(**{"accelerator": "cpu", "devices": 1, **options})


@ask
def wrapped_objects() -> Any:
    one = fabric()
    net = nn.Linear(2, 1)
    module, optimizer = one.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = one.setup_dataloaders(DataLoader(RandomDataset(2, 4), batch_size=2))
    return [
        [isinstance(module, _FabricModule), isinstance(optimizer, _FabricOptimizer), isinstance(loader, _FabricDataLoader)],
        [is_wrapped(module), is_wrapped(net), is_wrapped(optimizer), is_wrapped(loader)],
        [module.module is net, isinstance(optimizer, torch.optim.SGD), type(optimizer.optimizer).__name__, len(loader)],
        sorted(module.state_dict()),
        [sorted(optimizer.state_dict()), optimizer.param_groups[0]["lr"], optimizer.defaults["lr"]],
        attempt(lambda: module.mark_forward_method("no_such")),
        attempt(lambda: one.setup(module)),
        attempt(lambda: one.setup_optimizers(optimizer)),
        attempt(lambda: one.setup_dataloaders(loader)),
        attempt(lambda: one.setup(3)),
        attempt(lambda: one.setup_dataloaders()),
        attempt(lambda: one.setup_dataloaders(3)),
        attempt(lambda: one.setup_optimizers()),
        attempt(lambda: module.missing),
        attempt(lambda: setattr(module, "extra", 1)),
        attempt(lambda: net.extra),
        attempt(lambda: copy.deepcopy(module).module.weight.shape),
    ]


ask_each(
    fabric_members=lambda: (
        lambda one: [
            one.world_size,
            one.global_rank,
            one.local_rank,
            one.node_rank,
            one.is_global_zero,
            str(one.device),
            attempt(lambda: one.logger),
            one.loggers,
        ]
    )(fabric()),
    fabric_wrong=lambda: [
        attempt(lambda o=o: fabric(**o))
        for o in (
            {"accelerator": "abacus"},
            {"devices": 0},
            {"devices": "many"},
            {"strategy": "quantum"},
            {"precision": "7"},
            {"num_nodes": 0},
            {"plugins": "x"},
            {"callbacks": 3},
            {"loggers": 3},
        )
    ],
    fabric_in_half_on_a_cpu=lambda: fabric(precision="16-mixed")._precision.precision,
    fabric_calls=lambda: fabric(callbacks=[type("A", (), {"on_x": lambda self, a: print("x", a)})()]).call("on_x", a=3),
    fabric_calls_nothing=lambda: fabric(callbacks=[type("A", (), {"on_x": 3})()]).call("on_x"),
    fabric_logs=lambda: fabric().log("a", 1.0),
    fabric_launches=lambda: fabric().launch(lambda f: f.world_size),
    fabric_launches_wrong=lambda: [attempt(lambda: fabric().launch(3)), attempt(lambda: fabric().launch(lambda: 3))],
    fabric_clips_both=lambda: _clips(clip_val=1.0, max_norm=1.0),
    fabric_clips_nothing=lambda: _clips(),
    fabric_clips=lambda: _clips(max_norm=0.5),
    fabric_no_sync=lambda: [attempt(lambda: fabric().no_backward_sync(nn.Linear(1, 1)).__enter__())],
    fabric_runs_twice=lambda: type("F", (Fabric,), {"run": lambda self, a: a + 1})(accelerator="cpu", devices=1).run(1),
    fabric_reduces=lambda: [
        fabric().all_reduce(torch.ones(1)),
        fabric().all_gather(torch.ones(2)).shape,
        fabric().broadcast({"a": 1}),
        fabric().barrier(),
    ],
    fabric_moves=lambda: [
        fabric().to_device(torch.ones(1)),
        type(fabric().to_device(nn.Linear(1, 1))).__name__,
        fabric().to_device({"a": [torch.ones(1)]}),
    ],
    fabric_seeds=lambda: fabric().seed_everything(3),
    fabric_without_apples_gpu=lambda: fabric(accelerator="mps"),
    fabric_shows_its_optimizer=lambda: repr(fabric().setup_optimizers(torch.optim.SGD([torch.ones(1)], 0.1))),
)


def _clips(**options: Any) -> Any:
    one, net = fabric(), nn.Linear(2, 1)
    module, optimizer = one.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    one.backward(module(torch.ones(1, 2)).sum())
    return one.clip_gradients(module, optimizer, **options)


class Told(Precision):
    """A precision plugin of Fabric that writes down what is called around a backward pass."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> None:
        self.calls.append("before")

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append("backward")
        super().backward(tensor * 2, model, *args, **kwargs)

    def post_backward(self, tensor: torch.Tensor, module: Any) -> None:
        self.calls.append("after")


@ask
def fabric_precision_plugin() -> Any:
    plugin = Told()
    one, net = fabric(plugins=[plugin]), nn.Linear(2, 1)
    module, _ = one.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    one.backward(module(torch.ones(1, 2)).sum())
    return [plugin.calls, net.weight.grad]


class Doubles(Precision):
    """Gets all arguments at once."""

    def convert_input(self, data: Any) -> Any:
        args, kwargs = data
        return tuple(2 * one for one in args), kwargs


@ask
def fabric_input_of_a_plugin() -> Any:
    one, net = fabric(plugins=[Doubles()]), nn.Linear(2, 1)
    net.weight.data.fill_(0.5)
    module, _ = one.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    one.backward(module(torch.ones(1, 2)).sum())
    return net.weight.grad


@ask
def fabric_files() -> Any:
    one, net = fabric(), nn.Linear(2, 1)
    net.weight.data.fill_(0.5)
    module, optimizer = one.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    one.save("a.ckpt", {"model": module, "optimizer": optimizer, "step": 3})
    state = {"model": module, "step": 0}
    rest = one.load("a.ckpt", state)
    return [
        sorted(rest),
        state["step"],
        sorted(one.load("a.ckpt")),
        attempt(lambda: one.load("no.ckpt")),
        attempt(lambda: one.load("a.ckpt", {"nothing": 1})),
        attempt(lambda: one.load("a.ckpt", {})),
        attempt(lambda: one.save("b.ckpt", {"model": module}, filter={"nothing": lambda k, v: True})),
        attempt(lambda: one.save("b.ckpt", {"model": module}, filter={"model": 3})),
        attempt(lambda: one.load("a.ckpt", {"model": 3}, strict=False)),
    ]


@ask
def wrapped_optimizer() -> Any:
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    one = LightningOptimizer(plain)
    return [
        isinstance(one, torch.optim.SGD),
        type(one).__name__,
        one.optimizer is plain,
        one.param_groups[0]["lr"],
        attempt(lambda: one.step(closure=3)),
        attempt(lambda: type(copy.deepcopy(one)).__name__),
        attempt(lambda: pickle.loads(pickle.dumps(one)).param_groups[0]["lr"]),
        attempt(lambda: one.step()),
    ]
