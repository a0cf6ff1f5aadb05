"""Drills: files, messages, signals and users that mean harm, or have had an accident. `make hostile` runs the long form."""
