"""Computed rows have no distance to themselves, in whatever way it is written, and no gradient of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import floats, through_bridge

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cdist": lambda z: torch.cdist(z, z),
    "cdist, of sums": lambda z: torch.cdist(z, z, p=1),
    "cdist, of the largest": lambda z: torch.cdist(z[None], z[None], p=float("inf"))[0],
    "unsqueezed": lambda z: (z[:, None] - z[None]).norm(dim=-1),
    "viewed": lambda z: (z.view(8, 1, 2) - z.view(1, 8, 2)).norm(dim=-1),
    "expanded": lambda z: (z.unsqueeze(1).expand(8, 8, 2) - z.expand(8, 8, 2)).norm(dim=-1),
    "transposed": lambda z: (z.t().unsqueeze(1) - z.t().unsqueeze(2)).norm(dim=0),
    "of numbers": lambda z: (z[:, 0].unsqueeze(1) - z[:, 0]).abs() + z.sum() * 0,
}


@pytest.mark.usefixtures("compiled_as_for_users")
@pytest.mark.parametrize("way", WAYS)
def test_it_is_zero_as_in_torch(way: str) -> None:
    def own(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        distances = WAYS[way](F.normalize(x, dim=1)).diagonal()
        return distances.detach(), torch.autograd.grad(distances.sum(), x)[0]

    for found in through_bridge(own, floats(8, 2)):
        assert (found == 0).all(), found


@pytest.mark.usefixtures("compiled_as_for_users")
def test_what_is_not_a_number_stays() -> None:
    x = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0]])
    (found,) = through_bridge(lambda z: ((z * 2)[:, None] - (z * 2)[None],), x)
    expected = (x * 2)[:, None] - (x * 2)[None]
    torch.testing.assert_close(torch.tensor(found.tolist()), expected, equal_nan=True)
