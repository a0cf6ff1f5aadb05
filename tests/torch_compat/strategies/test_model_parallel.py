"""Code written for torch's tensor parallelism and FSDP2, unchanged, gives the losses of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

from tests.torch_compat.strategies.small import trainer
from torch_compat import LightningModule
from torch_compat.fabric import Fabric
from torch_compat.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from torch_compat.strategies import ModelParallelStrategy
from torch_compat.utilities.exceptions import MisconfigurationException

TOKENS: Any = torch.randint(0, 32, (24, 6), generator=torch.Generator().manual_seed(0))
HEADS, WIDTH = 4, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 1
        self.heads = HEADS  # in a constructor: no division of heads
        self.wq, self.wo = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.wq(x).view(rows, length, self.heads, 3, WIDTH // HEADS).transpose(1, 2).unbind(3)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(found.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(self.up(x).relu())


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.output = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def parallelize(model: Transformer, device_mesh: Any) -> Transformer:
    """2D parallelism as Lightning's guide writes it."""
    dp_mesh, tp_mesh = device_mesh["data_parallel"], device_mesh["tensor_parallel"]
    assert (dp_mesh.size(), tp_mesh.size(), device_mesh.ndim) == (2, 4, 2)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tp_mesh, plan)
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.attention.heads = layer.attention.heads // tp_mesh.size()
        plan = {
            "norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attention.wq": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, tp_mesh, plan)
        fully_shard(layer, mesh=dp_mesh)
    return model


class Model(LightningModule):
    def __init__(self, meta: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device("meta" if meta else "cpu"):
            self.model = Transformer()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Parallel(Model):
    def configure_model(self) -> None:
        parallelize(self.model, self.device_mesh)

    def on_train_start(self) -> None:
        placed = self.trainer.strategy.placed
        self.specs = {name: tuple(found.spec) for name, found in placed.param_shardings.items()}


def check_specs(specs: dict[str, Any]) -> None:
    """Styles split over tensor, what is fully sharded over fsdp too, the rest is whole."""
    assert specs["embedding.weight"] == ("tensor",)
    assert specs["output.weight"] == ("tensor",) and specs["output.bias"] == ("tensor",)
    assert specs["layers.1.attention.wq.weight"] == ("tensor", "fsdp") and specs["layers.0.down.weight"] == ("fsdp", "tensor")
    assert specs["layers.0.norm.weight"] == ("fsdp",) and specs["layers.1.up.bias"] == ("tensor",)


@pytest.fixture(scope="module")
def alone() -> Model:
    module = Model()
    trainer(devices=1, precision="32-true").fit(module, DataLoader(TOKENS, 8))
    return module


def test_the_trainer(alone: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    module = Parallel()
    one = trainer(strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=4))
    one.fit(module, DataLoader(TOKENS, 4))
    assert module.losses == pytest.approx(alone.losses, rel=5e-6) and len(module.losses) == 3
    check_specs({name.removeprefix("model."): spec for name, spec in module.specs.items()})
    assert [layer.attention.heads for layer in module.model.layers] == [HEADS] * 2  # pyright: ignore
    assert list(module.state_dict()) == list(alone.state_dict()) and not hasattr(module.model.layers[0], "unshard")
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_module_on_the_meta_device() -> None:
    """The module gets the values of reset_parameters, drawn on the shards."""
    module = Parallel(meta=True)
    trainer(strategy=ModelParallelStrategy(2, 4), max_steps=1).fit(module, DataLoader(TOKENS, 4))
    weight = module.model.output.weight.detach()
    assert not weight.is_meta and 0.1 < float(weight.std()) * WIDTH**0.5 * 3**0.5 < 1.3 and module.losses[0] < 10


def test_fabric(alone: Model) -> None:
    fabric = Fabric(accelerator="cpu", devices=8, strategy=FabricModelParallelStrategy(parallelize, 2, 4))
    fabric.launch()
    torch.manual_seed(0)
    model = Transformer()
    with pytest.raises(NotImplementedError, match=r"fabric\.setup_module"):
        fabric.setup(model, torch.optim.Adam(model.parameters()))
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=1e-2))

    @fabric.compile
    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        fabric.backward(loss)
        optimizer.step()
        return loss.detach()

    losses = [float(step(batch)) for batch in fabric.setup_dataloaders(DataLoader(TOKENS, 4))]
    assert losses == pytest.approx(alone.losses, rel=5e-6)
    placed = fabric._model.placed
    assert placed is not None
    check_specs({name: tuple(found.spec) for name, found in placed.param_shardings.items()})


WRONG: dict[str, tuple[Any, str]] = {
    "groups": (lambda mesh, model: mesh["tensor_parallel"].get_group(), "device_mesh.get_group: .* no torch process groups"),
    "a dim": (lambda mesh, model: mesh["pipeline"], "no dim .'pipeline'."),
    "the wrong mesh": (
        lambda mesh, model: parallelize_module(model, mesh["data_parallel"], {"output": ColwiseParallel()}),
        "expected the mesh device_mesh.'tensor_parallel'.",
    ),
    "no layer": (
        lambda mesh, model: parallelize_module(model, mesh["tensor_parallel"], {"layers.0": ColwiseParallel()}),
        "ColwiseParallel splits nn.Linear and nn.Embedding, but was given Block",
    ),
    "precision": (
        lambda mesh, model: fully_shard(model, mesh=mesh["data_parallel"], mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
        "fully_shard.Transformer.: mp_policy is not supported.*bf16-mixed",
    ),
    "offload": (
        lambda mesh, model: fully_shard(model, mesh=mesh["data_parallel"], offload_policy=CPUOffloadPolicy()),
        "offload_policy is not supported",
    ),
    "two dims": (lambda mesh, model: fully_shard(model, mesh=mesh), "expected device_mesh.'data_parallel'., of one dim"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused(what: str) -> None:
    wrong, text = WRONG[what]

    class Wrong(Model):
        def configure_model(self) -> None:
            wrong(self.device_mesh, self.model)

    with pytest.raises((AttributeError, KeyError, ValueError, NotImplementedError), match=text):
        trainer(strategy=ModelParallelStrategy(2, 4)).fit(Wrong(), DataLoader(TOKENS, 4))


def test_sizes_and_the_hook_are_checked() -> None:
    with pytest.raises(MisconfigurationException, match=r"data_parallel_size=2 × tensor_parallel_size=2 .* 8"):
        trainer(strategy=ModelParallelStrategy(2, 2)).fit(Parallel(), DataLoader(TOKENS, 4))
    with pytest.raises(TypeError, match=r"needs configure_model\(\)"):
        trainer(strategy=ModelParallelStrategy()).fit(Model(), DataLoader(TOKENS, 4))
