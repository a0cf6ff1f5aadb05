"""Readers of arrays for Orbax: a read that fails leaves none under way behind it.

Orbax reads all arrays at once in an event loop of its own, and closes that as soon as one could not be read. TensorStore then
completes the others into a closed loop, and prints a traceback ("Event loop is closed") for each.

Type handlers: https://orbax.readthedocs.io/en/latest/api_reference/checkpoint.type_handlers.html
"""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


class _Settled:
    """A type handler whose ``deserialize`` returns, or raises, when everything that it started is over."""

    async def deserialize(self, *args: Any, **kwargs: Any) -> Any:
        before = asyncio.all_tasks()  # those that wait for this one are among them
        try:
            return await super().deserialize(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        except BaseException:
            await asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True)
            raise


class _Arrays(_Settled, ocp.type_handlers.ArrayHandler):
    pass


class _NumpyArrays(_Settled, ocp.type_handlers.NumpyHandler):
    pass


def reader() -> ocp.PyTreeCheckpointHandler:
    """A handler that restores ``jax.Array`` s and numpy arrays; reading with it is local to this process."""
    left_out = type(ocp.PLACEHOLDER)
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, _Arrays()),
        (np.ndarray, _NumpyArrays()),
        (left_out, ocp.type_handlers.get_type_handler(left_out)),
    )
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, type_handler_registry=registry)
