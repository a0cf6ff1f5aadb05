"""A pipeline over the axis ``stage``: how many stages, rounds and microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax.sharding import Mesh

from xlatrain.mesh.mesh import data_parallel_size, stages

MOST = 8
"""Microbatches for each stage that a pipeline has unless it is told: what it waits at both ends is then a tenth of its time."""


@dataclass(frozen=True)
class Pipelining:
    """How repeated layers run on the stages of a mesh.

    Layers are cut into ``stages * rounds`` chunks of as many layers; stage ``s`` has chunk ``s`` of each round. A microbatch goes
    through all stages, and from the last one back to the first for the next round.

    Attributes:
        stages: the size of the mesh's axis ``stage``.
        rounds: how often a microbatch comes to each stage.
        microbatches: into how many parts the rows of a batch are cut; None: one row for each of the devices that split rows
            inside of a stage, at most ``8 * stages``.
        parts: into which the devices of a stage split the rows of a microbatch.
    """

    stages: int
    rounds: int = 1
    microbatches: int | None = None
    parts: int = 1

    @classmethod
    def of_mesh(cls, mesh: Mesh, rounds: int = 1, microbatches: int | None = None) -> Pipelining | None:
        """The pipeline of a mesh; None without stages."""
        size = stages(mesh)
        return None if size == 1 else cls(size, rounds, microbatches, data_parallel_size(mesh) // size)

    @property
    def chunks(self) -> int:
        """Into how many chunks layers are cut: what their number is a multiple of."""
        return self.stages * self.rounds

    def microbatches_of(self, rows: int) -> int:
        """Into how many microbatches so many rows are cut: as many as there may be of those that divide them."""
        most = self.microbatches or MOST * self.stages
        parts = self.parts if rows % self.parts == 0 else 1
        return max(count for count in range(1, max(1, min(most, rows // parts)) + 1) if rows % (count * parts) == 0)

    def groups(self, rows: int, microbatches: int) -> int:
        """The number of contiguous parts of each of which a microbatch takes rows: none leaves its device inside of a stage."""
        return self.parts if rows % (self.parts * microbatches) == 0 else 1

    def ticks(self, microbatches: int) -> int:
        """The steps of the schedule, each of which is a chunk's work on every stage."""
        return self.period(microbatches) * self.rounds + self.stages - 1

    def period(self, microbatches: int) -> int:
        """The ticks of one round: the microbatches, filled up so that stages hold as many each."""
        return math.ceil(microbatches / self.stages) * self.stages

    def bubble(self, microbatches: int) -> float:
        """The part of a stage's time in which it waits."""
        return 1 - microbatches * self.rounds / self.ticks(microbatches)

    def order(self, layers: int) -> tuple[int, ...]:
        """The layer at each place of a stack, so that what a stage has lies together."""
        chunk = layers // self.chunks
        by_stage = (
            (r * self.stages + s) * chunk + j for s in range(self.stages) for r in range(self.rounds) for j in range(chunk)
        )
        return tuple(by_stage)


def check_pipeline(size: int, rounds: int, microbatches: int | None) -> None:
    """Check the arguments of a pipeline over an axis ``stage`` of ``size``, -1 if that is not known yet.

    Raises:
        ValueError: they cannot be.
    """
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise ValueError(f"rounds={rounds!r}; expected how often a microbatch comes to each stage, 1 or more")
    if microbatches is not None and (not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1):
        raise ValueError(f"microbatches={microbatches!r}; expected a number of parts of a batch's rows, or None")
    if size == 1 and (rounds > 1 or microbatches is not None):
        given = f"rounds={rounds}" if rounds > 1 else f"microbatches={microbatches}"
        raise ValueError(
            f"{given} is of a pipeline, but the mesh has no stages; add an axis 'stage' of 2 or more, or leave it out"
        )
    if microbatches is not None and microbatches < size:
        raise ValueError(
            f"microbatches={microbatches} for {size} stages: fewer than stages leave some without work all the time; give "
            f"{size} or a multiple of it, or None"
        )
