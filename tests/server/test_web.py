"""The web page in a real browser, over a scripted engine: what a reader sees and does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser

from gguf_mtp.server.access import Access
from gguf_mtp.server.app import ServerOptions
from gguf_mtp.telemetry.metrics import Metrics
from tests.support.browser import Tab, browser, command
from tests.support.chat_formats import CHATML, V31
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import served_of, serving

pytestmark = [
    pytest.mark.web,
    pytest.mark.skipif(command() is None, reason="no Chromium here (apt install chromium)"),
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture
def any_tab(chromium: Browser) -> Iterator[Tab]:
    made = Tab(chromium)
    yield made
    made.close()


@pytest.fixture
def tab(any_tab: Tab) -> Iterator[Tab]:
    yield any_tab
    assert any_tab.complaints() == []


def replies(*texts: str) -> Callable[[str, int], Answer]:
    return lambda _, n: Answer(texts[n % len(texts)], chunk=3)


def ask(tab: Tab, text: str) -> None:
    tab.click("#text")
    tab.type(text)
    tab.press("Enter")


def done(tab: Tab, n_messages: int) -> None:
    tab.wait(
        f"document.querySelectorAll('article').length === {n_messages} "
        "&& !document.querySelector('.writing')"
    )


def coloured(tab: Tab) -> None:
    tab.click("#settings-open")
    tab.click("#colours")
    tab.click("dialog button")


def test_a_chat_with_every_tokens_origin(tab: Tab) -> None:
    engine = ScriptedEngine(replies("Paris, é🐻.", "Rome."))
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        tab.wait("document.querySelector('#model').innerText === 'scripted'")
        ask(tab, "France?")
        done(tab, 2)
        plain = "getComputedStyle(document.querySelector('article .mtp')).backgroundColor"
        width = "document.querySelector('article .mtp').getBoundingClientRect().width"
        letter = tab.run(width)
        assert tab.run(plain) == "rgba(0, 0, 0, 0)"
        coloured(tab)
        assert tab.run(width) == letter
        assert "drafted by the MTP block, accepted" in tab.text("#legend")
        assert tab.text("article.user") == "France?"
        assert tab.text("article.assistant > .text") == "Paris, é🐻."
        tokens = tab.run(
            "[...document.querySelectorAll('article.assistant .token')]"
            ".map(t => [t.innerText, t.className])"
        )
        assert tokens[:3] == [["P", "token mtp"], ["a", "token mtp"], ["r", "token target"]]
        colours = tab.run(
            "[...document.querySelectorAll('article.assistant .token')].slice(0, 3)"
            ".map(t => getComputedStyle(t).backgroundColor)"
        )
        assert colours == ["rgb(211, 240, 217)"] * 2 + ["rgba(0, 0, 0, 0)"]
        assert tab.run("document.querySelectorAll('article.user .token').length") == 0
        assert tab.text("#acceptance") == "100 %"
        assert tab.text("#depth") == "1.8"  # 9 drafted in 5 rounds
        assert tab.text("#speed") == "11.2"  # the server's own account: 14 tokens in 1.25 s
        ask(tab, "Italy?")
        done(tab, 4)
        messages = engine.requests[1]
    prompt = engine._show(messages.prompt)
    assert "France?" in prompt
    assert "Paris, é🐻." in prompt
    assert prompt.index("Paris") < prompt.index("Italy?")


def test_a_drafter_that_the_page_does_not_know_has_a_colour_and_a_name(tab: Tab) -> None:
    engine = ScriptedEngine(replies("Paris"), source="toy")
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        coloured(tab)
        ask(tab, "France?")
        done(tab, 2)
        name = tab.run("document.querySelector('article .token.toy').title")
        assert name == "drafted by toy, accepted"
        assert "toy" in tab.text("#legend")
        colours = tab.run(
            "['toy', 'target'].map(c => getComputedStyle("
            "document.querySelector(`article .token.${c}`)).backgroundColor)"
        )
        assert colours[0] != colours[1] == "rgba(0, 0, 0, 0)"


def test_text_is_never_markup(tab: Tab) -> None:
    bad = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    engine = ScriptedEngine(replies(bad))
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        ask(tab, bad)
        done(tab, 2)
        assert tab.text("article.user") == tab.text("article.assistant > .text") == bad
        assert tab.run("document.querySelectorAll('article img, article script').length") == 0


def test_stop_ends_the_answer_and_keeps_what_was_written(tab: Tab) -> None:
    engine = ScriptedEngine(lambda *_: Answer("x" * 2000, chunk=2))
    engine.steps = threading.Semaphore(0)
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        for n, click in ((1, True), (2, False)):
            ask(tab, "Go")
            engine.steps.release(6)
            tab.wait("[...document.querySelectorAll('.writing .token')].length > 3")
            assert tab.run("document.querySelector('#send').hidden")
            if click:
                tab.click("#stop")
            else:
                tab.press("Escape")
            tab.wait("!document.querySelector('.writing')")
            assert tab.run("document.querySelector('article:last-child .note').innerText") == (
                "stopped"
            )
            assert not tab.run("document.querySelector('#send').hidden")
            for _ in range(900):  # the cancellation is noticed between two rounds
                if engine.cancelled[-1:] == [n]:
                    break
                engine.steps.release()
                time.sleep(0.01)
        assert engine.cancelled == [1, 2]


def test_regenerate_asks_the_same_again_and_keeps_what_was_said(tab: Tab) -> None:
    engine = ScriptedEngine(replies("first", "second"))
    shown = "document.querySelector('article.assistant > .text').innerText"
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        ask(tab, "Say")
        done(tab, 2)
        tab.click(".again")
        tab.wait(f"{shown} === 'second'")
        done(tab, 2)
        assert tab.text(".version") == "2 of 2"
        tab.click(".back")
        assert (tab.run(shown), tab.text(".version")) == ("first", "1 of 2")
        tab.open(server.url)
        assert (tab.run(shown), tab.text(".version")) == ("first", "1 of 2")
        ask(tab, "And?")
        done(tab, 4)
    assert engine.requests[0].prompt == engine.requests[1].prompt
    assert "first" in engine._show(engine.requests[2].prompt), "what stands there is what was said"


def test_an_answer_that_does_not_begin_takes_nothing_away(tab: Tab) -> None:
    engine = ScriptedEngine(replies("first"))
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        ask(tab, "Say")
        done(tab, 2)
        tab.run("(() => { window.fetch = () => Promise.reject(new TypeError('cut off')); })()")
        tab.click(".again")
        tab.wait("document.querySelector('.assistant .note').innerText !== ''")
        done(tab, 2)
        assert tab.text("article.assistant > .text") == "first"
        assert tab.text("article.assistant .note") == "the server cannot be reached"


def test_history_and_settings_survive_a_reload(tab: Tab) -> None:
    engine = ScriptedEngine(replies("Paris", "Rome"))
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        tab.click("#settings-open")
        for name, value in [("temperature", "0.5"), ("seed", "7"), ("system", "Be brief.")]:
            tab.click(f"#{name}")
            tab.type(value)
        tab.click("dialog button")
        ask(tab, "France?")
        done(tab, 2)
        tab.click("#settings-open")
        tab.press("Escape")  # leaves them as they are
        tab.click("#new")
        done(tab, 0)
        ask(tab, "Italy?")
        done(tab, 2)
        tab.open(server.url)
        done(tab, 2)
        assert tab.text("article.assistant > .text") == "Rome"
        options = "[...document.querySelectorAll('#chats option')].map(o => o.innerText)"
        assert tab.run(options) == ["Italy?", "France?"]
        tab.run(
            "(() => { const s = document.querySelector('#chats'); s.selectedIndex = 1;"
            " s.dispatchEvent(new Event('change')); })()"
        )
        assert tab.text("article.assistant > .text") == "Paris"
        assert tab.run("document.querySelectorAll('.token.mtp').length") == 4
        tab.click(".again")
        done(tab, 2)
        tab.agrees = False
        tab.click("#delete")
        assert tab.run(options) == ["France?", "Italy?"]
        tab.agrees = True
        tab.click("#delete")
        assert tab.asked == ["Delete this conversation?"] * 2
        assert tab.run(options) == ["Italy?"]
        tab.open(server.url)
        assert tab.run(options) == ["Italy?"]
    for request in engine.requests:
        assert (request.params.temperature, request.params.seed) == (0.5, 7)
        assert "Be brief." in engine._show(request.prompt)


def test_reasoning_is_folded_and_not_sent_back(tab: Tab) -> None:
    engine = ScriptedEngine(replies("Let me think.</think>Paris."))
    with serving(engine, served_of(engine, V31)) as server:
        tab.open(server.url)
        # The demo's templates think only when told to; the page sends what its settings say.
        tab.run(
            "(() => { const real = fetch; window.fetch = (url, o) => real(url, o?.body ?"
            " {...o, body: JSON.stringify({...JSON.parse(o.body),"
            " chat_template_kwargs: {thinking: true}})} : o); })()"
        )
        ask(tab, "France?")
        done(tab, 2)
        assert tab.text("article.assistant > .text") == "Paris."
        assert not tab.run("document.querySelector('.assistant details').open")
        tab.click(".assistant summary")
        assert tab.text(".assistant details .text") == "Let me think."
        ask(tab, "Sure?")
        done(tab, 4)
    assert "Let me think" not in engine._show(engine.requests[1].prompt)


def test_a_key_is_asked_for_and_used(any_tab: Tab) -> None:
    tab = any_tab
    engine = ScriptedEngine(replies("Paris"))
    options = ServerOptions(Access(api_key="sesame"))
    with serving(engine, served_of(engine, CHATML), options) as server:
        tab.open(server.url)
        tab.wait("document.querySelector('dialog').open")
        assert tab.run("document.activeElement.id") == "key"
        tab.type("sesame")
        tab.press("Enter")
        tab.wait("document.querySelector('#model').innerText === 'scripted'")
        ask(tab, "France?")
        done(tab, 2)
        assert tab.text("article.assistant > .text") == "Paris"
        stored = tab.run("JSON.stringify(localStorage) + document.cookie")
        assert "sesame" not in stored  # it goes with the tab
    complaints = tab.complaints()
    assert all("401" in complaint for complaint in complaints)


def test_a_wrong_key_is_said(any_tab: Tab) -> None:
    tab = any_tab
    engine = ScriptedEngine(replies("Paris"))
    with serving(engine, served_of(engine, CHATML), ServerOptions(Access("sesame"))) as server:
        tab.open(server.url)
        tab.wait("document.querySelector('dialog').open")
        assert tab.text("#key-note") == "The server needs an API key."
        tab.type("simsim")
        tab.press("Enter")
        tab.wait("document.querySelector('#key-note').innerText.includes('not accept')")
        assert tab.run("document.activeElement.id") == "key"
        tab.type("sesame")  # over the wrong one
        tab.press("Enter")
        tab.wait("document.querySelector('#model').innerText === 'scripted'")


def test_what_the_server_refuses_is_said_and_can_be_changed(any_tab: Tab) -> None:
    tab = any_tab
    engine = ScriptedEngine(replies("fine"), n_ctx=60)
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        ask(tab, "a long question " * 10)
        done(tab, 2)
        assert "maximum context length is 60 tokens" in tab.text("article.assistant .note")
        text = "document.querySelector('#text')"
        assert tab.run(f"{text}.value") == ("a long question " * 10).strip()
        tab.run(f"{text}.value = ''")
        ask(tab, "short")
        done(tab, 2)
        assert tab.text("article.user") == "short"
        assert tab.text("article.assistant > .text") == "fine"
    assert "long" not in engine._show(engine.requests[0].prompt)
    assert all("400" in complaint for complaint in tab.complaints())


def test_a_full_context_leaves_out_the_oldest_exchanges(any_tab: Tab) -> None:
    tab = any_tab
    engine = ScriptedEngine(replies("yes"), n_ctx=120)
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        for n in range(1, 6):
            ask(tab, f"Question {n}?")
            done(tab, 2 * n)
        assert tab.text("article.assistant .note") == "not sent any more: the context is full"
        prompt = engine._show(engine.requests[-1].prompt)
        assert "Question 5?" in prompt
        assert "Question 1?" not in prompt
        last = "document.querySelector('article:last-of-type > .text').innerText"
        assert tab.run(last) == "yes"
    assert all("400" in complaint for complaint in tab.complaints())


def test_an_answer_that_ends_too_early_says_why(tab: Tab) -> None:
    engine = ScriptedEngine(lambda *_: Answer("x" * 500, chunk=3), n_ctx=60)
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        ask(tab, "Go")
        done(tab, 2)
        assert tab.text("article.assistant .note") == "cut off: the context is full"
        tab.click("#new")
        tab.click("#settings-open")
        tab.click("#max_tokens")
        tab.type("3")
        tab.click("dialog button")
        ask(tab, "Go")
        done(tab, 2)
        assert tab.text("article.assistant .note") == (
            "cut off after 3 tokens, the most that the settings allow"
        )


def test_two_tabs_keep_each_others_conversations(tab: Tab, chromium: Browser) -> None:
    engine = ScriptedEngine(replies("one", "two", "three"))
    other = Tab(chromium, beside=tab)
    options = "[...document.querySelectorAll('#chats option')].map(o => o.innerText)"
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        other.open(server.url)
        ask(tab, "Here?")
        done(tab, 2)
        ask(other, "There?")
        done(other, 2)
        tab.wait(f"{options}.length === 2")
        assert sorted(tab.run(options)) == ["Here?", "There?"]
        ask(tab, "Still here?")
        done(tab, 4)
        tab.open(server.url)
        assert tab.run(options) == ["Here?", "There?"]
        done(tab, 4)


def test_conversations_kept_together_are_split(tab: Tab) -> None:
    """As pages before this one kept them."""
    engine = ScriptedEngine(replies("x"))
    old = [{"id": 1, "messages": [{"role": "user", "pieces": [["Old?", ""]]}]}, {"id": 2}]
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        tab.run(f"localStorage.setItem('gguf-mtp.chats', JSON.stringify({json.dumps(old)}))")
        for _ in range(2):
            tab.open(server.url)
            assert tab.text("article.user") == "Old?"
        assert tab.run("Object.keys(localStorage)") == ["gguf-mtp.chat.1"]


def test_an_error_in_the_middle_of_a_stream_is_said(tab: Tab) -> None:
    failures = {3: RuntimeError("boom")}
    engine = ScriptedEngine(replies("one two three"), failures=failures)  # type: ignore[arg-type]
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.open(server.url)
        ask(tab, "Go")
        done(tab, 2)
        assert tab.text("article.assistant > .text") == "one"
        assert tab.text("article.assistant .note").startswith("the request failed inside")


def test_the_speed_up_is_the_servers_estimate(tab: Tab) -> None:
    from gguf_mtp.depth import DepthReport

    engine = ScriptedEngine(replies("Paris"))
    metrics = Metrics(lambda: DepthReport(40.0, 2, 1.374, (0.9,), None))
    with serving(engine, served_of(engine, CHATML), ServerOptions(metrics=metrics)) as server:
        tab.open(server.url)
        assert tab.text("#speed-up") == "–"
        ask(tab, "France?")
        done(tab, 2)
        tab.wait("document.querySelector('#speed-up').innerText === '1.37 ×'")


@pytest.mark.parametrize("width", [320, 390, 900, 1600])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_cut_off_and_all_is_legible(tab: Tab, width: int, dark: bool) -> None:
    long = "A word-that-is-very-long-" + "x" * 200 + " and a line.\n\nAnother paragraph. " * 8
    engine = ScriptedEngine(replies(long))
    with serving(engine, served_of(engine, CHATML)) as server:
        tab.look(width, 700, dark=dark)
        tab.open(server.url)
        ask(tab, "Write much " * 20)
        done(tab, 2)
        assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.run("document.querySelector('#log').scrollWidth") <= width
        for selector in ("#send", "#new", "#settings-open", "#text"):
            box = tab.run(
                f"(() => {{ const r = document.querySelector('{selector}').getBoundingClientRect();"
                " return [r.left, r.right, r.top, r.bottom]; })()"
            )
            assert 0 <= box[0] < box[1] <= width, selector
            assert 0 <= box[2] < box[3] <= 700, selector
        # The end of the answer is in view: the page scrolled along.
        assert tab.run(
            "(l => l.scrollHeight - l.scrollTop - l.clientHeight < 5)"
            "(document.querySelector('#log'))"
        )
        coloured(tab)
        for selector in ("article .mtp", "article .target", ".note", "dt", "#send"):
            assert contrast(tab, selector) >= 4.5, selector


def contrast(tab: Tab, selector: str) -> float:
    """WCAG's contrast of a text with what is behind it."""
    colours = tab.run(
        f"""(() => {{
            let e = document.querySelector('{selector}');
            const front = getComputedStyle(e).color;
            let back = 'rgba(0, 0, 0, 0)';
            for (; e && back === 'rgba(0, 0, 0, 0)'; e = e.parentElement)
                back = getComputedStyle(e).backgroundColor;
            return [front, back].map(c => c.match(/[0-9.]+/g).slice(0, 3).map(Number));
        }})()"""
    )

    def luminance(colour: list[float]) -> float:
        parts = [c / 255 for c in colour]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)
