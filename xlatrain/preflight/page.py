"""A report as one HTML page with everything in it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence

from xlatrain.preflight.report import Report
from xlatrain.preflight.text import PARTS, duration, size, verdict_of

_COLOURS = {"parameters": "#3b6fb6", "gradients": "#e08a3c", "optimizer": "#5aa469", "batch": "#9b6bb3", "temporaries": "#c9b458"}
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1d2430}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.25rem .6rem .25rem 0;border-bottom:1px solid #e3e6ea}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}code{font-size:.9em;overflow-wrap:anywhere}
.fits{color:#2c7a46}.not{color:#b3261e}.part{white-space:nowrap}
.key{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}small{color:#5b6472}
@media (prefers-color-scheme:dark){body{background:#15181d;color:#e4e7eb}td,th{border-color:#333941}small{color:#9aa4b1}}
"""


def page(report: Report) -> str:
    """The page; it loads nothing."""
    return "".join(_parts(report))


def _parts(report: Report) -> Iterator[str]:
    pod = report.topology if report.num_slices == 1 else f"{report.num_slices} × {report.topology}"
    verdict = "fits" if report.fits else f"does not fit: {size(report.missing)} too much on each chip"
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f'<meta name="viewport" content="width=device-width"><title>Preflight: {_e(pod)}</title>'
    yield f"<style>{_STYLE}</style></head><body>"
    yield f'<h1>{_e(pod)}: <span class="{"fits" if report.fits else "not"}" id="verdict">{_e(verdict)}</span></h1>'
    axes = " × ".join(f"{name} {count}" for name, count in report.mesh.items())
    yield f"<p>{report.parameters:,} parameters on {report.chips} chips, mesh {_e(axes)}.</p>"
    yield "<h2>Memory of one chip</h2>"
    yield _memory(report)
    if not report.fits:
        yield "<h2>Why it does not fit</h2>"
        yield _table(("largest", "per chip"), ((one["what"], size(one["bytes_per_chip"])) for one in report.contributors))
        if report.changes:
            rows = (
                (
                    one.what,
                    verdict_of(one),
                    one.reason or size(one.total),
                )
                for one in report.changes
            )
            yield _table(("change", "compiled", "per chip"), rows)
    yield "<h2>Largest arrays</h2>"
    rows = (
        (one.path, f"{one.dtype}[{', '.join(map(str, one.shape))}]", one.spec, str(one.replicas), size(one.bytes_per_chip))
        for one in report.largest[:12]
    )
    yield _table(("path", "array", "split", "copies", "per chip"), rows)
    yield f"<p><small>{size(report.replicated_bytes)} per chip are the same on every device.</small></p>"
    yield "<h2>Collectives of one optimizer step</h2>"
    yield _collectives(report)
    yield from _estimate(report)
    yield "<h2>Programs</h2>"
    rows = (
        (
            one.name,
            str(one.runs),
            size(one.bytes_per_chip["total"]),
            f"{one.flops:.4g}",
            f"{one.cycles:,}",
            f"{sum(one.seconds.values()):.1f} s",
        )
        for one in report.steps
    )
    yield _table(("program", "runs a step", "per chip", "FLOPs", "compiler's cycles (relative only)", "to compile"), rows)
    for title, given in (("Attention", report.attention), ("Repeated layers", report.loops), ("Notes", report.notes)):
        if given:
            yield f"<h2>{title}</h2><ul>{''.join(f'<li>{_e(text)}</li>' for text in given)}</ul>"
    made = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield f"<p><small>{_e(made)}. Took {report.seconds['total']:.1f} s and {size(report.peak_memory)}.</small></p>"
    yield "</body></html>\n"


