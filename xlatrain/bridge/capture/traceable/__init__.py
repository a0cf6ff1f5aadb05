"""Traceable forms of torch functions that use values on the host: each module replaces one of them during a capture."""
