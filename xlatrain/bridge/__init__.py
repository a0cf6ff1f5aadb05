"""From a PyTorch step to a JAX function: PyTorch captures, JAX lowers. The only part of ``xlatrain`` that imports torch."""

import torch

from xlatrain.supported import TORCH

TORCH.check(torch.__version__)