def _memory(report: Report) -> str:
    """A bar of the parts against the chip's memory, and its key."""
    sizes = report.bytes_per_chip
    width, full = 900.0, max(sizes["hbm"], sizes["total"], 1)
    left, shapes = 0.0, []
    for part in PARTS:
        length = width * sizes[part] / full
        label = f"{part}: {size(sizes[part])}"
        shapes.append(
            f'<rect x="{left:.1f}" y="10" width="{length:.1f}" height="46" fill="{_COLOURS[part]}"><title>{label}</title></rect>'
        )
        left += length
    limit = width * sizes["hbm"] / full
    shapes.append(f'<rect x="0.5" y="9.5" width="{limit - 1:.1f}" height="47" fill="none" stroke="currentColor"/>')
    if not report.fits:
        shapes.append(f'<line x1="{limit:.1f}" y1="0" x2="{limit:.1f}" y2="66" stroke="#b3261e" stroke-width="3"/>')
    keys = "".join(
        f'<span class="part"><span class="key" style="background:{_COLOURS[part]}"></span>'
        f"{'activations and temporaries' if part == 'temporaries' else part} {size(sizes[part])}</span> "
        for part in PARTS
    )
    title = f"{size(sizes['total'])} of {size(sizes['hbm'])}"
    svg = f'<svg viewBox="0 0 900 66" role="img" aria-label="{title}" width="100%">{"".join(shapes)}</svg>'
    return f"<p>{title}</p>{svg}<p>{keys}</p>"


def _collectives(report: Report) -> str:
    rows = [
        (axis, kind, found["count"], found["bytes"])
        for axis, kinds in sorted(report.collectives.items())
        for kind, found in sorted(kinds.items())
    ]
    if not rows:
        return "<p>none</p>" if report.fits else "<p>not known: nothing was compiled</p>"
    most = max(row[3] for row in rows) or 1
    bars = []
    for index, (axis, kind, count, nbytes) in enumerate(rows):
        y = index * 26
        bars.append(
            f'<text x="0" y="{y + 17}" fill="currentColor">{_e(axis)}: {count} × {_e(kind)}</text>'
            f'<rect x="330" y="{y + 3}" height="18" width="{max(400 * nbytes / most, 1):.1f}" fill="#3b6fb6"/>'
            f'<text x="{340 + 400 * nbytes / most:.1f}" y="{y + 17}" fill="currentColor">{size(nbytes)}</text>'
        )
    return f'<svg viewBox="0 0 900 {26 * len(rows)}" width="100%" role="img" font-size="15">{"".join(bars)}</svg>'


def _estimate(report: Report) -> Iterator[str]:
    yield f"<h2>Estimate</h2><p>{report.flops_per_step:.4g} FLOPs in one optimizer step on all chips.</p>"
    found = report.estimate
    if found is None:
        return
    yield (
        f"<p>Roofline: at least <b>{duration(found.step_seconds)}</b> a step, {found.bound}-bound; "
        f"MFU at most <b>{found.mfu:.1%}</b>, HFU {found.hfu:.1%}. "
        f"If nothing overlaps: {duration(found.step_seconds_without_overlap)}.</p>"
    )
    parts = {"compute": found.compute_seconds, "memory": found.memory_seconds, "network": found.network_seconds}
    yield _table(("", "alone"), ((name, duration(value)) for name, value in parts.items()))
    yield _regions(found.regions)
    yield f"<ul>{''.join(f'<li><small>{_e(text)}</small></li>' for text in found.assumptions)}</ul>"


def _regions(regions: Mapping[str, Mapping[str, float]]) -> str:
    """Where the time would go: a bar for each region and estimate, all to one scale."""
    bars = [(f"{name}: {kind}", kind, value) for name, parts in regions.items() for kind, value in parts.items() if value]
    longest = max((value for *_, value in bars), default=0.0)
    colours = {"compute": "#3b6fb6", "memory": "#e08a3c", "compiler": "#5aa469"}
    if not bars:
        return ""
    drawn = (
        f'<rect x="230" y="{26 * i + 4}" width="{max(520 * value / longest, 1):.1f}" height="18" fill="{colours[kind]}"/>'
        f'<text x="0" y="{26 * i + 18}" fill="currentColor">{_e(label)}</text>'
        f'<text x="760" y="{26 * i + 18}" fill="currentColor">{duration(value)}</text>'
        for i, (label, kind, value) in enumerate(bars)
    )
    return f'<svg viewBox="0 0 900 {26 * len(bars)}" width="100%" role="img" font-size="15">{"".join(drawn)}</svg>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="n"' if index else ""
        return f"<{tag}{kind}>{_e(text)}</{tag}>"

    top = "".join(cell("th", i, text) for i, text in enumerate(head))
    body = "".join(f"<tr>{''.join(cell('td', i, text) for i, text in enumerate(row))}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _e(text: str) -> str:
    return html.escape(str(text))
