"""The way from a user's step to pure functions: batches, effects, host scalars, guards and optimizers."""
