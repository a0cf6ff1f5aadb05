"""The host that a process runs on: its memory, and the environment that libtpu reads."""
