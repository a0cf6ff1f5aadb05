"""PyTorch as ``xlatrain doctor`` sees it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xlatrain.doctor import Examination, Finding
from xlatrain.supported import how_to_install


def check_torch(examination: Examination) -> Iterator[Finding]:
    """CUDA that torch sees and JAX does not drive: the Trainer refuses to run on the CPU silently then."""
    if not torch.cuda.is_available() or examination.probe.get("platform") == "gpu":
        return
    if any(finding.topic == "cuda" for finding in examination.findings):
        return  # said already, from the driver's side
    yield Finding(
        "fault",
        "cuda",
        f"torch {torch.__version__} sees {torch.cuda.device_count()} GPU(s), JAX does not",
        f"{how_to_install('cuda')}; or pass Trainer(accelerator='cpu')",
    )
