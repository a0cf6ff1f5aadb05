"""Errors of preflight."""

from torch_compat.utilities.exceptions import MisconfigurationException


class PreflightError(MisconfigurationException):
    """A script or a module that cannot be examined without running it."""
