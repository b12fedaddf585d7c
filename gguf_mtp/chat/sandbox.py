"""A Jinja environment for templates from strangers, bounded in what a rendering may take.

jinja2's sandbox keeps a template from reaching Python. It does not keep it from running for ever or
from filling memory: loops, macros, repeated and formatted strings are counted here, and refused
beyond a budget that grows with what the template was given.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment

__all__ = ["MOST_SOURCE", "BoundedEnvironment"]

MOST_SOURCE = 1 << 19
"""Characters of a template; official ones have up to 30,000."""
STEPS, LETTERS = 1_000_000, 1 << 24
"""Rounds of loops in a rendering; characters that it may make, on the way too."""
CALL = 40
"""The rounds that a call stands for."""
MOST_BITS = 1 << 13
"""Of a number."""
STEPS_PER_LETTER, LETTERS_PER_LETTER = 10, 20
"""More of both for each character that the template was given."""
MOST_WIDTH = 10_000
"""The largest number a text may be filled up, indented or repeated by through a function."""
_WIDE = re.compile(r"\d{5}|\*")
_MAKERS = frozenset(["center", "expandtabs", "join", "ljust", "replace", "rjust", "zfill"])
_GROWERS = frozenset(["append", "extend", "insert"])
_LEFT_OUT = ("pprint", "random", "striptags", "urlize", "xmlattr")
"""Filters that no chat needs, and whose work cannot be told beforehand."""


class _Budget(threading.local):
    steps = STEPS
    letters = LETTERS


class BoundedEnvironment(SandboxedEnvironment):
    """Renders within `allowed`; beyond it, and for what cannot be bounded, `SecurityError`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._budget = _Budget()
        del self.globals["lipsum"]
        for name in _LEFT_OUT:
            del self.filters[name]
        for name in ("center", "format", "indent", "join", "replace", "wordwrap"):
            self.filters[name] = _checked(self, name, self.filters[name])

    @contextmanager
    def allowed(self, given: Any) -> Iterator[None]:
        """One rendering of `given`, in this thread."""
        size = _size(given)
        self._budget.steps = STEPS + STEPS_PER_LETTER * size
        self._budget.letters = LETTERS + LETTERS_PER_LETTER * size
        yield

    def step(self, n: int = 1) -> None:
        self._budget.steps -= n
        if self._budget.steps < 0:
            raise SecurityError("it takes too many steps")

    def make(self, n_letters: int) -> None:
        self._budget.letters -= n_letters
        if self._budget.letters < 0:
            raise SecurityError("it makes too long a text")

    # -- what the compiled template calls --------------------------------------------------------

    def concat(self, parts: Iterable[str]) -> str:
        return self.joined(parts)

    def joined(self, parts: Iterable[Any]) -> str:
        found = []
        for part in parts:
            found.append(str(part))
            self.make(len(found[-1]))
        return "".join(found)

    def counted(self, items: Any) -> Any:
        return _Counted(self, items)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            self.check_number(left, right, n_times=right)
        elif operator == "*":
            self.check_number(left, right, n_times=1)
            self.make(_product(left, right))
        elif operator == "+":
            self.make(_length(left) + _length(right))
        elif isinstance(left, str):
            self.check_format(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.step(CALL)
        name, owner = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if isinstance(owner, str) and name in _MAKERS:
            self.check_made(name, owner, *args, *kwargs.values())
        elif isinstance(owner, list) and name in _GROWERS:
            self.make(_length(owner) + sum(map(_length, args)))
        return super().call(context, obj, *args, **kwargs)

    def check_number(self, left: Any, right: Any, n_times: Any) -> None:
        """Of whole numbers; others are bounded by themselves."""
        if isinstance(left, int) and isinstance(right, int):
            n_bits = left.bit_length() * max(n_times, 1) + right.bit_length()
            if n_bits > MOST_BITS:
                raise SecurityError("it computes too large a number")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        own = super().wrap_str_format(value)
        if own is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            self.check_format(value.__self__, (args, kwargs))
            return own(*args, **kwargs)

        return checked

    def check_made(self, name: str, text: Any, *args: Any) -> None:
        """What a function that makes a text of `text` would make."""
        for arg in args:
            if isinstance(arg, int) and abs(arg) > MOST_WIDTH:
                raise SecurityError(f"{name} is called with {arg}")
        if name == "format":
            self.check_format(str(text), args)
        elif name == "replace" and len(args) >= 2:
            text = str(text)
            n = text.count(str(args[0])) if args[0] else len(text) + 1
            self.make(len(text) + n * len(str(args[1])))
        elif name == "indent":
            self.make(len(str(text)) + str(text).count("\n") * MOST_WIDTH)
        elif name == "join" and isinstance(text, str) and args:
            self.make(len(text) * _length(args[0]) + _size(args[0]))
        else:
            self.make(_size(text) + MOST_WIDTH)

    def check_format(self, form: str, values: Any) -> None:
        if _WIDE.search(form):
            raise SecurityError(f"it formats a text with {form[:40]!r}")
        self.make(len(form) + _size(values) * (form.count("%") + form.count("{")))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _call("counted", loop.iter)  # type: ignore[arg-type]
        _replace_concats(tree)
        return tree


class _Counted:
    """Items of a loop, each of which is a step."""

    def __init__(self, env: BoundedEnvironment, items: Any) -> None:
        self._env, self._items = env, items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._env.step()
            yield item

    def __len__(self) -> int:
        return len(self._items)


def _checked(env: BoundedEnvironment, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that says what it would make before it does."""
    passed = getattr(own, "jinja_pass_arg", None)

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if passed is not None else args
        if name == "join":  # the list comes first, and may be an iterator
            items = list(given[0])
            separator = str(given[1]) if len(given) > 1 else str(kwargs.get("d", ""))
            env.check_made("join", separator, items)
            first = (args[0], items) if passed is not None else (items,)
            return own(*first, *given[1:], **kwargs)
        env.check_made(name, *given, *kwargs.values())
        return own(*args, **kwargs)

    if passed is not None:
        checked.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return checked


def _replace_concats(node: nodes.Node) -> None:
    """`a ~ b` becomes a call, so that it is counted."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_counted_concat(item) for item in value]
        else:
            setattr(node, field, _counted_concat(value))
    for child in node.iter_child_nodes():
        _replace_concats(child)


def _counted_concat(value: Any) -> Any:
    if not isinstance(value, nodes.Concat):
        return value
    return _call("joined", nodes.List(value.nodes, lineno=value.lineno))


def _call(name: str, arg: nodes.Expr) -> nodes.Call:
    line = arg.lineno
    function = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(function, [arg], [], None, None, lineno=line)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1


def _product(left: Any, right: Any) -> int:
    for text, n in ((left, right), (right, left)):
        if isinstance(n, int) and isinstance(text, Sequence):
            return len(text) * max(n, 0)
    return _length(left) + _length(right)


def _size(value: Any) -> int:
    """Characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(item) + 1 for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sum(_size(item) + 1 for item in value)
    return 1
