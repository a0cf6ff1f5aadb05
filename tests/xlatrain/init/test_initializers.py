"""Every function of torch.nn.init in a deferred-init block: torch's numbers, and where there are too many, its distribution."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from xlatrain.bridge.lazy_init import deferred_init, is_deferred

SMALL, LARGE = (60, 50), (640, 512)  # of too many numbers: what torch draws on the host, and what a program draws

RANDOM = {
    "uniform": lambda w: nn.init.uniform_(w, -0.3, 0.7),
    "normal": lambda w: nn.init.normal_(w, 0.1, 0.02),
    "trunc_normal": lambda w: nn.init.trunc_normal_(w, 0.0, 0.02, -0.03, 0.05),
    "trunc_normal_tail": lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 0.8, 2.0),
    "xavier_uniform": lambda w: nn.init.xavier_uniform_(w, gain=1.4),
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "kaiming_normal": lambda w: nn.init.kaiming_normal_(w, mode="fan_out"),
    "exponential": lambda w: w.data.exponential_(2.0),
    "log_normal": lambda w: w.data.log_normal_(0.0, 0.5),
    "cauchy": lambda w: w.data.cauchy_(),
    "bernoulli": lambda w: w.data.bernoulli_(0.3),
    "randint": lambda w: w.data.random_(0, 7),
}
EXACT = {
    "constant": lambda w: nn.init.constant_(w, 0.3),
    "ones": nn.init.ones_,
    "zeros": nn.init.zeros_,
    "eye": nn.init.eye_,
}


def made(fill, shape: tuple[int, ...], torchs_numbers: int = 0) -> torch.Tensor:
    torch.manual_seed(0)
    with deferred_init(torchs_numbers=torchs_numbers):
        weight = nn.Parameter(torch.empty(shape))
        fill(weight)
    assert is_deferred(weight)
    return weight.detach()


@functools.cache
def stock(name: str) -> np.ndarray:
    torch.manual_seed(1)
    weight = nn.Parameter(torch.empty(LARGE))
    RANDOM[name](weight)
    return weight.detach().numpy().ravel()


@pytest.mark.parametrize("name", RANDOM)
def test_large_tensors_follow_torch_s_distribution(name: str) -> None:
    values = made(RANDOM[name], LARGE).numpy().ravel()
    assert not np.array_equal(values, stock(name))
    assert stats.ks_2samp(values, stock(name)).pvalue > 1e-3
    rows = values.reshape(LARGE)
    assert len(np.unique(rows[:, :4], axis=0)) > 2  # rows are not copies of each other


@pytest.mark.parametrize("name", RANDOM)
def test_small_tensors_follow_torch_s_distribution(name: str) -> None:
    torch.manual_seed(2)
    own = nn.Parameter(torch.empty(SMALL))
    RANDOM[name](own)
    assert stats.ks_2samp(made(RANDOM[name], SMALL).numpy().ravel(), own.detach().numpy().ravel()).pvalue > 1e-3


MATRICES = {"orthogonal": nn.init.orthogonal_, "sparse": lambda w: nn.init.sparse_(w, sparsity=0.25)}


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", [*RANDOM, *MATRICES])
def test_torch_s_own_numbers(name: str, shape: tuple[int, ...]) -> None:
    fill = (RANDOM | MATRICES)[name]
    found, after = made(fill, shape, torchs_numbers=1 << 30), torch.rand(2)
    torch.manual_seed(0)
    own = nn.Parameter(torch.empty(shape))
    fill(own)
    assert torch.equal(found, own)
    assert torch.equal(after, torch.rand(2))


def test_truncated_numbers_that_were_to_be_torch_s() -> None:
    def fill(weight: torch.Tensor) -> None:
        nn.init.trunc_normal_(weight.data, 0.0, 0.02, -0.03, 0.05)
        nn.init.trunc_normal_(weight.data[:300], 1.0, 0.02, 0.9, 1.1)
        weight.data[:, 0].uniform_()  # beyond the limit

    values = made(fill, LARGE, torchs_numbers=940 * 512 * 4)
    above, below = values[:300, 1:], values[300:, 1:]
    assert abs(above.mean() - 1) < 1e-3 and below.min() > -0.03 and below.max() < 0.05 and abs(above.std() - 0.02) < 1e-3
    assert torch.equal(values, made(fill, LARGE, torchs_numbers=940 * 512 * 4))
    assert not torch.equal(values, made(fill, LARGE, torchs_numbers=1 << 30))


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", EXACT)
def test_constants_are_torch_s_own(name: str, shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.empty(shape))
    EXACT[name](weight)
    assert torch.equal(made(EXACT[name], shape), weight.detach())


def test_dirac() -> None:
    own = torch.empty(6, 4, 3, 3)
    nn.init.dirac_(own, groups=2)
    assert torch.equal(made(lambda w: nn.init.dirac_(w, groups=2), (6, 4, 3, 3)), own)


@pytest.mark.parametrize("shape", [(48, 32), (640, 512), (32, 48)], ids=["small", "large", "wide"])
def test_orthogonal(shape: tuple[int, int]) -> None:
    weight = made(lambda w: nn.init.orthogonal_(w, gain=2.0), shape).numpy() / 2
    gram = weight.T @ weight if shape[0] > shape[1] else weight @ weight.T
    np.testing.assert_allclose(gram, np.eye(min(shape)), atol=2e-5)
    assert abs(weight.mean()) < 5 / weight.size**0.5


def test_sparse() -> None:
    weight = made(lambda w: nn.init.sparse_(w, sparsity=0.25, std=0.1), (40, 30)).numpy()
    assert ((weight == 0).sum(axis=0) == 10).all()
    assert len({tuple(np.flatnonzero(column == 0)) for column in weight.T}) > 20
    assert abs(weight[weight != 0].std() - 0.1) < 0.01


def test_every_initializer_is_tried() -> None:
    tried = {f"{name.removesuffix('_tail')}_" for name in (*RANDOM, *EXACT)} | {"dirac_", "orthogonal_", "sparse_"}
    assert {name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")} <= tried
