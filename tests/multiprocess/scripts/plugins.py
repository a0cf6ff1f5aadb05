"""Plugins on a pod: collectives of strategies, and training with plugins of several eras."""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.torch_compat.strategies.small import Net, loader, trained, trainer, weights
from torch_compat.callbacks import Callback
from torch_compat.legacy.training_type import DDPPlugin
from torch_compat.plugins import TorchCheckpointIO
from torch_compat.strategies import DDPStrategy, FSDPStrategy
from xlatrain.cluster import distributed

warnings.simplefilter("ignore")
directory = Path(sys.argv[1])
me = distributed.initialize().process_id
pod: dict[str, Any] = {"devices": 4, "num_nodes": 2}
result: dict[str, Any] = {}


def message(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- collectives -------------------------------------------------------------------------------------------------------

strategy = trainer(strategy="ddp", **pod).strategy
mine = torch.tensor([1.0, 2.0]) * (me + 1)
nested = strategy.all_gather({"a": mine, "b": [mine + 1, "text"]})
result["gather"] = [nested["a"].tolist(), nested["b"][0].tolist(), nested["b"][1]]
result["reduce"] = [strategy.reduce(mine, reduce_op=op).tolist() for op in ("mean", "avg", "sum", "min", "max", None)]
result["reduce op of torch"] = strategy.reduce(mine, reduce_op=torch.distributed.ReduceOp.SUM).tolist()
result["reduce of integers"] = strategy.reduce(torch.tensor([me, 4])).tolist()
result["reduce of no tensor"] = strategy.reduce("text")
result["broadcast"] = strategy.broadcast({"object": {"of", str(me)} - {"of"}, "tensor": [mine]}, 1)["tensor"][0].tolist()
result["decisions"] = [strategy.reduce_boolean_decision(me == 0, all=every) for every in (True, False)]
leaf = mine.clone().requires_grad_()
gathered = strategy.all_gather(leaf, sync_grads=True)
(gathered * torch.tensor([[1.0], [10.0]]) * (me + 1)).sum().backward()
result["gradient"] = leaf.grad.tolist()  # pyright: ignore[reportOptionalMemberAccess]
result["no gradient"] = strategy.all_gather(leaf).requires_grad
result["shapes"] = message(lambda: strategy.all_gather(torch.zeros(me + 1)))
result["source"] = message(lambda: strategy.broadcast(1, src=2))
result["group"] = message(lambda: strategy.reduce(mine, group=object()))
impatient = trainer(strategy=DDPStrategy(timeout=timedelta(seconds=2)), **pod).strategy
if me == 0:
    result["alone"] = message(lambda: impatient.barrier("only process 0"))
distributed.barrier("together again")

# -- training ----------------------------------------------------------------------------------------------------------

plain = trained(**pod)
result["plain"] = weights(plain).tolist()


class ParameterServer(DDPStrategy):
    """Process 0 alone makes the update."""

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        loss = closure()
        gradients = {name: p.grad for name, p in self.lightning_module.named_parameters()}  # global, on every process
        new = None
        if self.is_global_zero:
            new = {name: p.detach() - 0.1 * gradients[name] for name, p in self.lightning_module.named_parameters()}
        new = self.broadcast(new)
        with torch.no_grad():
            for name, parameter in self.lightning_module.named_parameters():
                parameter.copy_(new[name])
        return loss


result["parameter server"] = weights(trained(strategy=ParameterServer(), **pod)).tolist()


class Gathering(Net):
    """In a step the world is one; in a hook it is the processes'."""

    prepared = False

    def prepare_data(self) -> None:
        self.prepared = True

    def on_train_start(self) -> None:
        self.first = [p.detach().flatten().tolist() for p in self.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        everywhere = self.all_gather(loss, sync_grads=True)
        assert everywhere.shape == (1,) and self.trainer.strategy.reduce(loss) is loss
        return everywhere.mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows = self.all_gather(torch.tensor(float(len(batch[0])))).tolist()


net = Gathering()
with torch.no_grad():
    for parameter in net.parameters():
        parameter.add_(me)  # what process 1 begins with does not count, also not for hooks before the first step
result["in a step"] = weights(trained(net, **pod)).tolist()
result["rows"] = net.rows
result["first weights"] = net.first
result["prepared"] = net.prepared


class Collecting(DDPPlugin):
    """A custom-collective plugin of 1.4: what is logged is added up, and it writes down what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self.asked.append("reduce")
        return super().reduce(tensor, reduce_op="sum")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.asked.append("broadcast")
        return super().broadcast(obj, src)

    def barrier(self, name: str | None = None) -> None:
        self.asked.append("barrier")
        super().barrier(name)


class Logs(Net):
    def on_validation_epoch_end(self) -> None:
        self.log("processes", 1.0, sync_dist=True)


plugin = Collecting()
one = trainer(plugins=[plugin], **pod)
one.fit(Logs(), loader(), loader())
result["custom collectives"] = [sorted(set(plugin.asked)), float(one.callback_metrics["processes"])]


class Disagrees(DDPStrategy):
    def update_global_step(self, total_batch_idx: int, current_global_step: int) -> int:
        return current_global_step + 1 + me


result["global step"] = message(lambda: trained(strategy=Disagrees(), **pod))


class Skips(Net):
    """Process 1 ends the epoch with its second batch, process 0 never does."""

    asked = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.asked += 1
        return -1 if me == 1 and batch_idx == 1 else None


skipping = trainer(**pod)
skipping.fit(skips := Skips(), loader())
result["skips"] = [skips.asked, skipping.global_step, skipping.current_epoch]

# -- torchmetrics, imported for the first time by a hook -----------------------------------------------------------------


class CountsProcesses(Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        before = "torchmetrics" in sys.modules
        from torchmetrics import SumMetric

        metric = SumMetric()
        metric.update(me + 1.0)
        result["late metric"] = [before, float(metric.compute())]


trainer(callbacks=[CountsProcesses()], **pod).fit(Net(), loader())

# -- one stock file, from shards that lie on both processes --------------------------------------------------------------

sharded = trainer(strategy=FSDPStrategy(checkpoint_io=TorchCheckpointIO()), **pod)
sharded.fit(net := Net(), loader())
sharded.save_checkpoint(directory / "stock.ckpt")
stored = torch.load(directory / "stock.ckpt", weights_only=True)["state_dict"]
result["stock file"] = [torch.equal(stored[name], p.detach()) for name, p in net.named_parameters()]

(directory / f"{me}.json").write_text(json.dumps(result))
