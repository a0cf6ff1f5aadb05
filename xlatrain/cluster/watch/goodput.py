"""Goodput: the share of a job's time in which it trained steps that it kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xlatrain.cluster.watch.account import KINDS


@dataclass(frozen=True)
class Loss:
    """The cost of one end of a run that another one continued.

    Attributes:
        step: that had been reached, as far as the ledger says: its last line may be some seconds older than the end.
        lost_steps, lost_s: training that was done again, as far as it says.
        down_s: until the next run began.
        processes: before and after; 0 where the ledger does not say.
    """

    step: int
    lost_steps: int
    lost_s: float
    down_s: float
    processes: tuple[int, int]

    def __str__(self) -> str:
        before, after = self.processes
        size = f", {before} → {after} processes" if before != after else ""
        return f"at step {self.step}{size}: {self.lost_steps} steps again ({self.lost_s:.1f} s), down for {self.down_s:.1f} s"


@dataclass
class Goodput:
    """The account of a job's time.

    Attributes:
        wall_s: from the first start to the last sign of the last run.
        seconds: of each kind of :data:`~xlatrain.cluster.watch.account.KINDS`, and ``lost`` (training that was done again after a
            restart), ``down`` (between the runs of a job, and what a killed run did after its last line).
        steps: that were kept.
        lost_steps: that were done again.
        runs: how many there were.
        losses: what each end of a run that went on cost.
    """

    wall_s: float
    seconds: dict[str, float]
    steps: int
    lost_steps: int
    runs: int
    losses: list[Loss] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The share of time that was training, from 0 to 1."""
        return self.seconds["step"] / self.wall_s if self.wall_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The account as JSON values."""
        rounded = {kind: round(seconds, 3) for kind, seconds in self.seconds.items()}
        counts = {"steps": self.steps, "lost_steps": self.lost_steps, "runs": self.runs}
        losses = [{**vars(loss), "lost_s": round(loss.lost_s, 3), "down_s": round(loss.down_s, 3)} for loss in self.losses]
        return {"goodput": round(self.ratio, 4), "wall_s": round(self.wall_s, 3), "seconds": rounded, **counts, "losses": losses}

    def __str__(self) -> str:
        parts = [
            f"{kind} {seconds:.1f} s ({seconds / self.wall_s:.1%})"
            for kind, seconds in sorted(self.seconds.items(), key=lambda item: -item[1])
            if seconds >= 0.05
        ]
        lost = f", {self.lost_steps} of them twice" if self.lost_steps else ""
        return (
            f"goodput {self.ratio:.1%} of {self.wall_s:.1f} s in {self.runs} run(s), {self.steps} steps{lost}: {', '.join(parts)}"
        )


@dataclass
class _Run:
    """A run: its ``begin`` line, and the facts noted since."""

    fit: int
    began: float
    first_step: int
    processes: int = 0
    points: list[tuple[int, float]] = field(default_factory=list)  # step, seconds of training until then
    seconds: Mapping[str, float] = field(default_factory=dict)
    until: float = 0.0

    @property
    def last_step(self) -> int:
        return self.points[-1][0] if self.points else self.first_step

    def training_after(self, step: int) -> float:
        """Seconds of training that went into the steps after ``step``; between two lines they count alike."""
        total = self.points[-1][1] if self.points else 0.0
        before, spent = self.first_step, 0.0
        for at, seconds in self.points:
            if at >= step:
                part = (step - before) / (at - before) if at > before else 1.0
                return total - (spent + max(0.0, part) * (seconds - spent))
            before, spent = at, seconds
        return 0.0


def goodput(events: Sequence[Mapping[str, Any]]) -> Goodput | None:
    """The goodput of the events of a ledger (:func:`xlatrain.cluster.watch.ledger.read`); None if no run has begun."""
    runs = _runs(events)
    if not runs:
        return None
    seconds = dict.fromkeys([*KINDS, "lost", "down"], 0.0)
    lost_steps = unsaid = 0
    by_fit: dict[int, _Run] = {}
    losses: list[Loss] = []
    for run in runs:
        for kind, spent in run.seconds.items():
            seconds[kind] += spent
        before = by_fit.get(run.fit)
        if before is not None:
            steps, sizes = max(0, before.last_step - run.first_step), (before.processes, run.processes)
            down = max(0.0, run.began - before.until)
            reached = max(before.last_step, run.first_step)  # it may have saved after its last line
            losses.append(Loss(reached, steps, before.training_after(run.first_step) if steps else 0.0, down, sizes))
        if before is not None and run.first_step < before.last_step:
            again = before.training_after(run.first_step)
            seconds["lost"] += again
            seconds["step"] -= again
            lost_steps += before.last_step - run.first_step
        elif before is not None:
            unsaid += run.first_step - before.last_step  # it saved once more after its last line
        by_fit[run.fit] = run
    wall = max(run.until for run in runs) - runs[0].began
    seconds["down"] = max(0.0, wall - sum(seconds.values()))
    done = sum(run.last_step - run.first_step for run in runs)
    return Goodput(wall, seconds, done + unsaid - lost_steps, lost_steps, len(runs), losses)


def _runs(events: Sequence[Mapping[str, Any]]) -> list[_Run]:
    runs: list[_Run] = []
    current: dict[tuple[int, int], _Run] = {}
    for event in events:
        key = (event["pid"], event["fit"])
        if event["event"] == "begin":
            current[key] = _Run(event["fit"], event["time"], event["step"], event.get("processes", 0), until=event["time"])
            runs.append(current[key])
        elif (run := current.get(key)) is not None:
            run.until = event["time"]
            run.seconds = event["seconds"]
            run.points.append((event["step"], event["seconds"].get("step", 0.0)))
    return runs
