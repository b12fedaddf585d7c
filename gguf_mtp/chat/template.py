"""Chat messages to a prompt, by the model's own template.

Templates come with model files from strangers, so they run in jinja2's sandbox, which lets them
reach no attribute with an underscore, and in a process of their own (`render_worker`), which bounds
their time and memory. They may change lists of their own, as Kimi-K2's does, and get copies of what
is ours. The environment is the one that templates are written for, transformers'
(`utils/chat_template_utils.py`): trimmed blocks, `break` and `continue`, `tojson` without HTML
escapes, `raise_exception`, `strftime_now`, `generation` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from gguf_mtp.chat.render_worker import render_apart
from gguf_mtp.errors import RequestError

__all__ = ["Prompt", "TemplateOptions", "render", "render_here"]


class Prompt(NamedTuple):
    """`text` is to be tokenised with special tokens parsed; a BOS is added unless `has_bos`."""

    text: str
    has_bos: bool


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a template may be told besides the messages.

    `tools`: function descriptions as in an OpenAI request. `extra`: more variables a model's own
    template reads, such as `thinking`.
    """

    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    bos: str,
    eos: str,
    options: TemplateOptions | None = None,
) -> Prompt:
    """The prompt for `messages`, ready for the assistant's turn.

    Raises `RequestError` when there is no template, or when it is malformed, refuses the messages
    or tries what the sandbox forbids.
    """
    if not template:
        raise RequestError("the model has no chat template; use `gguf-mtp run --raw` with a prompt")
    options = options or TemplateOptions()
    request = {
        "template": template,
        "given": dict(options.extra)
        | {
            "messages": list(messages),
            "tools": options.tools,
            "bos_token": bos,
            "eos_token": eos,
            "add_generation_prompt": options.add_generation_prompt,
        },
    }
    text = render_apart(request)
    return Prompt(text, has_bos=bool(bos) and text.startswith(bos))


def render_here(template: str, given: Mapping[str, Any]) -> str:
    """What a template makes of its variables, in this process: its time and memory are its own.

    Raises `RequestError` as `render`.
    """
    try:
        return _compiled(template).render(given)
    except _Refused as error:
        raise RequestError(f"the model's chat template refused the messages: {error}") from None
    except SecurityError as error:
        raise RequestError(f"the model's chat template is unsafe: {_line(error)}") from error
    except jinja2.TemplateSyntaxError as error:
        where = f"line {error.lineno}: {_line(error)}"
        raise RequestError(f"the model's chat template is malformed, {where}") from error
    except MemoryError:
        raise RequestError("the model's chat template needs too much memory") from None
    except Exception as error:  # a template is a program: it can fail in any way
        raise RequestError(f"the model's chat template failed: {_line(error)}") from error


class _Refused(Exception):
    """The template called `raise_exception`."""


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


@lru_cache(maxsize=8)  # compiling takes many times as long as rendering
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> jinja2.Environment:
    env = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    env.filters["tojson"] = _to_json
    env.filters["from_json"] = json.loads  # llama.cpp's
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = _now
    return env


def _refuse(message: object) -> NoReturn:
    raise _Refused(" ".join(str(message).split()))


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes `<`, `>`, `&`, `'` for HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> list[Any]:
    """What filters such as `map` and `select` give is JSON's list."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks words for training: no effect here."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
