"""Fabric on a mesh of eight devices: what raw loops may do in calls of modules; its checkpoints and its API."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.torch_compat.fabric.net import Net, X, close, net, on, plain, ready
from torch_compat.fabric import Fabric, is_wrapped
from torch_compat.fabric.strategies import DDPStrategy, FSDPStrategy, MeshStrategy
from torch_compat.plugins import Precision
from torch_compat.utilities.exceptions import MisconfigurationException

# -- calls of modules ------------------------------------------------------------------------------------------------------


def test_everything_that_autograd_may_be_asked_between_calls() -> None:
    """Gradients of arguments, penalties on weights, loss.backward() itself, closures, marked and unmarked methods."""
    fabric = on(strategy=FSDPStrategy())
    model, optimizer = ready(fabric, torch.optim.SGD, lr=0.1, momentum=0.9)
    same, its = plain(torch.optim.SGD, lr=0.1, momentum=0.9)
    seen: list[Tensor | None] = []
    for module in (model, same):
        given = X.clone().requires_grad_()
        (module(given).square().mean() + 0.1 * module.first.weight.square().sum()).backward()
        seen.append(given.grad)
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-6)
    model.mark_forward_method("loss")
    fabric.backward(model.loss(X))
    same.loss(X).backward()
    close(model, same)
    norms = [fabric.clip_gradients(model, optimizer, max_norm=0.1), nn.utils.clip_grad_norm_(same.parameters(), 0.1)]
    torch.testing.assert_close(*norms)
    fabric.clip_gradients(model, optimizer, clip_val=0.02)
    nn.utils.clip_grad_value_(same.parameters(), 0.02)
    close(model, same)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).mean()
        fabric.backward(loss)
        return loss

    def its_closure() -> Tensor:
        its.zero_grad()
        loss = same(X).mean()
        loss.backward()
        return loss

    for _ in range(2):
        torch.testing.assert_close(optimizer.step(closure), its.step(its_closure), rtol=1e-4, atol=1e-6)
    close(model, same)
    model.scale = same.scale = 3.0  # an attribute, set through the wrapper
    with torch.no_grad():
        same.last.bias.fill_(0.5)
        model.last.bias.fill_(0.5)
        torch.testing.assert_close(model(X), same(X), rtol=1e-4, atol=1e-6)
    assert not fabric._model.on_host
    assert fabric._model.steps.model.array("first.weight").sharding.spec[0] == "fsdp"


def test_what_torch_refuses_is_refused() -> None:
    fabric = on()
    model, optimizer = ready(fabric, torch.optim.SGD, lr=0.1)
    loss = model(X).mean()
    fabric.backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        fabric.backward(loss)
    stale = model(X).mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified"):
        fabric.backward(stale)
    stale, given = model(X).mean(), X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
    assert slope.requires_grad
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified"):
        torch.autograd.grad(stale, model.module.last.weight, create_graph=True)
    inplace = X.clone().requires_grad_() * 1
    late = model(inplace).mean()
    inplace.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fabric.backward(late)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(3)])
def test_calls_that_torch_cannot_compute_again_are_differentiated_once(layer: nn.Module) -> None:
    model = on().setup(nn.Sequential(nn.Linear(3, 3), layer))
    given = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"draws random numbers|changes buffers"):
        torch.autograd.grad(model(given).square().sum(), given, create_graph=True)


def test_what_cannot_be_a_program_runs_on_the_host() -> None:
    fabric = on()
    model, optimizer = ready(fabric, torch.optim.SGD, lr=0.1, momentum=0.9)
    same, its = plain(torch.optim.SGD, lr=0.1, momentum=0.9)
    for keep in (False, True, True):
        if keep and not model.kept:
            with pytest.warns(UserWarning, match="plain torch on one CPU"):
                loss = model(X, keep=True).square().mean() + model.kept[-1].mean()
        else:
            loss = model(X, keep).square().mean() + (model.kept[-1].mean() if keep else 0.0)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        expected = same(X, keep).square().mean() + (same.kept[-1].mean() if keep else 0.0)
        expected.backward()
        its.step()
        its.zero_grad()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    close(model, same)  # the momentum went along


def test_an_optimizer_without_a_program_steps_on_the_host() -> None:
    fabric = on()
    model, optimizer = ready(fabric, torch.optim.LBFGS, max_iter=3)
    same, its = plain(torch.optim.LBFGS, max_iter=3)

    def closure(module: Any, its: Any, backward: Any) -> Any:
        its.zero_grad()
        loss = module(X).square().mean()
        backward(loss)
        return loss

    for _ in range(2):
        optimizer.step(lambda: closure(model, optimizer, fabric.backward))
        its.step(lambda: closure(same, its, Tensor.backward))
    torch.testing.assert_close(model.first.weight.detach(), same.first.weight.detach(), rtol=1e-3, atol=1e-4)


# -- checkpoints -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_onto_another_mesh_and_back_into_a_running_loop(tmp_path: Path) -> None:
    fabrics = [on(strategy=FSDPStrategy()), on(1), on(strategy=MeshStrategy({"data": 2, "fsdp": 4}))]
    loops = []
    for fabric in fabrics:
        with fabric.init_module():
            module = Net()
        loops.append((fabric, *fabric.setup(module, torch.optim.Adam(module.parameters(), 0.01))))

    def step(fabric: Fabric, model: Any, optimizer: Any) -> float:
        loss = model(X).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    fabric, model, optimizer = loops[0]
    step(*loops[0])
    saved: dict[str, Any] = {"model": model, "optimizer": optimizer, "n": 3, "more": [1, 2]}
    fabric.save(tmp_path / "a", saved)
    fabric.save(tmp_path / "part", saved, filter={"model": lambda name, value: "first" in name})
    assert set(fabric.load(tmp_path / "part")["model"]) == {"first.weight", "first.bias"}
    expected = [step(*loops[0]) for _ in range(3)]
    for loop, started in itertools.product(loops, (False, True)):
        if started:
            step(*loop)
        state = {"model": loop[1], "optimizer": loop[2], "n": 0}
        assert loop[0].load(tmp_path / "a", state) == {"more": [1, 2]}
        assert state["n"] == 3 and is_wrapped(state["model"])
        assert [step(*loop) for _ in range(3)] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(KeyError, match="'missing'"):
        fabric.load(tmp_path / "a", {"missing": 0})
    torch.save(net().state_dict(), tmp_path / "raw.pt")
    fabric.load_raw(tmp_path / "raw.pt", model)
    close(model, net())
    with pytest.raises(ValueError, match="not present"):
        fabric.save(tmp_path / "b", saved, filter={"other": lambda name, value: True})
    with pytest.raises(TypeError, match="callable"):
        fabric.save(tmp_path / "b", saved, filter={"model": 1})  # pyright: ignore[reportArgumentType]


# -- the API ---------------------------------------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    fabric = Fabric(accelerator="cpu", devices=8)
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    loader = DataLoader(TensorDataset(X), batch_size=2)
    for early in (
        lambda: fabric.setup(module),
        lambda: fabric.setup_dataloaders(loader),
        lambda: fabric.barrier(),
        lambda: fabric.save("x", {}),
        lambda: fabric.init_module(),
    ):
        with pytest.raises(RuntimeError, match="launch"):
            early()
    fabric.launch()
    raw = fabric.compile(lambda x: module(x).sum())
    with pytest.raises(MisconfigurationException, match=r"module .* was not set up"):
        raw(X)
    model, ready = fabric.setup(module, optimizer)
    again = fabric.setup_dataloaders(loader)
    for twice in (
        lambda: fabric.setup(model),
        lambda: fabric.setup(net(), ready),
        lambda: fabric.setup_module(model),
        lambda: fabric.setup_optimizers(ready),
        lambda: fabric.setup_dataloaders(again),
    ):
        with pytest.raises(ValueError, match="only once"):
            twice()
    other = net()
    fabric.setup_module(other)
    with pytest.raises(TypeError, match="set up the model first"):
        fabric.no_backward_sync(other)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Only PyTorch DataLoader"):
        fabric.setup_dataloaders([X])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="either"):
        fabric.clip_gradients(model, ready)
    with pytest.raises(ValueError, match="Only one"):
        fabric.clip_gradients(model, ready, clip_val=1, max_norm=1)
    with pytest.raises(TypeError, match="callable"):
        fabric.launch(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(AttributeError, match="nope"):
        model.mark_forward_method("nope")
    with pytest.raises(ValueError, match="forward method itself"):
        model.mark_forward_method("forward")
    for strategy, match in (
        ("deepspeed", "use FSDPStrategy"),
        ("ddp_spawn", "xlatrain launch"),
        ("nope", "invalid strategy name"),
        (3, "Expected is a name"),
    ):
        with pytest.raises(MisconfigurationException, match=match):
            Fabric(accelerator="cpu", strategy=strategy)


def test_what_setup_returns_is_what_was_given_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrappers, loaders of the global batch, launch with a function, precision, collectives of one process."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    fabric = on(precision="bf16-mixed")
    assert (fabric.world_size, fabric.global_rank, fabric.local_rank, fabric.node_rank) == (8, 0, 0, 0)
    assert fabric.is_global_zero and fabric.device == torch.device("cpu") and isinstance(fabric.strategy, DDPStrategy)
    module = net()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    assert model.module is module and model.first is module.first and is_wrapped(model) and not is_wrapped(module)
    assert list(model.state_dict()) == list(module.state_dict())
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups[0]["lr"] == 0.1
    out = model(X.double())
    assert out.dtype == torch.float32
    with fabric.autocast():
        assert (X @ X.T).dtype == torch.bfloat16
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(X), batch_size=1))
    assert [len(x) for (x,) in loader] == [8, 8] and len(loader) == 2
    assert fabric.launch(lambda fabric, n: (type(fabric), n), 3) == (Fabric, 3)
    assert fabric.all_gather({"x": torch.ones(2)})["x"].shape == (1, 2) and fabric.all_reduce(2.0) == 2
    assert fabric.broadcast("x") == "x" and Fabric.seed_everything(3, verbose=False) == 3
    assert on(1).all_gather(torch.ones(2)).shape == (2,) and on(1, strategy="ddp").all_gather(torch.ones(2)).shape == (1, 2)
    with fabric.rank_zero_first(), pytest.raises(IndexError):
        assert fabric.loggers == [] and fabric.logger

    class Mine(Fabric):
        def run(self, x: int) -> tuple[int, bool]:
            return x, self._launched

    assert Mine(accelerator="cpu", devices=8).run(3) == (3, True)


class Doubling(DDPStrategy):
    """A user's: doubles the loss, counts steps, and sees modules, loaders and checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def setup_module(self, module: Any) -> Any:
        self.calls.append("setup_module")
        return super().setup_module(module)

    def process_dataloader(self, dataloader: Any) -> Any:
        self.calls.append("process_dataloader")
        return dataloader

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(2 * tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self.calls.append("optimizer_step")
        return super().optimizer_step(optimizer, **kwargs)


class Tripling(Precision):
    """A precision plugin whose backward scales."""

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(3 * tensor, model, *args, **kwargs)


@pytest.mark.parametrize("how", ["calls", "compiled"])
def test_a_users_strategy_and_precision_are_what_fabric_calls(how: str) -> None:
    strategy = Doubling()
    fabric = on(strategy=strategy, plugins=[Tripling()])
    model, optimizer = ready(fabric, torch.optim.SGD, lr=0.1)
    same, its = plain(torch.optim.SGD, lr=0.1)
    (loader,) = [fabric.setup_dataloaders(DataLoader(TensorDataset(X), batch_size=2))]

    def step(batch: Any) -> None:
        fabric.backward(model(batch[0]).square().mean())
        optimizer.step()

    step = fabric.compile(step) if how == "compiled" else step
    for batch in loader:
        step(batch)
        (2 * 3 * same(X).square().mean()).backward()
        its.step()
    close(model, same)
    assert strategy.calls == ["setup_module", "process_dataloader", "optimizer_step"]
    assert not fabric._model.on_host


def test_what_was_on_the_mesh_goes_with_the_fabric() -> None:
    same, its = plain(torch.optim.SGD, lr=0.1)
    same(X).square().mean().backward()
    its.step()

    def train() -> tuple[Net, weakref.ref[Any]]:
        fabric = on()
        raw = net()
        model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        fabric.backward(model(X).square().mean())
        optimizer.step()
        return raw, weakref.ref(fabric._model)

    raw, placed = train()
    gc.collect()
    close(raw, same)  # the module is the user's, with what it has learned
    del raw
    gc.collect()
    assert placed() is None
