"""Small models and data for tests, bug reports and demonstrations (``lightning.pytorch.demos``)."""
