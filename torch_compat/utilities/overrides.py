"""Overrides: the members of a plugin that are the user's own, and not ours."""

from __future__ import annotations

from typing import Any

_OURS = "torch_compat."


def overrides(owner: Any, name: str) -> bool:
    """Whether ``owner`` (any plugin, strategy or accelerator object) has a member ``name`` that no class of ours defines.

    Members that nobody overrides cost nothing in a run: the loops call only those for which this is true. Unlike a comparison
    with one base class it holds at every depth of our own hierarchy.
    """
    if owner is None:
        return False
    if callable(getattr(owner, "__dict__", {}).get(name)):
        return True
    definer = next((kind for kind in type(owner).__mro__ if name in kind.__dict__), None)
    return definer is not None and definer is not object and not definer.__module__.startswith(_OURS)


def overridden(owner: Any, *names: str) -> tuple[str, ...]:
    """The members of ``names`` that ``owner`` overrides."""
    return tuple(name for name in names if overrides(owner, name))


def require(owner: Any, names: tuple[str, ...], what: str, role: str) -> None:
    """Refuse a plugin that lacks members which its role has no default for.

    Args:
        owner: the object that the user gave.
        names: the members.
        what: the argument it was given as.
        role: what it was given as, with its era: ``"Accelerator (Lightning 2.x)"``.

    Raises:
        TypeError: lists what is missing.
    """
    if missing := [name for name in names if not overrides(owner, name)]:
        raise TypeError(
            f"{what}: {type(owner).__qualname__} is used as {role}, which must implement {', '.join(names)}; "
            f"it lacks {', '.join(missing)}"
        )
