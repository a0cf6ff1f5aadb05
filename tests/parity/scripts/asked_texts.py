"""Texts that a step's Python makes of values which only the running step knows, and of counters."""

# ruff: noqa: UP031, UP032
# Python's older ways to format are what some of these are about.

from __future__ import annotations

import io
import logging
import pprint
import sys
from typing import Any

import torch.nn.functional as F
from asked_of_the_step import Branching, pairs
from recording import Run, case
from torch import Tensor


@case
def texts_of_tensors(run: Run) -> None:
    """In a step, with what it has seen of gradients, and of parameters and buffers in a hook."""

    class Telling(Branching):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.layer.bias.data.fill_(0.25)
            self.seen += [
                f"{self.mean} {self.mean:.2f} {[self.mean]}",
                f"{self.layer.bias}",
                str(self.layer.bias),
                repr(self.mean),
            ]

    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        half = (h * 0 + 0.5).mean()
        three = (y[:3] * 0).double() + 3
        self.seen += [f"{half} {half.detach()} {half:.3f}", str(half), [half], f"{half!r} {[half.detach()]}", f"{three}"]
        self.seen += [
            f"{self.mean + 1} {self.mean} {self.mean:.1f}",
            f"{(h * 0 + 1.5)[:2]}",
            repr((y > 99).sum()),
            f"{(y > 99).any()}",
        ]
        self.seen = [one if isinstance(one, str) else f"{one}" for one in self.seen]
        return F.mse_loss(h, y)

    model = Telling(loss_of)
    run.fit(model, run.trainer(max_epochs=2), run.loader(*pairs()))
    run.note("texts", model.seen)


def logger_into_a_stream(name: str) -> tuple[logging.Logger, io.StringIO]:
    logger, stream = logging.getLogger(name), io.StringIO()
    logger.addHandler(logging.StreamHandler(stream))
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger, stream


@case
def said_in_each_step(run: Run) -> None:
    """By ``print``, ``self.print``, loggers and streams: one program, whose counters are those of each step."""
    logger, stream = logger_into_a_stream("asked_texts")

    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(h, y)
        half, step = (h * 0 + 0.5).mean(), self.trainer.global_step
        print(f"step {step:03d} of {self.current_epoch}: {half:.2f}", [half.detach()], half, step)
        self.print("%d of %5d: %.2f %s %r" % (step, self.current_epoch, half, half.detach(), half.item()))
        print("{} of {:>4}: {:.2f}".format(step, self.current_epoch, half), "%(a)s %(b).1f%%" % {"a": step, "b": half})
        logger.info(f"info {step} {half:.2f}")
        logger.info("%d%% %s", step, "done")
        sys.stdout.write(f"written in {step}\n")
        pprint.pprint({"a": 1})
        return loss

    before, sys.stdout = sys.stdout, io.StringIO()
    try:
        run.fit(Branching(loss_of), run.trainer(max_epochs=2), run.loader(*pairs()))
        run.note("said", [sys.stdout.getvalue(), stream.getvalue()])
    finally:
        sys.stdout = before


@case
def padded_and_put_together(run: Run) -> None:
    """Texts of values in others, in columns, in what is kept; tensors that a logger shows, with what they have seen."""
    logger, stream = logger_into_a_stream("asked_texts_padded")

    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(h, y)
        half = (h * 0 + 0.5).mean() * (self.global_step + 1)
        text = f"{half:.2f}"
        rows = [("half", text), ("upper", f"{half:.1e}".upper()), ("list", str([text]))]
        self.seen += ["\n".join(f"{name:<8}|{shown:>12}|" for name, shown in rows), text.rjust(9) + "=" * 3 + text.zfill(9)]
        self.seen += ["%9s|%-9s|%*s" % (text, text, 8, text), "{:^9}|{!r:>9}".format(text, text), ", ".join([text, *[text]])]
        logger.info("%s %r %.2f %12s %d", half, [half], half, half, self.global_step)
        logger.info("%(half)s", {"half": half})
        return loss

    model = Branching(loss_of)
    run.fit(model, run.trainer(max_epochs=2), run.loader(*pairs()))
    run.note("texts", [model.seen, stream.getvalue()])
