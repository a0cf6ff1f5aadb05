"""Rewrites of a step's jaxpr, each around something that XLA does wrongly or slowly."""
