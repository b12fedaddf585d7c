from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

import gguf_mtp
from gguf_mtp.chat.template import Prompt, TemplateOptions, render, render_here
from gguf_mtp.errors import RequestError

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
HELLO = [{"role": "user", "content": "Hello"}]


def text(template: str, **options: object) -> str:
    return render(template, HELLO, BOS, EOS, TemplateOptions(extra=options)).text


def demo_template() -> str:
    checkpoint = Path(gguf_mtp.__file__).parent / "demo" / "checkpoint"
    config = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    template: str = config["chat_template"]
    return template


def test_the_demo_template_renders_a_conversation() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    prompt = render(demo_template(), messages, BOS, EOS)
    assert prompt == Prompt(
        f"{BOS}Be brief.<｜User｜>Hi<｜Assistant｜>Hello!{EOS}<｜User｜>Bye<｜Assistant｜>",
        has_bos=True,
    )
    options = TemplateOptions(add_generation_prompt=False)
    assert render(demo_template(), messages, BOS, EOS, options).text.endswith("<｜User｜>Bye")


def test_bos_is_reported_only_where_the_template_writes_it_first() -> None:
    assert not render("{{ messages[0].content }}", HELLO, BOS, EOS).has_bos
    assert not render("x{{ bos_token }}", HELLO, BOS, EOS).has_bos
    assert render("{{ bos_token }}x", HELLO, BOS, EOS).has_bos
    assert not render("{{ bos_token }}x", HELLO, "", EOS).has_bos  # a vocabulary without BOS


def test_blocks_are_trimmed_as_transformers_does() -> None:
    template = (
        "{% for m in messages %}\n  {% if true %}\n {{ m.role }}\n  {% endif %}\n{% endfor %}\n"
    )
    assert text(template) == " user\n"


def test_tojson_escapes_nothing_for_html() -> None:
    assert text("{{ x | tojson }}", x={"a": "<é & 'b'>"}) == '{"a": "<é & \'b\'>"}'
    assert text("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"
    assert text("{{ x | tojson(sort_keys=true, separators=(',', ':')) }}", x={"b": 1, "a": 2}) == (
        '{"a":2,"b":1}'
    )
    assert text("{{ x | tojson(ensure_ascii=true) }}", x="é") == '"\\u00e9"'


def test_loop_controls_and_generation_blocks() -> None:
    skips = "{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}"
    assert text("{% for i in [1, 2, 3, 4] %}" + skips + "{{ i }}{% endfor %}") == "13"
    assert text("a{% generation %}{{ x }}{% endgeneration %}b", x="-") == "a-b"


def test_the_date_is_todays() -> None:
    before, shown, after = datetime.now(), text("{{ strftime_now('%Y-%m-%d') }}"), datetime.now()
    assert shown in (before.strftime("%Y-%m-%d"), after.strftime("%Y-%m-%d"))


def test_tools_and_extra_variables_reach_the_template() -> None:
    options = TemplateOptions(tools=[{"name": "f"}], extra={"thinking": True, "bos_token": "x"})
    template = "{{ bos_token }}{{ tools[0].name }}{{ thinking }}"
    assert render(template, HELLO, BOS, EOS, options).text == f"{BOS}fTrue"
    assert text("{{ tools is none }}") == "True"


def test_no_template_is_refused_with_a_hint() -> None:
    for absent in (None, ""):
        with pytest.raises(RequestError, match=r"no chat template; use `gguf-mtp run --raw`"):
            render(absent, HELLO, BOS, EOS)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{{ raise_exception('roles must\nalternate') }}",
            "refused the messages: roles must alternate",
        ),
        ("a\n{% if %}", "malformed, line 2: "),
        ("{{ messages[0].content.nothing.more }}", "failed: "),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{{ x | tojson }}", "failed: "),
        ("{% for i in range(1000000000) %}{% endfor %}", "failed: Range too big"),
    ],
)
def test_a_template_that_fails_says_why(template: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        text(template)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ (lipsum | attr('__globals__')).os }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ ('{0.__cla' ~ 'ss__}').format_map({'0': messages}) }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(RequestError, match=r"unsafe|failed"):
        render(template, messages, BOS, EOS)
    assert messages == HELLO


@pytest.mark.parametrize(
    "change",
    ["messages.append(1)", "messages[0].clear()", "tools[0].update({'a': 1})", "x.list.clear()"],
)
def test_a_template_changes_only_its_own_copies(change: str) -> None:
    messages, tools, extra = [{"role": "user", "content": "Hello"}], [{"b": 2}], {"list": [1]}
    options = TemplateOptions(tools=tools, extra={"x": extra})
    render("{%- set _ = " + change + " -%}", messages, BOS, EOS, options)
    assert (messages, tools, extra) == (HELLO, [{"b": 2}], {"list": [1]})


def test_a_template_may_fill_a_list_of_its_own() -> None:
    """Kimi-K2's keeps the messages it will show that way."""
    template = "{% set own = [] %}{% for m in messages %}{% set _ = own.append(m) %}{% endfor %}"
    assert text(template + "{{ own[0].content }}") == "Hello"


def test_json_of_what_a_filter_gives_is_a_list() -> None:
    assert text("{{ messages | map(attribute='role') | tojson }}") == '["user"]'


@pytest.mark.parametrize("value", ["messages.__class__", "raise_exception.__globals__", "x._y"])
def test_private_attributes_are_not_there(value: str) -> None:
    class Private:
        _y = "secret"

    given = {"messages": HELLO, "x": Private()}
    assert render_here("{{ " + value + " }}", given) == ""


def test_a_template_cannot_import_or_read_files() -> None:
    for template in ("{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{{ open('x') }}"):
        with pytest.raises(RequestError):
            text(template)
