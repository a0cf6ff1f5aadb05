"""Serving a module. API: ``lightning.pytorch.serve``."""

from torch_compat.serve.servable_module import ServableModule
from torch_compat.serve.servable_module_validator import ServableModuleValidator

__all__ = ["ServableModule", "ServableModuleValidator"]
