"""The checks of ``xlatrain doctor``: versions, devices, environment, storage; each check gives findings.

A package above the engine adds checks of its own as entry points of the group ``xlatrain.checks``: functions from a
:class:`~xlatrain.doctor.examination.Examination` to findings.
"""

from __future__ import annotations

from xlatrain.doctor.examination import Examination, examine
from xlatrain.doctor.finding import Finding

__all__ = ["Examination", "Finding", "examine"]
