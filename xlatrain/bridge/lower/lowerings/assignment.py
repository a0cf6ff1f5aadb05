"""The assignment of rows to columns with the least sum of costs, as SciPy's ``linear_sum_assignment`` finds it.

Shortest augmenting paths (Crouse 2016, "On implementing 2D rectangular assignment algorithms"), in SciPy's order and precision:
where several assignments cost the same it is SciPy's that is found.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xlatrain.bridge.capture.traceable.assignment import INFEASIBLE, INVALID
from xlatrain.bridge.lower.registry import lowers
from xlatrain.bridge.tensors.dtypes import jax_dtype


def _column_of_rows(cost: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The column of each row of a float64 matrix (rows, columns) with at least as many columns as rows; whether there is one."""
    rows, columns = cost.shape
    none, places = jnp.int32(-1), jnp.arange(columns, dtype=jnp.int32)

    def nearest(search: dict[str, Any]) -> dict[str, Any]:
        """Reach the column that is nearest to the columns that have been reached."""
        row, remaining, count = search["row"], search["remaining"], search["count"]
        through = search["least"] + cost[row] - search["u"][row] - search["v"]
        is_open = ~search["reached"]
        shorter = is_open & (through < search["lengths"])
        lengths = jnp.where(shorter, through, search["lengths"])
        path = jnp.where(shorter, row, search["path"])
        # of columns that are as near the last one that is free, else the first one, in the order of `remaining`
        waiting = places < count
        of_waiting = jnp.where(waiting, lengths[remaining], jnp.inf)
        least = jnp.min(of_waiting)
        is_nearest = waiting & (of_waiting == least)
        is_free = is_nearest & (search["row_of"][remaining] == none)
        last_free = jnp.max(jnp.where(is_free, places, none))
        place = jnp.where(last_free == none, jnp.min(jnp.where(is_nearest, places, jnp.int32(columns))), last_free)
        column = remaining[place]
        taken = search["row_of"][column]
        return {
            **search,
            "row": jnp.where(taken == none, row, taken),
            "visited": search["visited"].at[row].set(True),
            "reached": search["reached"].at[column].set(True),
            "remaining": remaining.at[place].set(remaining[count - 1]),
            "count": count - 1,
            "lengths": lengths,
            "path": path,
            "least": least,
            "end": jnp.where(taken == none, column, none),
        }

    def assign(first: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        u, v, column_of, row_of, is_found = carry
        search = {
            "u": u,
            "v": v,
            "row_of": row_of,
            "row": first,
            "visited": jnp.zeros(rows, bool),
            "reached": jnp.zeros(columns, bool),
            "remaining": places[::-1],
            "count": jnp.int32(columns),
            "lengths": jnp.full(columns, jnp.inf, cost.dtype),
            "path": jnp.full(columns, none),
            "least": jnp.zeros((), cost.dtype),
            "end": none,
        }
        search = lax.while_loop(lambda now: (now["end"] == none) & (now["count"] > 0), nearest, search)
        least, lengths, path = search["least"], search["lengths"], search["path"]
        others = search["visited"] & (jnp.arange(rows, dtype=jnp.int32) != first)
        u = jnp.where(others, u + (least - lengths[column_of]), u).at[first].add(least)
        v = jnp.where(search["reached"], v - (least - lengths), v)

        def turn(now: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            column, column_of, row_of, _ = now
            row = path[column]
            return column_of[row], column_of.at[row].set(column), row_of.at[column].set(row), row == first

        is_found &= (search["end"] != none) & (least < jnp.inf)
        ended = (search["end"], column_of, row_of, ~is_found)  # without a way to the first row there is no end
        _, column_of, row_of, _ = lax.while_loop(lambda now: ~now[-1], turn, ended)
        return u, v, column_of, row_of, is_found

    begin = (jnp.zeros(rows, cost.dtype), jnp.zeros(columns, cost.dtype), jnp.full(rows, none), jnp.full(columns, none))
    *_, column_of, _, is_found = lax.fori_loop(jnp.int32(0), jnp.int32(rows), assign, (*begin, jnp.bool_(True)))
    return column_of, is_found


@lowers("xlatrain.linear_sum_assignment.default")
def linear_sum_assignment(cost: jax.Array, maximize: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    index = jax_dtype(torch.int64)
    rows, columns = cost.shape
    if not rows or not columns:
        return jnp.zeros(0, index), jnp.zeros(0, index), jnp.zeros((), jnp.int32)
    with jax.enable_x64(True):  # the precision of SciPy, whose sums decide between assignments that cost nearly the same
        wide = cost.astype(jnp.float64)
        wide = -wide if maximize else wide
        is_invalid = jnp.any(jnp.isnan(wide) | (wide == -jnp.inf))
        found, is_found = _column_of_rows(wide.T if columns < rows else wide)
        outcome = jnp.where(is_invalid, jnp.int32(INVALID), jnp.where(is_found, jnp.int32(0), jnp.int32(INFEASIBLE)))
    found = found.astype(index)
    if columns >= rows:
        return jnp.arange(rows, dtype=index), found, outcome
    of_rows, of_columns = lax.sort((found, jnp.arange(columns, dtype=index)), num_keys=1)
    return of_rows, of_columns, outcome
