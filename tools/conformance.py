"""Whether the documented plugin classes of all eras are there, member by member, with the documented signatures.

``python -m tools.conformance`` prints the report.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import Any

from tools.documented_api import DOCUMENTED_CLASSES, DocumentedClass
from torch_compat.stock_names.aliases import module_behind


@dataclass(frozen=True)
class Finding:
    """The finding about a member of a class.

    Attributes:
        path: the class.
        member: as documented.
        documented: whether the page of the class lists it.
        problem: what is wrong; None: nothing.
    """

    path: str
    member: str
    documented: bool
    problem: str | None


def findings() -> list[Finding]:
    """Every member of every documented class, constructors and abstract members included."""
    return [finding for api in DOCUMENTED_CLASSES for finding in _of_class(api)]


def resolve(path: str) -> Any:
    """Our class behind a documented import path, found as ``torch_compat.install()`` lets scripts find it."""
    module, _, name = path.rpartition(".")
    return getattr(module_behind(module), name)


def _of_class(api: DocumentedClass) -> list[Finding]:
    kind = resolve(api.path)
    found = [Finding(api.path, member, True, _problem(kind, member)) for member in api.documented]
    found += [Finding(api.path, member, False, _problem(kind, member)) for member in api.further]
    if api.constructor:
        found.append(Finding(api.path, f"__init__({api.constructor})", False, _problem(kind, f"__init__({api.constructor})")))
    concrete = [
        name for name in api.abstract if not getattr(inspect.getattr_static(kind, name, None), "__isabstractmethod__", False)
    ]
    if concrete:
        found.append(Finding(api.path, "abstract members", False, f"not abstract: {', '.join(concrete)}"))
    return found


def _problem(kind: type, documented: str) -> str | None:
    name = documented.partition("(")[0]
    member = inspect.getattr_static(kind, name, None)
    if member is None:
        return "is missing"
    is_property = isinstance(member, property)
    if "(" not in documented:
        return None if is_property else "is documented as a property"
    if is_property:
        return "is documented as a method, but it is a property"
    function = inspect.unwrap(member.__func__ if isinstance(member, (staticmethod, classmethod)) else member)
    ours = list(inspect.signature(function).parameters.values())
    if not isinstance(member, staticmethod):
        ours = ours[1:]
    return _signature_problem(ours, _parameters(documented))


def _parameters(documented: str) -> list[tuple[str, str, str | None]]:
    """``(kind, name, default)`` of each documented parameter; kinds are ``""``, ``"*"`` and ``"**"``."""
    arguments = ast.parse(f"def {documented}: ...").body[0].args  # pyright: ignore[reportAttributeAccessIssue]
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + [ast.unparse(default) for default in arguments.defaults]
    found: list[tuple[str, str, str | None]] = [("", arg.arg, default) for arg, default in zip(plain, defaults, strict=True)]
    found += [("*", arguments.vararg.arg, None)] if arguments.vararg else []
    found += [("**", arguments.kwarg.arg, None)] if arguments.kwarg else []
    return found


def _signature_problem(ours: list[inspect.Parameter], documented: list[tuple[str, str, str | None]]) -> str | None:
    """A call that the page allows and that is wrong here; None for none. Ours may have more defaults and options."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    positional = [parameter for parameter in ours if parameter.kind not in stars]
    by_star = {stars[parameter.kind]: parameter for parameter in ours if parameter.kind in stars}
    index = 0
    for kind, name, default in documented:
        if kind:
            if kind not in by_star:
                return f"does not take {kind}{name}"
            continue
        if index >= len(positional):
            if "*" in by_star and "**" in by_star:
                continue  # taken by *args and **kwargs
            return f"does not take {name}"
        parameter, index = positional[index], index + 1
        if parameter.name != name:
            return f"has {parameter.name} where the page has {name}"
        if default is not None and not _same_default(parameter.default, default):
            return f"has {name}={parameter.default!r} where the page has {default}"
    if required := [p.name for p in positional[index:] if p.default is inspect.Parameter.empty]:
        return f"needs {', '.join(required)}, of which the page knows nothing"
    return None


def _same_default(ours: Any, documented: str) -> bool:
    if ours is inspect.Parameter.empty:
        return False
    if "." in documented and not documented.replace(".", "").isdigit():
        return getattr(ours, "name", None) == documented.rpartition(".")[2]
    return ours == ast.literal_eval(documented)


def report() -> list[str]:
    """The report, one line for each class and for each problem."""
    found = findings()
    lines = []
    for api in DOCUMENTED_CLASSES:
        own = [finding for finding in found if finding.path == api.path and finding.documented]
        lines.append(f"{sum(f.problem is None for f in own):3} of {len(own):3}  {api.path} ({api.era})")
    lines += [f"{f.path}.{f.member}: {f.problem}" for f in found if f.problem is not None]
    good = [finding for finding in found if finding.documented and finding.problem is None]
    lines.append(f"{len(good)} of {sum(f.documented for f in found)} documented members")
    further = [finding for finding in found if not finding.documented]
    lines.append(f"{sum(f.problem is None for f in further)} of {len(further)} further members")
    return lines


if __name__ == "__main__":
    print("\n".join(report()))
