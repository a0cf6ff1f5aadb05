"""Plugins of the Trainer. API: ``lightning.pytorch.plugins``."""
