"""A run that was examined beforehand (``xlatrain preflight``): its first compiled step is compared with the plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn


class Planned:
    """The plan of this run.

    Args:
        path: of the plan file.
        mesh: of the run.

    Raises:
        PlanError: it is missing, or no plan.
    """

    def __init__(self, path: str, mesh: Mesh) -> None:
        from xlatrain.preflight.plan import read_plan

        self._path = path
        self._plan: Mapping[str, Any] = read_plan(path)
        self._mesh = mesh

    @classmethod
    def of_environment(cls, mesh: Mesh) -> Planned | None:
        """The plan that ``XLATRAIN_PLAN`` names, or None."""
        path = os.environ.get("XLATRAIN_PLAN")
        return cls(path, mesh) if path else None

    def compile(self, program: Callable[..., Any], args: tuple[Any, ...], rows: int, accumulate: int) -> Callable[..., Any]:
        """The step's program compiled for these arguments, after a word about how it differs from the plan.

        Args:
            program: jitted; the same arguments' shapes are the only ones that it is called with.
            rows: of the global batch.
            accumulate: batches of an optimizer step.
        """
        from xlatrain.preflight.examine import summed, versions
        from xlatrain.preflight.hlo import Hlo
        from xlatrain.preflight.plan import differences
        from xlatrain.preflight.program import memory_of
        from xlatrain.preflight.stored import digest

        lowered = program.lower(*args)  # pyright: ignore[reportFunctionMemberAccess]
        compiled = lowered.compile()
        params = args[0].params
        found: dict[str, Any] = {
            "mesh": dict(self._mesh.shape),
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "settings": {"global_batch_rows": rows, "accumulate_grad_batches": accumulate},
            "versions": versions(),
        }
        each = len(self._mesh.devices.flat) // self._plan["chips"] if self._plan["chips"] else 1
        found["total"] = memory_of(compiled).total * max(each, 1)
        found["collectives"] = summed((one, 1) for one in Hlo(compiled.as_text(), self._mesh).collectives())
        if self._plan.get("stablehlo") is not None:
            found["stablehlo"] = digest(lowered)
        told = differences(self._plan, found)
        if told:
            listed = "\n".join(f"  {line}" for line in told)
            rank_zero_warn(f"this run differs from the plan {self._path} for {self._plan['topology']}:\n{listed}")
        else:
            rank_zero_info(f"The first step is as {self._path} planned it.")
        return compiled
