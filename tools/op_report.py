"""The report on PyTorch ops that the bridge computes: all of the OpInfo database, forward and gradient, against torch itself.

``python -m tools.op_report`` runs the database's sample inputs through capture, lowering and ``jax.jit``, prints a table
and writes it to ``docs/bridge_ops.md``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import torch

from tools.op_check import ERROR, PASSES, REFUSED, SKIPPED, WRONG, OpResult, check_op, op_database, op_name


def summarise(results: Iterable[OpResult]) -> dict[str, int]:
    """The number of results with each outcome."""
    totals: dict[str, int] = dict.fromkeys((PASSES, REFUSED, WRONG, ERROR, SKIPPED), 0)
    for result in results:
        totals[result.outcome] += 1
    return totals


def markdown(results: Sequence[OpResult]) -> str:
    """The report: totals by dtype, then what does not pass with its reason, then what passes."""
    dtypes = list(dict.fromkeys(result.dtype for result in results))
    lines = [
        "# PyTorch ops through the bridge",
        "",
        f"Written by `python -m tools.op_report` with torch {torch.__version__.split('+')[0]}, jax {jax.__version__}:",
        "sample inputs of PyTorch's own op database through capture, lowering and `jax.jit` on CPU, results and gradients",
        "against torch eager.",
        "",
        "| dtype | passes | refused | wrong | error |",
        "|---|---|---|---|---|",
    ]
    for dtype in dtypes:
        total = summarise(result for result in results if result.dtype == dtype)
        lines.append(f"| {_short(dtype)} | {total[PASSES]} | {total[REFUSED]} | {total[WRONG]} | {total[ERROR]} |")
    lines += ["", "## Not (always) computed", "", "| op | dtype | outcome | samples refused | reason |", "|---|---|---|---|---|"]
    for result in results:
        if result.outcome in (REFUSED, WRONG, ERROR):
            reason = result.reason.replace("|", "\\|")
            counts = f"{result.refused} of {result.samples}"
            lines.append(f"| `{result.name}` | {_short(result.dtype)} | {result.outcome} | {counts} | {reason} |")
    for title, wanted in (("with gradients", lambda r: r.gradients), ("forward", lambda r: not r.gradients)):
        lines += ["", f"## Passes, {title}", ""]
        for dtype in dtypes:
            names = [
                f"`{r.name}`{' (random: shapes)' if r.random else ''}"
                for r in results
                if r.dtype == dtype and r.outcome == PASSES and wanted(r)
            ]
            if names:
                lines += [f"{_short(dtype)}: {', '.join(names)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run(
    dtypes: Sequence[torch.dtype],
    max_samples: int,
    chosen: Callable[[str], bool] = lambda name: True,
    on_result: Callable[[OpResult], None] = lambda result: None,
) -> list[OpResult]:
    """Check every chosen op of the database with every dtype that torch has it for."""
    results = []
    for op, dtype in itertools.product(op_database(), dtypes):
        if chosen(op_name(op)) and dtype in op.dtypes:
            results.append(check_op(op, dtype, max_samples))
            on_result(results[-1])
            if len(results) % 50 == 0:
                jax.clear_caches()  # thousands of compiled programs otherwise fill the memory
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the report; the exit status is 1 if any op is wrong or fails without a clear refusal."""
    parser = argparse.ArgumentParser(prog="python -m tools.op_report", description=__doc__)
    parser.add_argument("--samples", type=int, default=3, help="sample inputs per op and dtype (default: 3)")
    dtype_names = "float32,bfloat16,complex64,int64,bool"
    parser.add_argument("--dtypes", default=dtype_names, help=f"comma-separated torch dtypes (default: {dtype_names})")
    parser.add_argument("--only", default="", help="only ops whose name starts with one of these comma-separated words")
    parser.add_argument("--out", type=Path, help="markdown file (default: docs/bridge_ops.md of a full run)")
    options = parser.parse_args(argv)
    prefixes = tuple(word for word in options.only.split(",") if word)
    dtypes = [getattr(torch, name) for name in options.dtypes.split(",")]
    start = time.perf_counter()

    def show(result: OpResult) -> None:
        print(f"{result.outcome:8} {_short(result.dtype):9} {result.name:45} {result.samples:3} {result.reason}", flush=True)

    results = run(dtypes, options.samples, lambda name: name.startswith(prefixes) if prefixes else True, show)
    totals = summarise(results)
    print(f"{totals} in {time.perf_counter() - start:.0f} s")
    out = options.out or (None if prefixes else Path("docs/bridge_ops.md"))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(markdown(results))
        print(f"written to {out}")
    return 1 if totals[WRONG] or totals[ERROR] else 0


if __name__ == "__main__":
    sys.exit(main())
