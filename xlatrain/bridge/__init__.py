"""The bridge from a PyTorch step to a JAX function: PyTorch captures, JAX lowers. Only here ``xlatrain`` imports torch."""

import torch

from xlatrain.supported import TORCH

TORCH.check(torch.__version__)
