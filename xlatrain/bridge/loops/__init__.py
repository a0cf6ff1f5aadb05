"""Repeated layers of a captured graph, rolled up into loops."""
