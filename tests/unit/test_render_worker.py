"""A template that runs for ever or fills memory ends in a sentence; the next one renders."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gguf_mtp.chat import render_worker
from gguf_mtp.chat.template import TemplateOptions, render
from gguf_mtp.errors import RequestError

DOUBLING = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
ENDLESS = {
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "macros that call twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for i in [range(99999)] * 99999 recursive %}{{ loop(i) if i is iterable"
    " }}{% endfor %}",
    "sums of sums": "{{ ([range(99999)] * 99999) | map('sum') | sum }}",
    "lists of lists": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}"
    "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l == ns.l | list }}{{ '%s' % ns.l }}",
}
LARGE = {
    "a repeated text": "{{ 'a' * 30000000000 }}",
    "a power": "{{ (10 ** (10 ** 7)) * (10 ** (10 ** 7)) * (10 ** (10 ** 8)) }}",
    "doubling": DOUBLING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by a block": DOUBLING + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "a list that grows": "{% set l = [1, 2] %}{% for i in range(60) %}{{ l.extend(l) }}"
    "{% endfor %}",
    "many long texts": "{% set t = 'a' * 1000000 %}{% set l = [] %}{% for i in range(99999) %}"
    "{{ l.append(t ~ i) }}{% endfor %}",
    "a wide text": "{{ 'a'.center(3000000000) }}",
    "a wide format": "{{ '{:{}}'.format('x', 3000000000) }}",
    "wide bytes": "{{ (1).to_bytes(3000000000, 'big') }}",
    "a batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "a long join": "{{ range(99999) | join('a' * 100000) }}",
}


def said(template: str, **extra: Any) -> str:
    options = TemplateOptions(extra=extra)
    return render(template, [{"role": "user", "content": "Hi"}], "", "", options).text


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded by the kernel's limits")
@pytest.mark.parametrize("name", ENDLESS | LARGE)
def test_a_template_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever bound it meets first on this machine."""
    monkeypatch.setattr(render_worker, "SECONDS", 1.0)
    with pytest.raises(RequestError, match="the model's chat template") as caught:
        said((ENDLESS | LARGE)[name])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
    monkeypatch.undo()
    assert said("{{ messages[0].content }}") == "Hi"


def test_what_was_too_much_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_worker, "SECONDS", 0.5)
    with pytest.raises(RequestError, match=r"does not end within 0 s; --chat-template takes"):
        said(ENDLESS["nested ranges"])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '**%s**' | format('x') }}{{ 'id 12345: %s' % 1 }}", "**x**id 12345: 1"),
        ("{% for i in range(2500) %}{{ ('a' * 40) | indent(4) }}{% endfor %}", "a" * 100_000),
        ("{{ 'a'.ljust(3) }}{{ '{} {x}'.format(1, x=2) }}{{ ','.join(['a', 'b']) }}", "a  1 2a,b"),
        ("{% for a in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
         "{% endfor %}", "1/3,2/3,3/3"),
        ("{{ '{\"a\": [1]}' | from_json | tojson }}", '{"a": [1]}'),
        ("{{ 'é\\ud800' | length }}", "2"),
    ],
)  # fmt: skip
def test_what_chats_need_is_rendered(template: str, text: str) -> None:
    assert said(template) == text


def test_a_long_conversation_that_is_put_together() -> None:
    """A template that appends to a text of its own copies it at every message."""
    template = (
        "{% set ns = namespace(s='') %}{% for m in messages %}"
        "{% set ns.s = ns.s + '<|' + m.role + '|>' + m.content %}{% endfor %}{{ ns.s }}"
    )
    messages = [{"role": "user", "content": "word " * 100}] * 2_000
    assert len(render(template, messages, "", "").text) == 2_000 * 508


def test_several_threads_share_the_process() -> None:
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        found[i] = said("{{ number }}", number=i)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: str(i) for i in range(20)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_fork_has_a_process_of_its_own() -> None:
    assert said("{{ 1 }}") == "1"
    child = os.fork()
    if child == 0:
        os._exit(0 if said("{{ 2 }}") == "2" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert said("{{ 3 }}") == "3"


def test_the_current_folder_is_no_place_for_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A downloaded model's folder may hold a jinja2.py."""
    for name in ("jinja2", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text("open('/dev/null'); raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(render_worker, "_worker", render_worker._Worker())
    assert said("{{ 1 }}") == "1"
    render_worker._worker.end()


def test_variables_that_are_no_json_are_refused() -> None:
    with pytest.raises(RequestError, match="must be JSON"):
        said("{{ 1 }}", thing=object())
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(RequestError, match="must be JSON"):
        said("{{ 1 }}", thing=nested)
