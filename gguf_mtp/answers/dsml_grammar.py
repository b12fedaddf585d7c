"""A grammar for calls in DSML (`chat.dsml`): every argument stands between tags of its own.

Text is written as it is, so what a schema says of it beyond a list of values cannot be enforced:
with `strict` that is an error. Parameters come in the schema's order, like properties in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gguf_mtp.answers.dsml_schema import Arguments, ToolSchema
from gguf_mtp.chat.dsml import CALL, CALL_END, DSML, PARAMETER, PARAMETER_END, Dsml
from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.json_schema import compile_schema, json_rule
from gguf_mtp.grammar.matching import Grammars, quoted

__all__ = ["TEXT", "call_rule", "calls_rule"]

TEXT = """text: (PLAIN | LESS)*
PLAIN: /[^<]+/
LESS: /(<+\\/)*<+[^<\\/]|(<+\\/)+[^<｜]/"""
"""Whatever holds no `</｜`, which ends an argument: what may be its beginning is read to where it
is none."""
_TEXT_END = "/<*(<+\\/)+/"
"""What of an argument's end is text, and the first two characters of the end itself."""


def _spelled(grammars: Grammars, text: str) -> str:
    return grammars.spelled(text, (DSML,))


def calls_rule(
    grammars: Grammars, fmt: Dsml, heads: list[str], is_single: bool, begins: str
) -> str:
    """Lark for calls, one of `heads` each. `begins`: what of the opening is not there yet, "all",
    "tag" (all but the first `<`) or "nothing"."""
    any_call = f"({' | '.join(heads)})"
    next_call = _spelled(grammars, CALL)
    more = "" if is_single else f" ({next_call} {any_call})*"
    body = f"{any_call}{more} {_spelled(grammars, fmt.calls_end)}"
    whole = fmt.opening(None)
    opening = {"all": whole, "tag": whole.removeprefix("\n\n<"), "nothing": ""}[begins]
    return f"{_spelled(grammars, opening)} {body}".strip()


def call_rule(grammars: Grammars, index: int, function: Mapping[str, Any], head: str) -> str:
    """Rules for the call of one tool, `call_INDEX` the first: behind `head`, its parameters.

    Raises `RequestError` with the part of the schema that cannot be enforced.
    """
    field = f"tools[{index}].function.parameters"
    schema = dict(function.get("parameters") or {})
    strict = function.get("strict") is True
    try:
        if "object" not in _types(schema):
            raise RequestError("at /type: it must be an object")
        compile_schema(grammars, schema, not strict)
        tool = _Tool(grammars, ToolSchema(schema), index, strict)
        bodies = [tool.body(i, one) for i, one in enumerate(tool.schema.alternatives(strict))]
    except RequestError as error:
        raise RequestError(f"{field}: {error}") from None
    end = _spelled(grammars, f"{CALL_END}\n")
    body = " | ".join(f"({one})" if one else '""' for one in bodies)
    start = _spelled(grammars, head) if head else ""
    call = f'call_{index}: {start} ({body}) "\\n"? {end}'
    return "\n".join([call, *tool.rules])


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    kinds = schema.get("type", "object")
    return [kinds] if isinstance(kinds, str) else kinds


class _Tool:
    """Rules for the arguments of one tool."""

    def __init__(self, grammars: Grammars, schema: ToolSchema, index: int, strict: bool) -> None:
        self.schema = schema
        self.rules: list[str] = []
        self._grammars, self._index, self._strict = grammars, index, strict

    def body(self, alternative: int, arguments: Arguments) -> str:
        """One set of arguments, in the schema's order."""
        parts = []
        for i, (name, schema) in enumerate(arguments.named.items()):
            rule = f"parameter_{self._index}_{alternative}_{i}"
            forms = " | ".join(self._forms(name, schema))
            if forms:
                self.rules.append(f"{rule}: {forms}")
                parts.append(rule + ("" if name in arguments.required else "?"))
            elif name in arguments.required:
                raise RequestError(f"at /properties/{name}: nothing can follow it")
        more = arguments.more
        is_open = more not in (None, False) or (more is None and not self._strict)
        if not arguments.named and is_open:
            rule = f"parameter_{self._index}_{alternative}"
            forms = " | ".join(self._forms(None, True if more is None else more))
            self.rules.append(f"{rule}: {forms}")
            parts.append(f"{rule}*")
        return " ".join(parts)

    def _forms(self, name: str | None, schema: Any) -> Iterator[str]:
        """As text and as JSON, as far as the schema admits either; of any name without one."""
        texts, end = self.schema.texts(schema), _spelled(self._grammars, f"{PARAMETER_END}\n")
        if texts and texts.unbound and self._strict:
            raise RequestError(
                f"at /properties/{name}: DSML cannot enforce it, as {texts.unbound} is said of text"
            )
        if texts.any:
            rest = _spelled(self._grammars, f"{PARAMETER_END}\n".removeprefix("</"))
            yield f"{self._tag(name, 'true')} text {_TEXT_END} {rest}"
        elif texts:
            listed = " | ".join(map(quoted, texts.values))
            yield f"{self._tag(name, 'true')} ({listed}) {end}"
        if self.schema.admits_json(schema):
            value = json_rule(self.schema.alone(schema), not self._strict)
            yield f"{self._tag(name, 'false')} {value} {end}"

    def _tag(self, name: str | None, is_text: str) -> str:
        rest = f'" string="{is_text}">'
        if name is None:
            return f'{_spelled(self._grammars, PARAMETER)} /[^"\\n]+/ {quoted(rest)}'
        if '"' in name:
            raise RequestError(f"the property {name!r} cannot be named in DSML")
        return _spelled(self._grammars, f"{PARAMETER}{name}{rest}")
