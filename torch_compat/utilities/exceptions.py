"""Exceptions of the facade, with the names of ``lightning.pytorch.utilities.exceptions``."""

from __future__ import annotations


class MisconfigurationException(Exception):
    """A Trainer, a module or a data module is set up in a way that cannot work."""


class ArgumentValueError(MisconfigurationException, ValueError):
    """An argument whose value cannot be: caught by ``except ValueError``, as in stock, and as a misconfiguration."""


class ArgumentTypeError(MisconfigurationException, TypeError):
    """An argument of a wrong kind: caught by ``except TypeError``, as in stock, and as a misconfiguration."""


class MissingKeyError(MisconfigurationException, KeyError):
    """A dict of the user's lacks an entry: caught by ``except KeyError``, as in stock, and as a misconfiguration."""

    __str__ = Exception.__str__


class SetupRuntimeError(MisconfigurationException, RuntimeError):
    """A run cannot work as it is set up: caught by ``except RuntimeError``, as in stock, and as a misconfiguration."""


class SIGTERMException(SystemExit):
    """Raised in the main thread after SIGTERM, so that checkpoints and loggers are closed before the process ends."""


class _TunerExitException(Exception):
    """Leaves a fit early, on behalf of a tuner."""
