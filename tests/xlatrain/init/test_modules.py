"""Constructors in a lazy-init block: the same module as without one; of a gigabyte of random numbers on, with other ones."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from xlatrain.bridge.lazy_init import SkippedInitializers, deferred_init, is_deferred


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def made(make: Callable[[], nn.Module], seed: int = 0, **options: Any) -> Any:
    """A module as behind a gigabyte of random numbers, unless ``options`` say something else."""
    torch.manual_seed(seed)
    with deferred_init(**{"torchs_numbers": 0, **options}):
        return make()


def check_like(module: nn.Module, make: Callable[[], nn.Module]) -> None:
    """``module`` has the tensors of a stock one: names, shapes, dtypes, flags; equal where stock's do not depend on the seed."""
    torch.manual_seed(1)
    one = tensors(make())
    torch.manual_seed(2)
    other = tensors(make())
    found = tensors(module)
    assert list(found) == list(one)
    for name, value in found.items():
        stock = one[name]
        assert (value.shape, value.dtype, value.requires_grad) == (stock.shape, stock.dtype, stock.requires_grad), name
        assert isinstance(value, nn.Parameter) == isinstance(stock, nn.Parameter)
        value, stock, again = value.detach(), stock.detach(), other[name].detach()
        if torch.equal(stock, again):
            assert torch.equal(value, stock), name
        else:
            both = torch.cat([stock.float().ravel(), again.float().ravel()])
            spread, count = both.std(), value.numel() ** 0.5
            assert abs(value.float().mean() - both.mean()) < 6 * spread / count, name
            assert value.numel() < 30 or abs(value.float().std() / spread - 1) < 5 / count, name


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(30, 40),
    "large linear": lambda: nn.Linear(600, 700),
    "bilinear": lambda: nn.Bilinear(5, 6, 7),
    "convolutions": lambda: nn.ModuleList([nn.Conv1d(3, 8, 3), nn.Conv2d(4, 8, 3, groups=2), nn.ConvTranspose3d(2, 4, 3)]),
    "embedding": lambda: nn.Embedding(50, 16, padding_idx=3),
    "large embedding": lambda: nn.Embedding(1000, 600, padding_idx=3),
    "embedding bag": lambda: nn.EmbeddingBag(50, 16, padding_idx=0),
    "norms": lambda: nn.ModuleList([nn.LayerNorm(16), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.RMSNorm(16)]),
    "recurrent": lambda: nn.ModuleList([nn.LSTM(8, 16, 2, bidirectional=True), nn.GRU(8, 16), nn.RNNCell(4, 5)]),
    "attention": lambda: nn.MultiheadAttention(32, 4, kdim=16, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True),
    "activations": lambda: nn.ModuleList([nn.PReLU(3), nn.AdaptiveLogSoftmaxWithLoss(16, 40, [10, 20])]),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(16, 20)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(16, 20)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(16, 20)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(16, 16)),
    "half": lambda: nn.Linear(30, 40, dtype=torch.bfloat16),
    "converted": lambda: nn.Linear(600, 700).to(torch.bfloat16),
    "int buffer": lambda: nn.Embedding.from_pretrained(torch.arange(12.0).reshape(3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    module = made(LAYERS[name])
    assert any(is_deferred(tensor) for tensor in tensors(module).values()) or name == "int buffer"
    check_like(module, LAYERS[name])


def check_same(make: Callable[[], nn.Module]) -> None:
    """The module has torch's own numbers, and its generator is where it is without the block."""
    module, after = made(make, torchs_numbers=1 << 30), torch.rand(3)
    torch.manual_seed(0)
    stock = tensors(make())
    assert torch.equal(after, torch.rand(3))
    assert list(tensors(module)) == list(stock)
    for name, value in reversed(tensors(module).items()):
        assert torch.equal(value, stock[name]), name


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_torch_s_numbers(name: str) -> None:
    check_same(LAYERS[name])


class Computed(nn.Module):
    """Parameters made in every way but ``torch.empty`` and an initialiser."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        both = torch.randn(2 * rows, 600) / 10
        self.first, self.second = nn.Parameter(both[:rows]), nn.Parameter(both[rows:].clone())
        self.doubled = nn.Parameter(self.first.detach().clone() * 2)
        self.filled = nn.Parameter(torch.empty(rows, 600))
        with torch.no_grad():
            self.filled[:10].fill_(3.0)
            self.filled[10:].normal_(std=0.5)
            self.filled[:, 5] = -1.0
        self.tied = self.second
        self.replaced = nn.Parameter(torch.zeros(rows, 600))
        self.replaced.data = self.first.data.t().contiguous()
        scale = self.first.abs().max().item()
        self.scaled = nn.Parameter(torch.full((4,), scale))
        self.branch = nn.Linear(2, 2) if scale > 0 else None
        angles = torch.outer(torch.arange(16.0), 10000.0 ** -(torch.arange(0, 8, 2) / 8))
        self.register_buffer("rotary", torch.cat([angles.cos(), angles.sin()], dim=-1), persistent=False)
        self.register_buffer("mask", torch.ones(rows, rows).tril().bool())
        self.plain = torch.linspace(0, 1, 5)
        self.schedule = [value.item() for value in torch.linspace(0, 0.3, 4)]
        self.listed = [nn.Parameter(torch.full((3,), 7.0))]


@pytest.mark.parametrize("rows", [20, 1200], ids=["small", "large"])
def test_computed_parameters(rows: int) -> None:
    module, stock = made(lambda: Computed(rows)), Computed(rows)
    assert module.tied is module.second
    assert torch.equal(module.doubled, module.first * 2)
    assert torch.equal(module.replaced, module.first.T)
    assert torch.equal(module.scaled, torch.full((4,), module.first.abs().max().item()))
    assert not torch.equal(module.first, module.second)
    expected = torch.full((rows, 600), 3.0)
    expected[:, 5] = -1.0
    assert torch.equal(module.filled[:10], expected[:10])
    assert (module.filled[:, 5] == -1.0).all()
    rest = module.filled[10:].detach()
    assert abs(rest[:, 6:].std() - 0.5) < 0.02
    assert torch.equal(module.rotary, stock.rotary)
    assert torch.equal(module.mask, stock.mask)
    assert torch.equal(module.plain, stock.plain)
    assert module.schedule == stock.schedule
    assert torch.equal(module.listed[0], stock.listed[0])
    assert type(module.listed[0]) is nn.Parameter  # it has been read
    check_same(lambda: Computed(rows))


@pytest.mark.parametrize("size", [20, 600], ids=["small", "large"])
def test_what_is_written_to_itself_keeps_its_values(size: int) -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size))
        module[1].weight = module[0].weight
        module[1].load_state_dict(module[0].state_dict())  # the tied weight from itself
        with torch.no_grad():
            module[2].weight.fill_(module[2].weight[3, 3])
        return module

    module = made(make)
    assert abs(module[0].weight.std() * (3 * size) ** 0.5 - 1) < 0.2
    assert torch.equal(module[0].bias, module[1].bias)
    assert (module[2].weight == module[2].weight[0, 0]).all() and module[2].weight[0, 0] != 0


@pytest.mark.parametrize("size", [20, 600], ids=["small", "large"])
def test_what_is_overwritten_by_what_was_computed_from_it(size: int) -> None:
    def make() -> nn.Module:
        module = nn.Linear(size, size)
        with torch.no_grad():
            module.weight.fill_(3.0)
            module.weight.mul_(2)
            module.weight.copy_(module.weight.flip(0) / module.weight.norm())
            module.weight.add_(1)
            module.weight.copy_(2 * module.weight)
        return module

    torch.testing.assert_close(made(make).weight, torch.full((size, size), 2 * (1 / size + 1)))


def test_shapes_that_do_not_go_together_are_refused_in_the_constructor() -> None:
    def make() -> nn.Module:
        module = nn.Linear(20, 30)
        with pytest.raises(RuntimeError, match=r"must match|broadcast"):
            module.weight.data.copy_(torch.ones(20, 31))
        with pytest.raises(RuntimeError, match=r"must match|broadcast"):
            module.weight.data.add_(module.weight.data.t())
        return module

    check_like(made(make), lambda: nn.Linear(20, 30))


def test_modules_with_buffers_are_copied_in_constructors() -> None:
    def make() -> nn.Module:
        online = nn.Sequential(nn.Linear(8, 600), nn.BatchNorm1d(600))
        online[1].running_mean.note = "kept"
        target = copy.deepcopy(online).requires_grad_(False)
        target[1].running_mean.add_(1)
        return nn.ModuleList([online, target])

    module = made(make)
    assert is_deferred(module[1][1].running_var) and module[1][1].running_mean.note == "kept"
    check_like(module, make)
    assert torch.equal(module[0][0].weight, module[1][0].weight)


@pytest.mark.parametrize("size", [4000, 400_000], ids=["small", "large"])
def test_draws_whose_distribution_is_given_by_values(size: int) -> None:
    def make() -> nn.Module:
        given = torch.from_numpy(np.full(size, 3.0, np.float32))  # has values
        module = nn.Module()
        module.normal = nn.Parameter(torch.normal(given, given))
        module.bernoulli = nn.Parameter(torch.bernoulli(given / 10))
        module.poisson = nn.Parameter(torch.poisson(given))
        return module

    module = made(make)
    for tensor, mean, std in ((module.normal, 3, 3), (module.bernoulli, 0.3, 0.21**0.5), (module.poisson, 3, 3**0.5)):
        assert abs(tensor.mean() - mean) < 6 * std / size**0.5
        assert abs(tensor.std() - std) < 6 * std / size**0.5
    check_same(make)


def test_what_leaves_the_meta_device_is_deferred() -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(600, 700), nn.BatchNorm1d(4))
        module.to_empty(device="cpu")
        for layer in module:
            layer.reset_parameters()
        return module

    module = made(make)
    assert all(is_deferred(tensor) for tensor in tensors(module).values())
    check_like(module, lambda: nn.Sequential(nn.Linear(600, 700), nn.BatchNorm1d(4)))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_values_whatever_is_read_first() -> None:
    one, other = made(lambda: Computed(1200)), made(lambda: Computed(1200))
    names = list(tensors(one))
    values = {name: tensors(one)[name].detach().clone() for name in names}
    for name in reversed(names):
        assert torch.equal(tensors(other)[name], values[name]), name
    assert not torch.equal(made(lambda: Computed(1200), seed=1).first, values["first"])


def test_two_blocks_differ_and_equal_layers_differ() -> None:
    torch.manual_seed(0)
    with deferred_init():  # torch's numbers
        first = nn.ModuleList([nn.Linear(600, 600), nn.Linear(600, 600)])
        second = nn.ModuleList([nn.Linear(600, 600)])
    with deferred_init():
        third = nn.ModuleList([nn.Linear(600, 600)])
    weights = [first[0].weight, first[1].weight, second[0].weight, third[0].weight]
    assert len({weight.sum().item() for weight in weights}) == 4


def test_a_block_without_randomness_leaves_torch_s_generator_alone() -> None:
    torch.manual_seed(0)
    with deferred_init():
        nn.LayerNorm(5)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


class OwnNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.noise = nn.Parameter(torch.randn(600, 600))
        self.free = nn.Parameter(torch.randn(600, 600))


def test_an_explicit_seed_in_a_constructor_decides_alone() -> None:
    one, other = made(OwnNoise, seed=0), made(OwnNoise, seed=1)
    assert torch.equal(one.noise, other.noise)
    assert not torch.equal(one.free, other.free)
    check_same(OwnNoise)


def test_beyond_the_limit_all_numbers_are_drawn_otherwise_but_those_that_were_seen() -> None:
    def make() -> nn.Module:
        made = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
        made.first = made[0].weight[0, 0].item()
        return made.extend([nn.Linear(8, 8, bias=False) for _ in range(2)])

    module, after = made(make, torchs_numbers=2 * 256), torch.rand(1)
    torch.manual_seed(0)
    stock = make()
    assert [torch.equal(one.weight, other.weight) for one, other in zip(module, stock, strict=True)] == [True, *[False] * 3]
    assert module.first == module[0].weight[0, 0].item()
    assert len({layer.weight.sum().item() for layer in module}) == 4
    again = made(make, torchs_numbers=2 * 256)
    assert all(torch.equal(one.weight, other.weight) for one, other in zip(module, again, strict=True))
    torch.manual_seed(0)
    torch.rand(128)
    torch.rand(1)
    assert torch.equal(after, torch.rand(1))  # what is not torch's takes one number of its generator
    torch.manual_seed(0)
    with deferred_init(torchs_numbers=0):
        first = nn.Linear(600, 600)
    with deferred_init(torchs_numbers=0):
        second = nn.Linear(600, 600)
    assert not torch.equal(first.weight, second.weight)


def test_initialisers_after_the_block_go_on_with_torch_s_generator() -> None:
    def make() -> nn.Module:
        return nn.Linear(600, 600)

    module = made(make, torchs_numbers=1 << 30)
    nn.init.normal_(module.weight)
    assert is_deferred(module.weight)
    torch.manual_seed(0)
    stock = make()
    nn.init.normal_(stock.weight)
    assert torch.equal(module.weight, stock.weight)


def test_a_generator_of_the_user_s_own_gives_torch_s_numbers() -> None:
    def make() -> nn.Module:
        generator = torch.Generator().manual_seed(3)
        module = nn.Linear(20, 30)
        nn.init.normal_(module.weight, generator=generator)
        module.extra = nn.Parameter(torch.randn(4, generator=generator))
        return module

    module, stock = made(make), make()
    assert torch.equal(module.weight, stock.weight)
    assert torch.equal(module.extra, stock.extra)


class FromFile(nn.Module):
    def __init__(self, path: Path) -> None:
        super().__init__()
        stored = np.load(path)
        self.loaded = nn.Parameter(torch.from_numpy(stored))
        self.copied = nn.Linear(*reversed(stored.shape), bias=False)
        self.copied.weight.data.copy_(torch.from_numpy(stored))
        self.written = nn.Parameter(torch.empty(stored.shape))
        self.written.detach().numpy()[...] = stored
        self.pickled = pickle.loads(pickle.dumps(self.copied))  # as a constructor that keeps a cache does
        self.drawn = nn.Linear(600, 600)


def test_values_that_come_from_outside(tmp_path: Path) -> None:
    stored = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    np.save(tmp_path / "w.npy", stored)
    module = made(lambda: FromFile(tmp_path / "w.npy"))
    assert not is_deferred(module.loaded)
    assert not is_deferred(module.written)
    assert is_deferred(module.drawn.weight)  # the rest of the module is not affected
    for parameter in (module.loaded, module.copied.weight, module.written, module.pickled.weight):
        np.testing.assert_array_equal(parameter.detach().numpy(), stored)


def test_a_source_that_changes_later_is_an_error_not_other_values() -> None:
    source = torch.ones(600, 600)
    with deferred_init():
        weight = nn.Parameter(torch.empty(600, 600))
        weight.data.copy_(source)
        weight.data.mul_(2)
    source.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        weight.sum()


def test_identity_and_weak_references_are_kept() -> None:
    with deferred_init():
        layer = nn.LSTM(300, 300)
        reference = weakref.ref(layer.weight_hh_l0)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    weight = layer.weight_hh_l0
    assert isinstance(weight, nn.Parameter)
    assert weight.is_leaf and weight.device.type == "cpu" and not weight.is_meta
    weight.sum()
    assert type(weight) is nn.Parameter
    assert reference() is weight is optimizer.param_groups[0]["params"][1]
    layer(torch.zeros(1, 1, 300))[0].sum().backward()
    optimizer.step()


def test_copies_conversions_and_initialisers_after_the_block_stay_deferred() -> None:
    module = made(lambda: nn.Sequential(nn.Linear(600, 600), nn.LayerNorm(600)))
    twin = copy.deepcopy(module)
    half = copy.deepcopy(module).to(torch.bfloat16)
    again = copy.deepcopy(module)
    again.apply(lambda part: nn.init.normal_(part.weight, std=3.0) if isinstance(part, nn.Linear) else None)
    for one in (module, twin, half, again):
        assert all(is_deferred(parameter) for parameter in one.parameters())
    assert torch.equal(twin[0].weight, module[0].weight)
    assert torch.equal(half[0].weight, module[0].weight.bfloat16())
    assert abs(again[0].weight.std() - 3.0) < 0.05


def test_loading_a_state_dict_replaces_what_was_recorded() -> None:
    source = nn.Linear(600, 600)
    module = made(lambda: nn.Linear(600, 600))
    module.load_state_dict(source.state_dict())
    assert torch.equal(module.weight, source.weight)


def test_skipped_initializers() -> None:
    with deferred_init(), SkippedInitializers():
        layer = nn.Linear(600, 600)
    assert (layer.weight == 0).all()


def test_parametrizations_can_be_registered_and_removed() -> None:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    def make() -> nn.Module:
        layer = nn.Linear(600, 600)
        parametrize.register_parametrization(layer, "weight", Symmetric())
        return layer

    layer = made(make)
    parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer.weight, layer.weight.T)


def test_an_error_in_a_constructor_leaves_nothing_behind() -> None:
    with pytest.raises(LookupError), deferred_init():
        kept = nn.Linear(3, 4)
        raise LookupError
    assert kept.weight.shape == (4, 3)
    assert torch.isfinite(kept.weight).all()
    assert type(nn.Linear(3, 4).weight.detach()) is torch.Tensor


def test_no_memory_is_spent_and_nothing_is_kept() -> None:
    with deferred_init():
        module = nn.Linear(1 << 20, 1 << 20)  # 4 TB
    assert module.weight.shape == (1 << 20, 1 << 20)
    reference = weakref.ref(module.weight._deferred)
    del module
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_network_that_runs_in_its_constructor_has_seen_the_batch(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
            for module in self.features:
                if isinstance(module, nn.Conv2d):
                    nn.init.dirac_(module.weight)
                    nn.init.constant_(module.bias, 0.25)
            image = torch.arange(3 * 64.0).sin().view(1, 3, 8, 8)
            with mode():
                length = self.features(image).flatten(1).shape[1]
            self.head = nn.Linear(length, 2)

    module, stock = made(Measured), Measured()
    assert module.head.in_features == stock.head.in_features
    assert is_deferred(module.features[3].weight)
    for found, expected in zip(module.features.buffers(), stock.features.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert stock.features[4].running_mean.abs().min() > 1e-3


def test_a_block_inside_of_inference_mode_makes_ordinary_parameters() -> None:
    with torch.inference_mode():
        module = made(lambda: nn.Linear(8, 8))
        assert torch.is_inference_mode_enabled()
    nn.init.ones_(module.weight.data.view(4, 16)[0])
    assert torch.is_grad_enabled() and not module.weight.is_inference() and module.weight.requires_grad
    module(torch.ones(2, 8)).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((8, 8), 2.0)) and (module.weight[:2] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_tables_are_torch_s_own(dtype: torch.dtype) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            frequencies = 10000 ** -(torch.arange(0, 32, 2, dtype=dtype) / 32)
            angles = torch.outer(torch.arange(32768, dtype=dtype), frequencies)
            self.register_buffer("cosines", angles.cos().float(), persistent=False)
            self.register_buffer("kept", torch.linspace(1, 0.99, 300_000, dtype=dtype).cumprod(0).float())

    module, stock = made(Rotary), Rotary()
    assert is_deferred(module.cosines) and module.cosines.nbytes > 1 << 20
    assert torch.equal(module.cosines, stock.cosines)
    assert torch.equal(module.kept, stock.kept)


def test_a_tensor_of_the_constructor_may_be_resized() -> None:
    class Resized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.ones(4)
            self.weight = nn.Parameter(weight.resize_(5, 6).fill_(2.0))
            self.layer = nn.Linear(3, 4)

    module = made(Resized)
    assert torch.equal(module.weight, torch.full((5, 6), 2.0)) and module.weight.requires_grad
    assert is_deferred(module.layer.weight)
