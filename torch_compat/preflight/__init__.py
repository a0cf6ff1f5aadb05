"""Preflight of a LightningModule: prove without a pod that a run fits one, and what it will do there.

``xlatrain preflight --topology v5e:16x16 script.py``, ``Trainer(…).preflight(module, topology="v5e:16x16")``, and
:func:`preflight`. The engine of it, which knows nothing of Lightning, is :mod:`xlatrain.preflight`.
"""

from torch_compat.preflight.api import preflight
from torch_compat.preflight.errors import PreflightError

__all__ = ["PreflightError", "preflight"]
