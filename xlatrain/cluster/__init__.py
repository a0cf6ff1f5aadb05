"""Processes of one run: how they start, meet, watch each other and end."""
