"""Parts of torch that Lightning replaces. API: ``lightning.pytorch.overrides``."""
