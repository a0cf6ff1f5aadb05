"""Arrays and tensors of one memory, changed within a step: its numbers are those of torch alone, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tests.torch_compat.step.training_beside_torch import by_torch, by_trainer
from torch_compat import LightningModule

GLOBAL = np.zeros(3, np.float32)


class Net(LightningModule):
    count: Tensor

    def __init__(self, use: Callable[[Any, Any, Tensor, int], Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(3))
        self.array, self.seen, self.use = np.arange(3, dtype=np.float32), [], use

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        predicted = self.layer(batch[0])
        loss = (predicted - batch[1]).pow(2).mean()
        return loss + predicted[0, 0] * self.use(self, batch[0], predicted, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def seen(net: Any, value: Any) -> float:
    net.seen.append(value)
    return 0.5


def filled(n: int) -> np.ndarray:
    array = np.zeros(3, np.float32)
    array[0] = n
    return array


def set_first(array: Any, n: int) -> Any:
    array[0] = n
    return array


def put(array: Any, n: float) -> Any:
    array += n
    return array


def with_copy(predicted: Tensor, use: Callable[[Tensor, Any], Any]) -> Any:
    copy = predicted.detach()[:4].clone()
    return use(copy, copy.numpy())


def with_tensor(array: Any, use: Callable[[Any, Tensor], Any], make: Callable[[Any], Tensor] = torch.from_numpy) -> Any:
    return use(array, make(array))


def columns(predicted: Tensor) -> Any:
    return linear_sum_assignment(predicted.detach()[:4].numpy())[1]


def doubled_into(array: Any) -> None:
    np.multiply(array, 2, out=array)


USES: dict[str, Callable[[Any, Any, Tensor, int], Any]] = {
    "an array that is filled, a tensor": lambda m, x, p, n: torch.from_numpy(filled(n)).mean(),
    "… by torch.tensor": lambda m, x, p, n: torch.tensor(filled(n)).mean(),
    "… by as_tensor": lambda m, x, p, n: torch.as_tensor(filled(n), dtype=torch.float64).mean().float(),
    "… by new_tensor": lambda m, x, p, n: p.new_tensor(filled(n)).mean(),
    "… by FloatTensor": lambda m, x, p, n: torch.FloatTensor(filled(n)).mean(),
    "… by Tensor": lambda m, x, p, n: torch.Tensor(filled(n)).mean(),
    "an attribute's entry, a tensor": lambda m, x, p, n: torch.tensor(set_first(m.array, n)).mean(),
    "an attribute's sum, a tensor": lambda m, x, p, n: torch.tensor(put(m.array, 1)).mean(),
    "a global's entry, a tensor": lambda m, x, p, n: torch.from_numpy(set_first(GLOBAL, n)).mean(),
    "a tensor, the attribute's entry": lambda m, x, p, n: with_tensor(m.array, lambda a, t: (set_first(a, n), t.mean())[1]),
    "a tensor, the attribute's sum": lambda m, x, p, n: with_tensor(m.array, lambda a, t: (put(a, n), t.mean())[1]),
    "a tensor, the global's entry": lambda m, x, p, n: with_tensor(GLOBAL, lambda a, t: (set_first(a, n + 1), t.mean())[1]),
    "a tensor, the array's entry": lambda m, x, p, n: with_tensor(filled(0), lambda a, t: (set_first(a, n), t.mean())[1]),
    "a tensor, the array's sum": lambda m, x, p, n: with_tensor(filled(0), lambda a, t: (put(a, 5), t.mean())[1]),
    "a tensor's sum, the array": lambda m, x, p, n: with_tensor(filled(n), lambda a, t: (t.add_(1), seen(m, float(a.sum())))[1]),
    "a tensor's sum, another tensor": lambda m, x, p, n: with_tensor(
        filled(n), lambda a, t: (t.add_(1), torch.from_numpy(a).mean())[1], torch.as_tensor
    ),
    "a step's tensor, its array": lambda m, x, p, n: with_copy(p, lambda t, a: (t.add_(1), seen(m, float(a.sum())))[1]),
    "… of a view": lambda m, x, p, n: with_copy(p, lambda t, a: (t.view(-1).add_(1), seen(m, float(a.sum())))[1]),
    "a step's array, its tensor": lambda m, x, p, n: with_copy(p, lambda t, a: (put(a, 1), t.mean())[1]),
    "… through a view": lambda m, x, p, n: with_copy(p, lambda t, a: (put(a[0:2], 1), t.mean())[1]),
    "… through a shape": lambda m, x, p, n: with_copy(p, lambda t, a: (put(a.reshape(-1), 1), t.mean())[1]),
    "… by out=": lambda m, x, p, n: with_copy(p, lambda t, a: (doubled_into(a), t.mean())[1]),
    "… by a method": lambda m, x, p, n: with_copy(p, lambda t, a: (a.sort(), t[0, 0])[1]),
    "a batch's array, its tensor": lambda m, x, p, n: (put(x.numpy(), 1), m.layer(x).mean())[1],
    "… by asarray": lambda m, x, p, n: (put(np.asarray(x), 1), m.layer(x).mean())[1],
    "a buffer, its array": lambda m, x, p, n: (a := m.count.numpy(), m.count.add_(1), seen(m, float(a.sum())))[-1],
    "a buffer's array": lambda m, x, p, n: (put(m.count.numpy(), 1), m.count.mean())[1],
    "an assignment's tensor, its array": lambda m, x, p, n: with_tensor(
        columns(p), lambda a, t: (t.add_(1), seen(m, float(a.sum())))[1]
    ),
    "an assignment's two tensors": lambda m, x, p, n: with_tensor(
        columns(p), lambda a, t: (t.fill_(3), p.detach()[torch.from_numpy(a), 0].mean())[1]
    ),
}


def made(name: str) -> Net:
    GLOBAL[:] = 0
    torch.manual_seed(0)
    return Net(USES[name])


@pytest.mark.parametrize("name", USES)
def test_numbers_are_those_of_torch(name: str) -> None:
    wanted = by_torch(made(name))
    left = GLOBAL.copy()
    net = made(name)
    by_trainer(net)
    assert net.seen == pytest.approx(wanted.seen, rel=1e-5)
    torch.testing.assert_close(net.layer.weight, wanted.layer.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net.count, wanted.count)
    assert net.array.tolist() == wanted.array.tolist() and GLOBAL.tolist() == left.tolist()
