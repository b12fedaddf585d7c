"""Tool calls in DSML: read the same whatever the pieces, and bound to their tools' parameters."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gguf_mtp.answers.structured_output import Calls, call_grammar, json_format
from gguf_mtp.chat.conversation import ChatTemplate, Turns
from gguf_mtp.chat.dsml import DSML, Dsml, DsmlParser
from gguf_mtp.chat.tool_calls import CallArguments, CallStart, Content
from gguf_mtp.converters.hyper_template import chat_template
from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.matching import Grammars


def invoke(name: str, *parameters: tuple[str, str, bool]) -> str:
    inner = "".join(
        f'<{DSML}parameter name="{key}" string="{str(is_text).lower()}">{value}</{DSML}parameter>\n'
        for key, value, is_text in parameters
    )
    return f'<{DSML}invoke name="{name}">\n{inner or chr(10)}</{DSML}invoke>\n'


def calls(*invokes: str) -> str:
    return f"\n\n<{DSML}tool_calls>\n{''.join(invokes)}</{DSML}tool_calls>"


def read(pieces: list[str], max_calls: int | None = None) -> tuple[str, list[tuple[str, Any]]]:
    parser = DsmlParser(max_calls)
    events = [event for piece in pieces for event in parser.add(piece)] + parser.finish()
    found: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.number == len(found)
            found.append([event.name, ""])
        elif isinstance(event, CallArguments):
            assert event.number == len(found) - 1
            found[-1][1] += event.text
    text = "".join(event.text for event in events if isinstance(event, Content))
    return text, [(name, arguments) for name, arguments in found]


WHOLE = "Let me look." + calls(
    invoke("look", ("q", 'say "hi"\n</b> <x', True), ("n", "3", False)), invoke("now")
)


def test_calls_do_not_depend_on_the_pieces() -> None:
    rng = random.Random(1)
    cuts = [[1] * len(WHOLE), [len(WHOLE)]]
    cuts += [[rng.randint(1, 9) for _ in WHOLE] for _ in range(30)]
    for sizes in cuts:
        pieces, at = [], 0
        for size in sizes:
            pieces.append(WHOLE[at : at + size])
            at += size
        text, found = read(pieces)
        assert text == "Let me look."
        assert [(name, json.loads(arguments)) for name, arguments in found] == [
            ("look", {"q": 'say "hi"\n</b> <x', "n": 3}),
            ("now", {}),
        ]


def test_text_without_calls_is_text() -> None:
    for text in ("", "a < b", f"<{DSML}tool", "x \n\n", f"{DSML} is a marker"):
        assert read([text]) == (text, [])


def test_one_call_may_be_enough() -> None:
    text, found = read([WHOLE], max_calls=1)
    assert [name for name, _ in found] == ["look"]
    assert text == "Let me look."


def test_a_call_that_was_cut_keeps_what_there_is() -> None:
    cut = WHOLE[: WHOLE.index("</b>")]
    _, [(name, arguments)] = read([cut])
    assert (name, arguments) == ("look", '{"q": "say \\"hi\\"\\n')


def test_what_is_malformed_is_left_out() -> None:
    odd = f'<{DSML}invoke>\n<{DSML}parameter string="true">x</{DSML}parameter>\n'
    assert read([calls(odd, invoke("now"))]) == ("", [("now", "{}")])


@pytest.mark.parametrize("max_calls", [None, 1])
def test_a_call_ends_where_the_next_begins_or_the_block_ends(max_calls: int | None) -> None:
    first = invoke("look", ("q", "x", True)).replace(f"</{DSML}invoke>\n", "")
    text = calls(first, invoke("now").replace(f"</{DSML}invoke>\n", ""))
    both = [("look", '{"q": "x"}'), ("now", "{}")]
    assert read([text], max_calls) == ("", both[:max_calls])
    assert read(list(text), max_calls) == ("", both[:max_calls])


def test_names_may_hold_what_ends_a_tag() -> None:
    _, [(_, arguments)] = read([calls(invoke("look", ("a>b", "x", True)))])
    assert json.loads(arguments) == {"a>b": "x"}


# -- the template --------------------------------------------------------------------------------

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "q": {"type": "string"},
                "n": {"type": "integer"},
                "kind": {"enum": ["web", "news"]},
            },
            "required": ["q"],
        },
    },
}
TEMPLATE = ChatTemplate(chat_template("DeepSeek-V4-Flash"), "<B>", "<E>")


def test_what_the_template_can_do_is_found_out() -> None:
    assert isinstance(TEMPLATE.tool_format, Dsml)
    assert TEMPLATE.can_think


def test_a_conversation_with_tools() -> None:
    call = {"id": "1", "type": "function"}
    call |= {"function": {"name": "look", "arguments": '{"q": "cats", "n": 2}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Cats?"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "1", "content": "two"},
    ]
    prompt = TEMPLATE.prompt(Turns(messages, tools=[LOOK], variables={"thinking": True}))
    head, _, rest = prompt.text.partition("<｜User｜>")
    assert head.startswith("<B>Be kind.\n\n## Tools\n\nYou have access to a set of tools")
    assert json.dumps(LOOK["function"]) in head
    made = calls(invoke("look", ("q", "cats", True), ("n", "2", False)))
    assert rest == (
        f"Cats?<｜Assistant｜><think>Hm.</think>{made}<｜end▁of▁sentence｜>"
        "<｜User｜><tool_result>two</tool_result><｜Assistant｜><think>"
    )
    assert prompt.thinks


def test_a_demanded_call_is_begun_in_the_prompt() -> None:
    asked = Turns([{"role": "user", "content": "Cats?"}], tools=[LOOK], must_call=True)
    prompt = TEMPLATE.prompt(asked)
    assert prompt.text.endswith(f'</think>\n\n<{DSML}tool_calls>\n<{DSML}invoke name="')
    assert read([prompt.begun, f'look">\n</{DSML}invoke>\n</{DSML}tool_calls>'])[1] == [
        ("look", "{}")
    ]


def test_effort_is_said_in_the_words_of_the_release() -> None:
    hi = [{"role": "user", "content": "Hi"}]
    texts = {}
    for name in ("V4-Flash", "V4-Flash-0731"):
        template = ChatTemplate(chat_template(name), "<B>", "<E>")
        for effort in ("low", "high", "max"):
            variables = {"thinking": True, "reasoning_effort": effort}
            texts[name, effort] = template.prompt(Turns(hi, variables=variables)).text
    assert texts["V4-Flash", "low"] == texts["V4-Flash", "high"] == texts["V4-Flash-0731", "low"]
    assert texts["V4-Flash", "max"] == texts["V4-Flash-0731", "high"]
    assert "Beyond maximum" in texts["V4-Flash-0731", "max"]


# -- grammars ------------------------------------------------------------------------------------


class Bytes:
    """Token i < 256 is byte i; then the marker, which has no text, and the end."""

    def tokenize(self, text: str, add_special: bool, parse_special: bool = True) -> list[int]:
        assert not add_special
        parts = text.split(DSML) if parse_special else [text]
        ids = [*parts[0].encode()]
        for part in parts[1:]:
            ids += [256, *part.encode()]
        return ids

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


VOCAB = Bytes()
GRAMMARS = Grammars(VOCAB, 258, frozenset({257}))


def follows(text: str, **options: Any) -> bool:
    """Whether the grammar of calls lets `text` through, to its end."""
    form = options.pop("form", None)
    fmt = options.pop("fmt", Dsml())
    matcher = call_grammar(GRAMMARS, Calls(fmt, **options), form).follow()
    tokens = VOCAB.tokenize(text, add_special=False)
    for i in range(len(tokens)):
        if not matcher.allowed(tokens[:i])[tokens[i]]:
            return False
    return bool(matcher.allowed(tokens)[257])


def behind(text: str) -> str:
    return text.removeprefix(Dsml().opening(None))


def test_a_demanded_call_follows_its_parameters() -> None:
    q, n = ("q", "a </b> < c", True), ("n", "3", False)
    for good in ([q], [q, n], [q, ("kind", "news", True)]):
        assert follows(behind(calls(invoke("look", *good))), tools=[LOOK])
    for bad in (
        [n],  # without what is required
        [q, ("n", "3", True)],
        [q, ("n", "three", False)],
        [q, ("kind", "sport", True)],
        [q, ("more", "x", True)],
        [("q", "x", False)],
        [("q", f"x</{DSML}y", True)],
    ):
        assert not follows(behind(calls(invoke("look", *bad))), tools=[LOOK])
    assert not follows(behind(calls(invoke("other", q))), tools=[LOOK])


def test_several_calls_unless_one_is_asked_for() -> None:
    two = behind(calls(invoke("look", ("q", "x", True)), invoke("look", ("q", "y", True))))
    assert follows(two, tools=[LOOK])
    assert not follows(two, tools=[LOOK], is_single=True)
    named = calls(invoke("look", ("q", "x", True))).removeprefix(Dsml().opening("look"))
    assert follows(named, tools=[LOOK], name="look", is_single=True)


def test_calls_or_json() -> None:
    form = json_format("response_format", {"type": "object", "properties": {}})
    whole = calls(invoke("look", ("q", "x", True)))
    for text in (whole, "{}"):
        assert follows(text, tools=[LOOK], has_begun=False, form=form)
    assert not follows("text", tools=[LOOK], has_begun=False, form=form)


def test_strict_calls_are_bound_from_their_marker_on() -> None:
    strict = {"type": "function", "function": LOOK["function"] | {"strict": True}}  # type: ignore[operator]
    asked = Calls(Dsml(), [strict], has_begun=False)
    assert asked.openings(GRAMMARS) == {256}
    whole = calls(invoke("look", ("q", "x", True)))
    assert follows(whole.removeprefix("\n\n<"), tools=[strict], has_begun=False)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"type": "array"}, "must be an object"),
        ({"properties": {'a"b': {}}}, "cannot be named in DSML"),
        ({"properties": {"a": {"type": "nothing"}}}, "at /properties/a"),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "DSML cannot enforce it"),
    ],
)
def test_what_cannot_be_enforced_is_said(parameters: dict[str, Any], said: str) -> None:
    tool = {"function": {"name": "f", "parameters": parameters, "strict": True}}
    with pytest.raises(RequestError, match=said):
        call_grammar(GRAMMARS, Calls(Dsml(), [tool]))


def test_a_tool_that_says_nothing_takes_anything() -> None:
    tool = {"function": {"name": "f"}}
    anything = invoke("f", ("any", "x", True), ("other", '{"a": [1]}', False))
    assert follows(behind(calls(anything)), tools=[tool])
    assert follows(behind(calls(invoke("f"))), tools=[tool])


V32 = """
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- else %}{{ '<｜Assistant｜></think>' + m.content }}
{%- if m.tool_calls %}{{ '<｜DSML｜function_calls>' + m.tool_calls[0].function.name }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"""


def test_v3_2_names_the_block_otherwise() -> None:
    template = ChatTemplate(V32, bos="", eos="")
    fmt = template.tool_format
    assert fmt == Dsml("function_calls")
    asked = Turns([{"role": "user", "content": "Cats?"}], tools=[LOOK], must_call=True)
    prompt = template.prompt(asked)
    assert prompt.text.endswith(f'</think>\n\n<{DSML}function_calls>\n<{DSML}invoke name="')
    whole = calls(invoke("look", ("q", "x", True))).replace("tool_calls", "function_calls")
    parser = fmt.parser(None)
    events = parser.add(whole) + parser.finish()
    assert "".join(e.text for e in events if isinstance(e, CallArguments)) == '{"q": "x"}'
    assert follows(whole.removeprefix(fmt.opening(None)), fmt=fmt, tools=[LOOK])
    other = whole.replace("function_calls", "tool_calls")
    assert not follows(other.removeprefix(Dsml().opening(None)), fmt=fmt, tools=[LOOK])


def test_llama_cpp_knows_the_template_by_its_variable() -> None:
    assert "dsml_token" in chat_template("DeepSeek-V4-Flash")


# -- schemas -------------------------------------------------------------------------------------

PLACE = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "n": {"type": "integer"}},
    "additionalProperties": False,
}


def takes(
    parameters: dict[str, Any], *arguments: tuple[str, str, bool], strict: bool = True
) -> bool:
    tool = {"function": {"name": "f", "parameters": parameters, "strict": strict}}
    return follows(behind(calls(invoke("f", *arguments))), tools=[tool])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            [("3", False), ("null", False)],
            [("3", True), ('"3"', False)],
        ),
        (
            {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            [("x", True), ("3", False)],
            [("true", False)],
        ),
        ({"$ref": "#/$defs/Place"}, [('{"x": 1}', False)], [("x", True), ('{"y": 1}', False)]),
        ({"$ref": "#/$defs/Color"}, [("red", True)], [("blue", True), ("1", False)]),
        ({"$ref": "#/properties/other"}, [("3", False)], [("3", True)]),
        (
            {"allOf": [{"$ref": "#/$defs/Color"}, {"enum": ["red", "gold"]}]},
            [("red", True)],
            [("gold", True), ("green", True)],
        ),
        (
            {"anyOf": [{"$ref": "#/$defs/Color"}, {"const": "none"}, {"type": "boolean"}]},
            [("green", True), ("none", True), ("true", False)],
            [("other", True), ("1", False)],
        ),
        ({"type": ["string", "null"], "enum": ["a", None]}, [("a", True), ("null", False)],
         [("b", True), ("3", False)]),
        (True, [("x", True), ("[1]", False)], []),
    ],
)  # fmt: skip
def test_a_value_may_be_what_its_schema_says(
    strict: bool, schema: Any, good: list[tuple[str, bool]], bad: list[tuple[str, bool]]
) -> None:
    """References and alternatives are followed, and text is text only where that may be."""
    parameters = {
        "properties": {"a": schema, "other": {"type": "integer"}},
        "required": ["a"],
        "$defs": {"Place": PLACE, "Color": {"enum": ["red", "green"]}},
    }
    for value in good:
        assert takes(parameters, ("a", *value), strict=strict), value
    for value in bad:
        assert not takes(parameters, ("a", *value), strict=strict), value


def test_a_schema_may_refer_to_itself() -> None:
    assert takes(TREE, ("left", '{"left": {"n": 1}}', False), ("n", "2", False))
    assert not takes(TREE, ("left", '{"left": {"n": "x"}}', False))
    assert not takes(TREE, ("left", "x", True))


def test_the_arguments_themselves_may_be_alternatives() -> None:
    one = {"properties": {"path": {"type": "string"}}, "required": ["path"]}
    two = {"properties": {"id": {"type": "integer"}}, "required": ["id"]}
    common = {"properties": {"force": {"type": "boolean"}}}
    for parameters in (
        {"type": "object", "anyOf": [one, two], **common},
        {"$ref": "#/$defs/Both", "$defs": {"Both": {"anyOf": [one, two], **common}}},
        {"allOf": [common, {"oneOf": [one, two]}]},
    ):
        force = ("force", "true", False)
        strict = "allOf" not in parameters
        for given in ([("path", "x", True)], [force, ("path", "x", True)], [("id", "1", False)]):
            assert takes(parameters, *given, strict=strict), (parameters, given)
        for given in ([], [force], [("path", "x", True), ("id", "1", False)], [("id", "1", True)]):
            assert not takes(parameters, *given, strict=strict), (parameters, given)


def test_arguments_that_nothing_names() -> None:
    text, number = ("any", "x", True), ("any", "1", False)
    assert takes({"additionalProperties": {"type": "string"}}, text)
    assert not takes({"additionalProperties": {"type": "string"}}, number)
    assert takes({"additionalProperties": {"type": "integer"}}, number, ("more", "2", False))
    assert not takes({"additionalProperties": {"type": "integer"}}, text)
    for closed in ({"additionalProperties": False}, {"properties": {}, "type": ["object"]}):
        assert takes(closed)
        assert not takes(closed, text)
    wanted = {"properties": {}, "required": ["any"]}
    assert takes(wanted, text)
    assert takes(wanted, number)
    assert not takes(wanted)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, "(leads nowhere|does not exist)"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "pattern": "x"}, {"type": "null"}]}}},
         "at /properties/a: DSML cannot enforce it, as pattern is said of text"),
        ({"properties": {"a": {}}, "required": ["a"], "minProperties": 1}, "minProperties"),
        ({"required": ["a"], "additionalProperties": False}, "'a' is required, but not allowed"),
        ({"anyOf": [{"type": "string"}]}, "no arguments can follow it"),
    ],
)  # fmt: skip
def test_what_a_schema_says_in_vain_is_refused(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        takes(parameters)


def test_a_number_that_says_something_of_text_is_bound() -> None:
    assert takes({"properties": {"a": {"type": "integer", "pattern": "x"}}}, ("a", "1", False))


def test_text_is_whatever_does_not_end_it() -> None:
    rng = random.Random(4)
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
    texts = ["", "<", "</", "</<", "<<//", "a</<p></", "</</</x", "｜", "<｜"]
    texts += ["".join(rng.choice("<</｜a") for _ in range(rng.randint(1, 9))) for _ in range(300)]
    for text in texts:
        ends = "</｜" in text
        assert follows(behind(calls(invoke("f", ("a", text, True)))), tools=[tool]) != ends, text
        if not ends:
            _, [(_, arguments)] = read([calls(invoke("f", ("a", text, True)))])
            assert json.loads(arguments) == {"a": text}


def test_an_empty_value_is_null() -> None:
    """Where nothing binds a model it may say that a value is JSON and give none."""
    _, [(_, arguments)] = read([calls(invoke("f", ("a", "", False), ("b", " ", False)))])
    assert json.loads(arguments) == {"a": None, "b": None}
