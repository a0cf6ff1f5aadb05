"""Memory that was shared before a step, or is shared after it: arrays, buffers of bytes, tensors and views of them.

Numbers are those of torch alone, compiled or not.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.torch_compat.step.training_beside_torch import by_torch, by_trainer
from torch_compat import LightningModule
from torch_compat.step.eager.eager import EagerSteps

TABLE = np.zeros(4, np.float32)
HEAD = TABLE[:2]
BYTES = bytearray(16)
STORED = torch.zeros(3)
SHOWN = STORED.numpy()


class Net(LightningModule):
    count: Tensor

    def __init__(self, use: Callable[[Any, Any, Tensor, int], Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(3))
        self.use, self.seen, self.kept = use, [], None
        self.array = np.zeros(4, np.float32)
        self.head, self.square = self.array[:2], np.zeros((2, 2), np.float32)
        self.row, self.bytes, self.numbers = self.square[0], bytearray(16), array.array("f", [0] * 4)
        self.window = memoryview(self.bytes)
        self.stored = torch.zeros(4)
        self.stored_array, self.stored_head = self.stored.numpy(), self.stored[:2]
        self.count_array, self.count_head = self.count.numpy(), self.count[:2]
        self.weight_row = self.layer.weight.detach().numpy()[0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = self.layer(batch[0])
        loss = (predicted - batch[1]).pow(2).mean()
        used = self.use(self, batch[0], predicted, batch_idx)
        if isinstance(used, dict):
            return {"loss": loss, **used}
        return loss + 0.1 * predicted[0, 0] * used

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(outputs, dict) and "made" in outputs:
            self.seen.append(outputs["made"])
        n = float(batch_idx)
        HEAD[1], self.head[1], self.window[3], self.square[0, 1] = n, n + 2, batch_idx + 60, n
        self.numbers[1], self.stored_head[1], STORED[1], BYTES[2] = n, n, n, batch_idx

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def seen(net: Any, value: Any, used: float = 0.5) -> float:
    net.seen.append(value)
    return used


def put(holder: Any, n: float, place: Any = 0) -> Any:
    holder[place] = n
    return holder


def add(holder: Any, n: float) -> Any:
    holder += n
    return holder


def packed(n: int, into: bytearray | None = None) -> bytearray:
    buffer = bytearray(16) if into is None else into
    struct.pack_into("f", buffer, 0, float(n))
    return buffer


def floats(buffer: Any) -> Any:
    return torch.frombuffer(buffer, dtype=torch.float32).sum()


def octets(buffer: Any) -> Any:
    return torch.frombuffer(buffer, dtype=torch.uint8).float().sum() / 100


def filled(n: int) -> np.ndarray:
    return put(np.zeros(4, np.float32), n)


def total(holder: Any) -> float:
    return float(holder.sum())


def changed_copy(predicted: Tensor, n: float) -> Tensor:
    copy = predicted.detach()[:2].clone()
    add(copy.numpy(), n)
    return copy


def set_kept(net: Any, value: Any) -> float:
    net.kept = net.kept if net.kept is not None else value
    return float(net.kept.sum())


USES: dict[str, Callable[[Any, Any, Tensor, int], Any]] = {
    # made in the step
    "bytes that are filled, a tensor": lambda m, x, p, n: floats(packed(n)),
    "an attribute's bytes, a tensor": lambda m, x, p, n: floats(packed(n, m.bytes)),
    "a global's bytes, a tensor": lambda m, x, p, n: floats(packed(n, BYTES)),
    "a typed array's entry, a tensor": lambda m, x, p, n: floats(put(m.numbers, n)),
    "an array's data, a tensor": lambda m, x, p, n: floats(filled(n).data),
    "a window's byte, a tensor": lambda m, x, p, n: octets(put(m.window, n + 1)),
    "bytes by way of NumPy": lambda m, x, p, n: torch.from_numpy(np.frombuffer(packed(n, m.bytes), np.float32)).sum(),
    "bytes that a tensor changes": lambda m, x, p, n: (torch.frombuffer(m.bytes, dtype=torch.uint8).fill_(n), m.bytes[3] / 10)[1],
    "from_dlpack of an array that is filled": lambda m, x, p, n: torch.from_dlpack(filled(n)).sum(),
    "from_dlpack of an attribute": lambda m, x, p, n: torch.from_dlpack(put(m.array, n)).sum(),
    # shared before the step
    "an array is changed, its tensor read": lambda m, x, p, n: (put(m.stored_array, n), m.stored.sum())[1],
    "a tensor is changed, its array read": lambda m, x, p, n: (put(m.stored, n), total(m.stored_array))[1],
    "a global array is changed, its tensor read": lambda m, x, p, n: (put(SHOWN, n), STORED.sum())[1],
    "a buffer's array is changed": lambda m, x, p, n: (put(m.count_array, n), m.count.sum())[1],
    "a buffer is changed, its array read": lambda m, x, p, n: (m.count.add_(1), total(m.count_array))[1],
    "a buffer is changed, its array kept": lambda m, x, p, n: (m.count.add_(1), seen(m, m.count_array.copy()))[1],
    "a buffer is changed, its view read": lambda m, x, p, n: (m.count.add_(1), m.count_head.sum())[1],
    "a weight's array is read": lambda m, x, p, n: total(m.weight_row),
    "a weight's array is changed": lambda m, x, p, n: (add(m.weight_row, 0.1), 0.5)[1],
    "a view is changed, the array read": lambda m, x, p, n: (add(m.head, 1), total(m.array))[1],
    "an array is changed, the view read": lambda m, x, p, n: (put(m.array, n), total(m.head))[1],
    "a row is changed, its tensor read": lambda m, x, p, n: (add(m.row, n), torch.from_numpy(m.square).sum())[1],
    "a global's view is changed": lambda m, x, p, n: (add(HEAD, 1), total(TABLE))[1],
    "out= of an array, the view read": lambda m, x, p, n: (np.add(m.array, 1, out=m.array), total(m.head))[1],
    "a byte is changed, the window read": lambda m, x, p, n: (put(m.bytes, n + 1), m.window[0] / 10)[1],
    "a view that the step makes": lambda m, x, p, n: (put(m.array[:2], n), total(m.array))[1],
    # changed by a hook
    "a hook changes bytes": lambda m, x, p, n: octets(m.bytes),
    "a hook changes a global's bytes": lambda m, x, p, n: octets(BYTES),
    "a hook changes a typed array": lambda m, x, p, n: floats(m.numbers),
    "a hook changes an array, from_dlpack": lambda m, x, p, n: torch.from_dlpack(m.array).sum(),
    "a hook changes a view": lambda m, x, p, n: torch.as_tensor(m.row).sum() + total(TABLE),
    "a hook changes a stored tensor": lambda m, x, p, n: m.stored.sum() + STORED.sum(),
    # shared after the step
    "a tensor of an attribute is kept": lambda m, x, p, n: seen(m, torch.from_numpy(m.array)),
    "a tensor of an attribute is returned": lambda m, x, p, n: {"made": torch.as_tensor(m.array)},
    "a tensor of an attribute is kept once": lambda m, x, p, n: set_kept(m, torch.from_numpy(m.array)),
    "a tensor of an array of the step is kept": lambda m, x, p, n: seen(m, torch.from_numpy(filled(n))),
    "a tensor whose array is changed is kept": lambda m, x, p, n: seen(m, changed_copy(p, n)),
    "a tensor whose array is changed is returned": lambda m, x, p, n: {"made": changed_copy(p, n)},
    "a weight's array is kept": lambda m, x, p, n: seen(m, m.layer.weight.detach().numpy()),
    "a weight's array is kept, transposed": lambda m, x, p, n: seen(m, m.layer.weight.detach().numpy().T),
    "a weight's row is kept": lambda m, x, p, n: seen(m, m.layer.weight.detach().numpy()[0]),
    "a weight is kept by asarray": lambda m, x, p, n: seen(m, np.asarray(m.layer.bias.detach())),
    "a copy of a weight is kept": lambda m, x, p, n: seen(m, m.layer.weight.detach().numpy().copy()),
    "a weight's array is returned": lambda m, x, p, n: {"made": m.layer.weight.detach().numpy()},
    "a batch's array is kept": lambda m, x, p, n: seen(m, x.numpy()),
}
COMPILED = (
    *("bytes by way of NumPy", "a view that the step makes", "a hook changes bytes", "a hook changes a global's bytes"),
    *("a hook changes a typed array", "a hook changes an array, from_dlpack", "a hook changes a view"),
    *("a hook changes a stored tensor", "a tensor of an array of the step is kept", "a copy of a weight is kept"),
    "a batch's array is kept",
)


def made(name: str) -> Net:
    TABLE[:], BYTES[:], STORED[:] = 0, bytes(16), 0
    torch.manual_seed(0)
    return Net(USES[name])


def left(net: Net) -> list[Any]:
    seen = [one.tolist() if isinstance(one, Tensor | np.ndarray) else one for one in net.seen]
    own = (net.array, net.square, net.stored, net.count, TABLE, STORED)
    return [*seen, *(one.tolist() for one in own), list(net.bytes), list(net.numbers), list(BYTES)]


def flat(value: Any) -> list[float]:
    return [number for one in value for number in flat(one)] if isinstance(value, list) else [float(value)]


@pytest.mark.parametrize("name", USES)
def test_numbers_are_those_of_torch(name: str) -> None:
    expected = by_torch(made(name))
    wanted = flat(left(expected))
    net = made(name)
    trainer = by_trainer(net)
    assert flat(left(net)) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(net.layer.weight, expected.layer.weight, rtol=1e-5, atol=1e-6)
    if name in COMPILED:
        assert not isinstance(trainer.executor.steps, EagerSteps)
