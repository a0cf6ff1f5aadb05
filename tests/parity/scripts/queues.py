"""Places in queues, buffers and weights that are others for each step: how many programs there are of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from recording import Run, case, main, reported_runs
from torch import Tensor, nn

Keys = Callable[["Queue", Tensor, int], Any]


class Queue(pl.LightningModule):
    """Rows are compared with a queue of earlier ones; ``how`` is given the keys of a batch, and may give a part of the loss."""

    def __init__(self, how: Keys, rows: int) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.how, self.count = how, 0
        self.register_buffer("queue", torch.linspace(-1, 1, rows * 3).reshape(rows, 3))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = (out @ self.queue.clone().T).square().mean()
        more = self.how(self, out.detach(), batch_idx)
        loss = loss if more is None else loss + more
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(run: Run, how: Callable[[Any, Tensor, int], Any], programs: int, rows: int = 64, kind: type[Queue] = Queue) -> None:
    x = torch.randn(160, 4, generator=torch.Generator().manual_seed(0))
    run.fit(kind(how, rows), run.trainer(max_epochs=1), run.loader(x))
    run.note("programs", [entry["variants"] for entry in reported_runs()[-1:]] or [programs])


@case
def queue_of_keys(run: Run) -> None:
    """MoCo's queue, which has a whole number of batches."""

    def how(module: Queue, keys: Tensor, batch_idx: int) -> None:
        start, count = int(module.pointer), len(keys)
        assert len(module.queue) % count == 0
        module.queue[start : start + count] = keys
        start = (start + count) % len(module.queue)
        module.log("start", float(start))
        module.pointer[0] = start

    fit(run, how, 1)


@case
def queue_along_the_last_dim(run: Run) -> None:
    def how(module: Queue, keys: Tensor, batch_idx: int) -> Tensor:
        start = module.pointer.item()
        module.queue.T[:2, start : start + 16] = keys.T[:2]
        module.queue[torch.arange(start, start + 16), 2] = 0.5
        module.pointer += 16
        module.pointer %= 64
        return module.queue[int(module.pointer)].sum() + start

    fit(run, how, 1)


@case
def queue_that_wraps_around(run: Run) -> None:
    """What is beyond the end goes to the beginning."""

    def how(module: Queue, keys: Tensor, batch_idx: int) -> None:
        start, count, size = int(module.pointer), len(keys), len(module.queue)
        if start + count > size:
            module.queue[start:], module.queue[: start + count - size] = keys[: size - start], keys[size - start :]
        else:
            module.queue[start : start + count] = keys
        module.pointer[0] = (start + count) % size

    fit(run, how, 2, rows=56)


@case
def slices_shorter_at_the_end(run: Run) -> None:
    def how(module: Queue, keys: Tensor, batch_idx: int) -> Tensor:
        start = int(module.pointer)
        chosen = module.queue[start : start + 16].sum()
        module.queue[start : start + 16] = 0.25
        module.pointer[0] = start + 24 if start + 24 < 56 else 0
        return chosen

    fit(run, how, 2, rows=56)


@case
def entries_from_either_end(run: Run) -> None:
    def how(module: Queue, keys: Tensor, batch_idx: int) -> Tensor:
        place = int(module.pointer)
        module.queue[place] = keys[0]
        module.queue[-1 - place, 1:] = keys[1, 1:]
        module.queue[place - 3, place % 2] += 1.0
        module.queue[place + 1 : place + 3, None] *= 0.5
        module.pointer[0] = place + 5
        return module.queue[..., place % 3].sum() + module.net.weight[place % 3].square().sum() + module.net.bias[batch_idx % 2]

    fit(run, how, 1)


@case
def entries_counted_in_python(run: Run) -> None:
    def how(module: Queue, keys: Tensor, batch_idx: int) -> Tensor:
        module.queue[module.count % 7] = keys.mean(0)
        module.queue[batch_idx, 0] = module.queue[batch_idx : batch_idx + 2].mean()
        module.count += 1
        return module.queue[module.count % 7 : module.count % 7 + 4].sum()

    fit(run, how, 2)


@case
def entries_that_the_step_finds(run: Run) -> None:
    def how(module: Queue, keys: Tensor, batch_idx: int) -> Tensor:
        best = keys.sum(0).argmax().item()
        module.queue[best - 2] = keys[best]
        return module.net.weight[best].sum() + keys[:, best].sum()

    fit(run, how, 1)


@case
def views_that_are_changed(run: Run) -> None:
    """A view is its tensor: each place has its program."""

    def how(module: Queue, keys: Tensor, batch_idx: int) -> Tensor:
        place = int(module.pointer)
        module.queue[place : place + 2].copy_(keys[:2])
        module.queue[place].add_(1)
        before = module.queue[place + 1]
        module.queue[place + 1] *= 2
        module.pointer[0] = (place + 1) % 2
        return before.sum()

    fit(run, how, 2)


@case
def changed_and_put_back(run: Run) -> None:
    """What is put back is a view still, and may have been seen before."""

    def how(module: Queue, keys: Tensor, batch_idx: int) -> Tensor:
        place = int(module.pointer)
        changed = module.queue[place]
        changed += 1
        seen = module.queue.sum()
        module.queue[place] = changed
        changed *= 2
        module.pointer[0] = (place + 1) % 2
        return seen

    fit(run, how, 2)


@case
def slices_of_other_lengths(run: Run) -> None:
    def how(module: Queue, keys: Tensor, batch_idx: int) -> None:
        start = int(module.pointer)
        count = start % 2 + 1
        module.queue[start : start + count] = keys[:count]
        module.pointer[0] = start + count if start + count < 4 else 0

    fit(run, how, 3)


@case
def tensors_that_change_places(run: Run) -> None:
    """Of a list, a tuple, a dict and a queue that the module was made with: each stays the same object, also in another list."""

    class Moving(Queue):
        def __init__(self, how: Keys, rows: int) -> None:
            super().__init__(how, rows)
            one, two, three = self.known = [torch.full((3,), 0.1 * number) for number in range(1, 4)]
            self.row, self.pair, self.ring = [one, two, three], (one, two), deque([two, three])
            self.named = {"old": one, "new": three}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            held = [*self.row, *self.pair, *self.named.values(), *self.ring]
            run.note(f"held {batch_idx}", [held, [[one is other for other in self.known] for one in held]])
            self.known[batch_idx % 3].mul_(0.5)

    def read(module: Moving) -> Tensor:
        held = (*module.row, *module.pair, *module.named.values(), *module.ring)
        return torch.stack([(1 + index) * one for index, one in enumerate(held)]).sum(0)

    def shifted(module: Moving, keys: Tensor, batch_idx: int) -> Tensor:
        before = read(module)
        module.row[0], module.row[1], module.row[2] = module.row[1], module.row[2], keys.mean(0)
        module.pair = (module.pair[1], keys.amax(0))
        module.named["old"], module.named["new"] = module.named["new"], module.named["old"]
        module.ring.rotate(1)
        return module.net(before.repeat(2)[:4]).square().mean()

    def by_index(module: Moving, keys: Tensor, batch_idx: int) -> Tensor:
        module.row[batch_idx % 2] = keys.mean(0)
        return module.net(torch.stack(module.row).sum(0).repeat(2)[:4]).square().mean()

    fit(run, shifted, 1, kind=Moving)
    fit(run, by_index, 2, kind=Moving)


if __name__ == "__main__":
    main()
