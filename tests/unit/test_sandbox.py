"""A template that would run for ever or fill memory ends in a sentence; all others render."""

from __future__ import annotations

import tracemalloc

import pytest

from gguf_mtp.chat.template import render
from gguf_mtp.errors import RequestError

DOUBLING = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
ENDLESS = {
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "loops over a text": "{% set t = 'a' * 9999 %}{% for i in t %}{% for j in t %}{% endfor %}"
    "{% endfor %}",
    "macros that call twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a list that grows": "{% set l = [1, 2] %}{% for i in range(60) %}{{ l.extend(l) }}"
    "{% endfor %}",
    "a recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
}
LARGE = {
    "a repeated text": "{{ 'a' * 3000000000 }}",
    "a repeated list": "{{ [1] * 3000000000 }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "powers of powers": "{% set ns = namespace(x=9999) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling by ~": DOUBLING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by ~ in a call": DOUBLING + "{% set ns.x = (ns.x ~ ns.x) | trim %}{% endfor %}",
    "doubling by +": DOUBLING + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by a block": DOUBLING + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "doubling by a macro": "{% macro two(x) %}{{ x }}{{ x }}{% endmacro %}"
    + DOUBLING
    + "{% set ns.x = two(ns.x) %}{% endfor %}",
    "doubling by replace": DOUBLING + "{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "doubling by the filter": DOUBLING + "{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}",
    "doubling by join": DOUBLING + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "doubling by a text's join": DOUBLING + "{% set ns.x = ''.join([ns.x, ns.x]) %}{% endfor %}",
    "doubling by format": DOUBLING + "{% set ns.x = '%s%s' | format(ns.x, ns.x) %}{% endfor %}",
    "doubling by %": DOUBLING + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubling by a text's format": DOUBLING + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "many long texts": "{% set t = 'a' * 1000000 %}{% set l = [] %}{% for i in range(9999) %}"
    "{{ l.append(t ~ i) }}{% endfor %}",
    "a wide text": "{{ 'a'.center(3000000000) }}",
    "a wide filter": "{{ 'a' | center(3000000000) }}",
    "a wide format": "{{ '%3000000000d' % 1 }}",
    "a wide star": "{{ '%*d' % (3000000000, 1) }}",
    "a wide text's format": "{{ '{:3000000000}'.format(1) }}",
    "wide tabs": "{{ '\t'.expandtabs(3000000000) }}",
    "a wide indent": "{{ 'a\nb' | indent(3000000000) }}",
    "a long join": "{{ range(99999) | join('a' * 100000) }}",
}


def said(template: str) -> str:
    return render(template, [{"role": "user", "content": "Hi"}], "", "").text


@pytest.mark.parametrize("name", ENDLESS | LARGE)
def test_a_template_is_bounded(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="the model's chat template") as caught:
            said((ENDLESS | LARGE)[name])
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(RequestError, match=r"chat template is unsafe: it takes too many steps$"):
        said(ENDLESS["nested ranges"])
    with pytest.raises(RequestError, match=r"is unsafe: it makes too long a text$"):
        said(LARGE["doubling by ~"])
    with pytest.raises(RequestError, match=r"unsafe: it has 600000 characters, more than 524288"):
        said("a" * 600_000)


@pytest.mark.parametrize("name", ["lipsum()", "'a' | urlize", "[1] | random"])
def test_what_no_chat_needs_is_left_out(name: str) -> None:
    with pytest.raises(RequestError, match="the model's chat template"):
        said("{{ " + name + " }}")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for a in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
         "{% endfor %}", "1/3,2/3,3/3"),
        ("{% for a in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for a, b in {'x': 1}.items() %}{{ a ~ b }}{% endfor %}", "x1"),
        ("{% for a in [3, 4] if a > 3 %}{{ a ~ '!' ~ a }}{% endfor %}", "4!4"),
        ("{% for a in missing %}x{% endfor %}", ""),
        ("{{ 'ab' * 3 }}{{ 2 ** 8 }}{{ 7 % 4 }}{{ '%s-%02d' % ('a', 5) }}", "ababab2563a-05"),
        ("{{ [1] + [2] }}{{ 'a,b'.split(',') | join('; ') }}", "[1, 2]a; b"),
        ("{{ 'x' | indent(2, true) }}{{ 'a' | replace('a', 'b') }}{{ '%s' | format(1) }}", "  xb1"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user"),
        ("{{ messages | map(attribute='content') | map('replace', 'H', 'h') | list }}", "['hi']"),
        ("{{ 'a'.ljust(3) }}{{ '{} {x}'.format(1, x=2) }}{{ ','.join(['a', 'b']) }}", "a  1 2a,b"),
        ("{% for a in messages[::-1] %}{{ a.content }}{% endfor %}", "Hi"),
    ],
)  # fmt: skip
def test_what_chats_need_is_as_it_was(template: str, text: str) -> None:
    assert said(template) == text


def test_the_budget_grows_with_the_conversation() -> None:
    """Ten thousand long messages, each looked at more than once."""
    template = (
        "{% for m in messages %}{% for p in m.content.split(' ') %}{{ p ~ ' ' }}{% endfor %}"
        "{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 2_000
    assert len(render(template, messages, "", "").text) > 2_000_000
