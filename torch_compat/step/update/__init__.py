"""Parts of an update: its plan, the hooks and plugins around it, schedulers, several optimizers."""
