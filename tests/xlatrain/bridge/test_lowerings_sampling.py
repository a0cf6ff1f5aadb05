"""Grid sampling and distances, forward and backward, against torch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import assert_matches_eager, floats, with_gradients

GRID = (floats(2, 3, 6, 2, seed=3).detach() * 0.8).requires_grad_()

EDGES = torch.tensor([-1.0, 1.0, 0.0, -0.75, 0.75, -1.5, 1.5, 3.7])

GRID_ON_EDGES = torch.cartesian_prod(EDGES, EDGES).reshape(1, 8, 8, 2)


@pytest.mark.parametrize(
    ("mode", "padding", "align"),
    [
        *itertools.product(["bilinear", "nearest"], ["zeros", "border", "reflection"], [True, False]),
        *(("bicubic", padding, align) for padding, align in (("zeros", True), ("border", False), ("reflection", False))),
    ],
)
def test_grid_sample(mode: str, padding: str, align: bool) -> None:
    def fn(image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(image, grid, mode=mode, padding_mode=padding, align_corners=align)

    assert_matches_eager(with_gradients(fn), floats(2, 3, 4, 5), GRID, rtol=1e-4, atol=1e-4)
    if mode != "bilinear":
        return  # nearest: positions half-way between two pixels are decided by rounding; bicubic: positions are not limited
    image = floats(1, 2, 4, 5).detach()
    assert_matches_eager(with_gradients(fn), image, GRID_ON_EDGES.clone().requires_grad_(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_3d(padding: str) -> None:
    grid = floats(1, 2, 3, 4, 3, seed=3)
    fn = with_gradients(lambda image, grid: F.grid_sample(image, grid, padding_mode=padding, align_corners=False))
    assert_matches_eager(fn, floats(1, 2, 3, 4, 5), grid, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_cdist(p: float) -> None:
    x1, x2 = floats(2, 4, 3), floats(2, 5, 3, seed=5)
    with torch.no_grad():
        x2[0, 1] = x1[0, 2]  # a distance of zero
    fn = with_gradients(lambda a, b: torch.cdist(a, b, p=p, compute_mode="donot_use_mm_for_euclid_dist"))
    assert_matches_eager(fn, x1, x2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_pdist(p: float) -> None:
    assert_matches_eager(with_gradients(lambda x: F.pdist(x, p)), floats(5, 3), rtol=1e-4, atol=1e-5)
