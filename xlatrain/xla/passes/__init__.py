"""Rewrites of a step's jaxpr, each around something that XLA does wrongly or slowly, and the jaxlib releases that need each.

``tests/xlatrain/xla/passes/test_faults.py`` shows each fault in a program without the pass, and fails where XLA has mended it:
then the release goes into :data:`MENDED_IN`; the pass itself goes once no supported release needs it.
"""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

MENDED_IN: dict[str, str | None] = {
    "batch_groups": None,
    "gathering": None,
    "16-bit gathering": None,
    "ordering": None,
    "reduce_scatters": None,
}
"""Pass → the first release of jaxlib that does without; None: none is known, so that all that are newer than tested get it."""


def is_needed(name: str, release: str | None = None) -> bool:
    """Whether jaxlib's ``release``, by default the installed one, has the fault that pass ``name`` is there for."""
    mended = MENDED_IN[name]
    return mended is None or Version(release or version("jaxlib")) < Version(mended)
