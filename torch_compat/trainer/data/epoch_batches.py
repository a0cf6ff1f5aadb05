"""The batches of a training epoch, and where each of the loaders is after every one of them.

Batches are drawn ahead of the step that takes them: by one where a loader has no length (the last must be known as such), by
one more on several processes, which tell each other whether they have another. So what is saved is not where the loaders are,
but where they were when the batch of the last step had been drawn, and with which random streams those ahead of it were.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch_compat.trainer.data import host_random
from torch_compat.trainer.data.loader_pass import LoaderPass, State
from torch_compat.utilities.combined_loader import CombinedLoader


class EpochBatches(Iterator[Any]):
    """Iterates over all training loaders together.

    Args:
        combined: the loaders, prepared for the mesh.
        reads_ahead: whether the first batch is drawn as the epoch begins, because there is no length that tells the last.
        draws_ahead: whether batches are taken before the step of the batch before has run.
    """

    def __init__(self, combined: CombinedLoader, *, reads_ahead: bool, draws_ahead: bool) -> None:
        count = len(combined.flattened)
        names = [f"train_dataloader[{index}]" if count > 1 else "train_dataloader" for index in range(count)]
        self._combined = combined
        self._passes = [LoaderPass(loader, name) for loader, name in zip(combined.flattened, names, strict=True)]
        self._modes = combined._over(self._passes)
        self._reads_ahead = reads_ahead
        self._draws_ahead = draws_ahead
        self._drawn = 0
        self._ended = False
        self._before: deque[tuple[int, State, State | None]] = deque(maxlen=4)  # drawn so far, where, streams: before each draw
        self._ahead: deque[Any] = deque()

    @property
    def loaders(self) -> list[Any]:
        return self._combined.flattened

    def begin(self) -> None:
        """Begin the epoch: the loaders' iterators are made."""
        iter(self._modes)
        if self._reads_ahead:
            with contextlib.suppress(StopIteration):
                self._ahead.append(self._draw())

    def resume(self, position: State, batches: int) -> None:
        """Continue an epoch after so many batches; leaves the host's random streams as it found them."""
        now = host_random.streams()
        for one, state in zip(self._passes, position["loaders"], strict=True):
            one.resume(state)
        self._modes._resume(position["modes"])
        self._drawn = batches
        for streams in position["ahead"]:  # drawn before the checkpoint was saved
            if streams is not None:
                host_random.set_streams(streams)
            with contextlib.suppress(StopIteration):
                self._ahead.append(self._draw())
        host_random.set_streams(now)

    def position(self, batches: int) -> State:
        """The position of the loaders after so many batches of the epoch."""
        if self._ended and batches >= self._drawn:
            return {**self._where(), "ahead": []}
        ahead = [(where, streams) for drawn, where, streams in self._before if drawn >= batches]
        where = ahead[0][0] if ahead else self._where()
        return {**where, "ahead": [streams for _, streams in ahead]}

    def close(self) -> None:
        """The epoch is over, or its iterators are not needed."""
        for one in self._passes:
            one.close()

    def __next__(self) -> Any:
        if self._ahead:
            return self._ahead.popleft()
        return self._draw()

    def _draw(self) -> Any:
        self._before.append((self._drawn, self._where(), host_random.streams() if self._draws_ahead else None))
        try:
            batch, _, _ = next(self._modes)
        except StopIteration:
            self._ended = True
            raise
        self._drawn += 1
        return self._combined._in_structure(batch)

    def _where(self) -> State:
        return {"loaders": [one.state() for one in self._passes], "modes": self._modes._state()}
