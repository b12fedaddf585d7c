"""Lets a command take its options in groups: dataclasses whose fields Typer sees one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from typer.models import OptionInfo

__all__ = ["spread"]


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Lets a command declare parameters that are dataclasses, as above; Typer sees their fields.

    Fields of the groups come first, in their order, then the command's own options.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {n: t for n, t in hints.items() if isinstance(t, type) and is_dataclass(t)}
    parameters: list[inspect.Parameter] = []
    for group in groups.values():
        types = get_type_hints(group, include_extras=True)
        for f in fields(group):
            assert f.default is not MISSING
            for option in getattr(types[f.name], "__metadata__", ()):
                if not isinstance(option, OptionInfo):
                    continue
                option.rich_help_panel = option.rich_help_panel or getattr(group, "PANEL", None)
            parameters.append(
                inspect.Parameter(
                    f.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=f.default,
                    annotation=types[f.name],
                )
            )
    for name, p in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(
                p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            )

    def flat(**values: Any) -> None:
        made = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)})
            for name, group in groups.items()
        }
        command(**made, **values)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat
