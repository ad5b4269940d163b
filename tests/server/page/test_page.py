"""The page in a headless Chromium, with clicks and keys, over the fake engine and over a real scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.server.conftest import Served
from tests.server.fake_llm import SENTENCE
from tests.server.page.browser import BINARY, Browser
from tests.server.test_isolation import ServedEngine, entries
from tests.server.test_isolation import start as start

pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no Chromium on this machine")

LAST = "[...document.querySelectorAll('.assistant')].at(-1)"
SUMMARY = f"{LAST}?.querySelector('.summary')?.textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Browser]:
    browser.size(1280, 800)
    browser.open(f"{server.url}/")
    browser.wait("!document.getElementById('model').hidden")
    browser.errors.clear()
    yield browser
    assert browser.errors == []
    browser.run("addEventListener('pagehide', () => sessionStorage.clear())")  # the next test has the same server


def send(page: Browser, text: str) -> None:
    page.click("#prompt")
    page.write(text)
    page.press("Enter")


def test_a_message_is_answered_and_its_text_is_no_html(page: Browser) -> None:
    send(page, "<img src=x onerror=alert(1)> & <b>bold</b>")
    page.wait(SUMMARY)
    assert page.run("document.querySelector('.user .text').textContent") == "<img src=x onerror=alert(1)> & <b>bold</b>"
    assert page.run(f"{LAST}.querySelector('.text').textContent").startswith(SENTENCE)
    assert page.run("document.querySelectorAll('#log img, #log b').length") == 0


def test_markdown_of_an_answer_is_styled_and_its_text_stays(page: Browser, server: Served) -> None:
    text = "## Sum\n**Add** `a`:\n```py\na + <b>\n\n# b\n```\ndone **now**"
    server.llm.sentence = text
    send(page, "hello")
    page.wait(SUMMARY)
    markdown = f"{LAST}.querySelector('.markdown')"
    kinds = page.run(f"[...{markdown}.children].map((line) => line.className).join()")
    assert kinds == "heading,line,fence,code,code,code,end,line"
    assert page.run(f"{markdown}.textContent").replace("pyCopy", "py") == text
    shown = page.run(f"{markdown}.innerText").split()
    assert shown == ["Sum", "Add", "a:", "py", "Copy", "a", "+", "<b>", "#", "b", "done", "now"]


def test_an_answer_is_stopped_by_esc_generated_again_and_a_message_edited(page: Browser, server: Served) -> None:
    server.llm.hold_after = 5
    send(page, "hello")
    page.wait(f"{LAST}?.querySelector('.text').textContent.length >= 5")
    send(page, "more")
    assert page.run("document.getElementById('status').textContent") == "an answer is being generated; Esc stops it"
    page.press("Escape")
    page.wait(f"{SUMMARY}?.includes('stopped')")
    assert page.wait("document.getElementById('stop').hidden")
    server.llm.hold_after = 10**9
    page.click(".assistant button", "Regenerate")
    page.wait(f"{SUMMARY}?.includes('ended by')")
    assert page.run(f"{LAST}.querySelector('.count').textContent") == "2/2"
    page.click(".user button", "Edit")
    page.run("document.querySelector('.user textarea').select()")
    page.write("another")
    page.click(".user button", "Send again")
    page.wait(f"{SUMMARY}?.includes('ended by')")
    assert page.run("document.querySelector('.user .text').textContent") == "another"
    assert page.run("document.querySelectorAll('.turn').length") == 2


@pytest.mark.parametrize("shown", [".text", ".token"])
def test_what_is_shown_of_an_answer_stays_while_it_grows(page: Browser, server: Served, shown: str) -> None:
    server.llm.token_interval_s = 0.01
    if shown == ".token":
        page.click("#show-tokens")
    send(page, "hello")
    page.wait(f"Boolean(window.first = {LAST}?.querySelector('{shown}')?.firstChild)")
    page.wait(f"{SUMMARY}?.includes('ended by')")
    assert page.run(f"first === {LAST}.querySelector('{shown}').firstChild")
    text = page.run(f"{LAST}.querySelector('{shown}').closest('.text, .tokens').textContent")
    assert (text[:16], text[-12:]) == (SENTENCE[:16], SENTENCE[-12:])


def test_every_parameter_has_a_help_and_long_names_break_behind_an_underscore(page: Browser) -> None:
    page.run("document.querySelectorAll('#settings details').forEach((each) => { each.open = true; })")
    helps = page.run("[...document.querySelectorAll('#settings .about')].map((each) => [each.id, each.textContent])")
    assert [name for name, help_ in helps if not help_] == []
    assert {"about-priority", "about-reasoning_effort"} <= {name for name, _ in helps}
    label = "document.querySelector('label[for=field-first_token_deadline_s]')"
    assert page.run(f"{label}.innerHTML") == "first_<wbr>token_<wbr>deadline_<wbr>s<wbr>"


def test_turns_that_were_removed_come_back(page: Browser) -> None:
    texts = "[...document.querySelectorAll('.user .text')].map((each) => each.textContent).join()"
    for number in (1, 2):
        send(page, f"message {number}")
        page.wait(f"document.querySelectorAll('.summary:not(:empty)').length === {number}")
    page.click(".turn:nth-child(2) button", "Regenerate")
    page.wait(f"{LAST}.querySelector('.count')?.textContent === '2/2' && {SUMMARY}?.includes('ended by')")
    assert page.run("document.querySelector('.removal').textContent") == "2 turns were removed. Undo"
    page.click(".removal button")
    assert page.run(texts) == "message 1,message 2"
    assert page.run("document.querySelector('.assistant .count').textContent") == "1/2"
    page.click(".user button", "Edit")
    page.write(" again")
    page.click(".user button", "Send again")
    page.wait(f"{SUMMARY}?.includes('ended by')")
    page.click("#clear")
    assert page.run(texts) == ""
    page.click(".removal button")
    assert page.run(texts) == "message 1 again"
    send(page, "message 3")
    assert not page.run("document.querySelector('.removal')"), "it would remove the new turn"


def test_a_conversation_and_settings_outlive_a_reload_which_stops_an_answer(page: Browser, server: Served) -> None:
    send(page, "first")
    assert "letters · " in page.wait(SUMMARY), "there are several models"
    server.llm.hold_after = 5
    send(page, "second")
    page.wait("document.querySelectorAll('.assistant .text')[1]?.textContent.length === 5")
    values = "['form-kind', 'field-form', 'system'].map((id) => document.getElementById(id).value)"
    for field, value in (("form-kind", "choice"), ("field-form", "yes"), ("system", "Be brief.")):
        found = f"document.getElementById('{field}')"
        page.run(f"{found}.value = '{value}'; {found}.dispatchEvent(new Event('input', {{ bubbles: true }}))")
    page.click("#show-tokens")
    page.run("window.old = true")
    page.send("Page.reload")
    page.wait("!window.old && document.querySelectorAll('.turn').length === 4")
    assert page.run("document.getElementById('show-tokens').checked")
    assert page.run(values) == ["choice", "yes", "Be brief."]
    assert not page.run("document.getElementById('field-form').closest('.field').hidden")
    assert "stopped" in page.run(SUMMARY)
    assert page.run("document.querySelectorAll('.assistant .text')[1].textContent") == SENTENCE[:5]
    assert page.run("document.getElementById('stop').hidden")


def test_a_message_about_a_conversation_does_not_stay_in_the_other_view(page: Browser) -> None:
    send(page, "first")
    page.wait(SUMMARY)
    page.click("#show-tokens")
    assert page.run("document.getElementById('status').textContent") == "tokens are shown from the next answer on"
    page.click("nav a", "Completion")
    assert page.wait("document.querySelector('.empty')?.textContent") == "Write a text to continue."
    assert page.run("document.getElementById('status').textContent") == ""


STREAM = """(() => {
  const call = { index: 0, id: "call_1", function: { name: "look", arguments: '{"a": 1}' } };
  const choices = [{ index: 0, delta: { content: "שלום!\\nhello", tool_calls: [call] }, finish_reason: "tool_calls" }];
  window.sent = [];
  window.fetch = async (url, { body }) => {
    sent.push(JSON.parse(body));
    return new Response(`data: ${JSON.stringify({ choices })}\\n\\ndata: [DONE]\\n\\n`);
  };
})()"""


def test_a_call_is_answered_and_each_line_has_the_direction_of_its_script(page: Browser) -> None:
    page.run(STREAM)
    send(page, "hello")
    page.click(".call textarea")
    page.write("42")
    page.click("#show-tokens")
    assert page.run("document.querySelector('.call textarea').value") == "42", "what was typed is gone"
    page.click(".call button", "Send result")
    page.wait("document.querySelectorAll('.assistant').length === 2")
    assert (
        page.run("JSON.stringify(sent.at(-1).messages.at(-1))")
        == '{"role":"tool","content":"42","tool_call_id":"call_1"}'
    )
    assert page.run("document.querySelectorAll('.call textarea').length") == 1, "the first call has its answer"
    ends = page.run(
        """[...document.querySelector('.assistant .text').children].map((line) => {
          const range = document.createRange();
          range.selectNodeContents(line);
          return range.getBoundingClientRect().left - line.getBoundingClientRect().left > 200;
        })"""
    )
    assert ends == [True, False]


FOCUS = "document.activeElement.textContent || document.activeElement.id"


def test_the_focus_stays_where_the_keyboard_put_it(page: Browser, server: Served) -> None:
    server.llm.hold_after = 5
    page.click("#prompt")
    page.write("hello")
    page.run("document.getElementById('send').focus()")
    page.press("Enter")
    page.wait(f"{LAST}?.querySelector('.text').textContent.length >= 5")
    assert page.run("document.activeElement.id") == "stop"
    page.press("Enter")
    page.wait(f"{SUMMARY}?.includes('stopped')")
    assert page.run("document.activeElement.id") == "send"
    server.llm.hold_after = 10**9
    for name, count in (("Regenerate", "2/2"), ("‹", "1/2"), ("›", "2/2")):
        page.run(f"[...{LAST}.querySelectorAll('button')].find((each) => each.textContent === '{name}').focus()")
        page.press("Enter")
        page.wait(f"{LAST}.querySelector('.count')?.textContent === '{count}' && {SUMMARY}?.match(/ended|stopped/)")
        assert page.run(FOCUS) == name
    page.run("document.querySelector('.user button').focus()")
    page.press("Enter")
    assert page.run("document.activeElement.tagName") == "TEXTAREA"
    page.press("Escape")
    assert page.run(FOCUS) == "Edit"


def test_waiting_is_shown_and_the_whole_answer_is_announced_once(page: Browser, server: Served) -> None:
    announced = "document.getElementById('announcement').textContent"
    server.llm.hold_after = 0
    send(page, "hello")
    assert page.wait(f"{LAST}?.querySelector('.waiting')?.textContent") == "waiting for the first token…"
    page.press("Escape")
    page.wait(f"{SUMMARY}?.includes('stopped')")
    server.llm.hold_after = 10**9
    page.click(".assistant button", "Regenerate")
    page.wait(f"{SUMMARY}?.includes('ended by')")
    assert page.run(announced) == f"Model: {page.run(f'{LAST}.querySelector(`.text`).textContent')}"


@pytest.mark.parametrize(
    ("attribute", "value", "end"), [("paused", ("keep", False), "/resume"), ("sleeps", True, "/wake_up")]
)
def test_an_answer_that_waits_for_the_end_of_a_pause_says_so(
    page: Browser, server: Served, attribute: str, value: object, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.llm.hold_after = 0
    monkeypatch.setattr(server.llm, attribute, value)
    send(page, "hello")
    page.wait(f"{LAST}?.querySelector('.waiting')?.textContent.endsWith('requests wait until POST {end}.')")
    monkeypatch.undo()
    page.wait(f"{LAST}?.querySelector('.waiting')?.textContent === 'waiting for the first token…'")
    page.press("Escape")
    page.wait(f"{SUMMARY}?.includes('stopped')")
    server.llm.hold_after = 10**9


def test_esc_closes_the_settings_of_a_narrow_screen_and_stops_nothing(page: Browser, server: Served) -> None:
    server.llm.hold_after = 5
    page.size(390, 800, phone=True)
    send(page, "hello")
    page.click("#settings-toggle")
    assert page.wait("document.getElementById('model').checkVisibility()"), "the bar has no place for it"
    page.click("#field-temperature")
    page.press("Escape")
    assert not page.run("document.getElementById('settings').checkVisibility()")
    assert page.run(FOCUS) == "Settings"
    assert not page.run("document.getElementById('stop').hidden")
    page.press("Escape")
    page.wait(f"{SUMMARY}?.includes('stopped')")


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ("new Response('data: {}\\n\\n')", "the connection to the server was lost before the end"),
        ("Promise.reject(new TypeError('Failed to fetch'))", "the server does not respond; is it running?"),
    ],
)
def test_a_lost_connection_is_said_in_words(page: Browser, stream: str, message: str) -> None:
    page.run(f"void (window.fetch = async () => {stream})")
    send(page, "hello")
    assert page.wait(f"{LAST}?.querySelector('.wrong')?.textContent") == message
    assert page.run("document.getElementById('status').textContent") == "the request failed"
    assert page.run(SUMMARY) == "letters · failed"


def test_tokens_of_an_answer_that_was_made_without_them_come_with_the_next_one(page: Browser) -> None:
    send(page, "hello")
    page.wait(f"{SUMMARY}?.includes('ended by')")
    page.click("#show-tokens")
    assert page.run("document.getElementById('status').textContent") == "tokens are shown from the next answer on"
    page.click("#show-tokens")
    assert page.run("document.getElementById('status').textContent") == ""


def test_tokens_show_alternatives_and_a_branch_goes_on_from_one(page: Browser, server: Served) -> None:
    page.click("#show-tokens")
    send(page, "hello")
    page.wait(f"{SUMMARY}?.includes('ended by')")
    assert page.run("document.querySelectorAll('.token').length") == len(SENTENCE)
    page.move(".token:nth-child(3)")
    assert page.wait("document.querySelectorAll('#token-card li').length") > 1
    page.click("#token-card button:not(:disabled)")
    page.wait(f"{LAST}.querySelector('.count')?.textContent === '2/2' && {SUMMARY}?.includes('ended by')")
    _, prompt, _, _ = server.llm.requests[-1]
    assert SENTENCE[:2] in (prompt.text or "")
    page.run("document.querySelector('.token').focus()")
    page.press("ArrowRight")
    assert page.run("document.activeElement === document.querySelectorAll('.token')[1]")
    page.press("Enter")
    assert page.run("document.getElementById('token-card').contains(document.activeElement)")
    page.press("Escape")
    assert page.run("document.getElementById('token-card').hidden")


DROP = """(() => {
  const bytes = Uint8Array.from(atob("%s"), (each) => each.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], "a.gif", { type: "%s" }));
  const options = { bubbles: true, cancelable: true, dataTransfer: given };
  document.querySelector(".talk").dispatchEvent(new DragEvent("dragover", options));
  document.querySelector(".talk").dispatchEvent(new DragEvent("drop", options));
})()"""
GIF = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
URL = f"data:image/gif;base64,{GIF}"


def test_images_are_dropped_shown_removed_and_sent(page: Browser, server: Served) -> None:
    page.click("#show-tokens")
    for number in (1, 2):
        page.run(DROP % (GIF, "image/gif"))
        page.wait(f"document.querySelectorAll('#pictures img').length === {number}")
    assert page.wait("[...document.querySelectorAll('#pictures img')].every((each) => each.naturalWidth === 1)")
    page.click("#pictures button")
    page.wait("document.querySelectorAll('#pictures img').length === 1")
    page.run(DROP % (GIF, "text/plain"))
    assert page.wait("document.getElementById('status').textContent") == "only images can be added"
    send(page, "what is this?")
    page.wait(f"{SUMMARY}?.includes('ended by')")
    _, prompt, _, _ = server.llm.requests[-1]
    parts = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "what is this?"}]
    assert prompt.text == f"user: {parts}\nassistant: "
    assert page.run("document.querySelector('.user img').src") == URL
    assert page.run("document.getElementById('pictures').hidden")
    assert page.wait("document.querySelectorAll('.user .prompt .token').length") == len(prompt.text)


def test_a_model_for_text_alone_gets_no_images(page: Browser, server: Served) -> None:
    assert not page.run("document.getElementById('image-button').hidden")
    server.llm.reads_images = False
    page.open(f"{server.url}/")
    page.wait("!document.getElementById('model').hidden")
    assert page.run("document.getElementById('image-button').hidden")
    page.run(DROP % (GIF, "image/gif"))
    assert page.run("document.getElementById('pictures').hidden")


def test_the_span_of_an_image_is_one_mark_in_the_tokens_of_its_prompt(page: Browser) -> None:
    given = '{token_strs: ["a", "<i>", "<i>", "b"], media: [{kind: "image", offset: 1, length: 2}]}'
    view = f"import('/page/images.js').then(({{ promptView }}) => promptView({given}))"
    assert page.run(f"{view}.then((view) => [...view.children].map((each) => each.textContent).join('|'))") == (
        "a|image: 2 tokens|b"
    )
    title = page.run(f"{view}.then((view) => view.children[1].title)")
    assert title == "2 tokens, 1 to 2 of the prompt"


def test_what_the_server_refuses_is_shown_at_its_field(page: Browser) -> None:
    page.click("#field-temperature")
    page.write("-1")
    send(page, "hello")
    about = "document.getElementById('about-temperature')"
    assert "temperature" in page.wait(f"{about}.classList.contains('wrong') && {about}.textContent")
    assert page.run("document.getElementById('field-temperature').getAttribute('aria-invalid')") == "true"
    assert page.wait(SUMMARY) == "letters · failed"
    page.errors.clear()  # the browser notes the status 400


def test_a_completion_is_sent_without_parameters_of_chats(page: Browser) -> None:
    page.run("document.getElementById('field-reasoning_effort').value = 'low'")
    page.run("location.hash = '#completion'")
    page.click("#prompt")
    page.write("hello")
    page.click("#send")
    assert "ended by" in page.wait(SUMMARY)
    assert page.run("document.getElementById('field-reasoning_effort').closest('.field').hidden")
    page.run("location.hash = '#chat'")
    assert page.wait("!document.getElementById('field-reasoning_effort').closest('.field').hidden")


TABLE = """(() => {
    const make = (name, to, text = "", kind = "") => {
        const made = to.appendChild(document.createElement(name));
        made.className = kind;
        made.textContent = text;
        return made;
    };
    const scroll = make("div", document.querySelector("#engine .cores"), "", "scroll");
    const row = make("tr", make("table", scroll));
    const cell = make("td", row);
    make("i", cell, "", "swatch");
    make("button", cell, "6466b87e6f8ba2");
    make("td", row, "running");
    for (const text of ["1024", "1008", "900", "124", "4.49 s"]) make("td", row, text, "number");
    return scroll.scrollWidth <= scroll.clientWidth;
})()"""
"""Adds the requests that the view of an engine with reports has, and returns whether there is room for them."""


def test_nothing_is_cut_on_any_screen(page: Browser) -> None:
    send(page, "hello")
    page.wait(SUMMARY)
    page.run("location.hash = '#completion'")
    page.click("#prompt")
    page.write("hello")
    page.click("#send")
    page.wait(SUMMARY)
    page.click(".assistant button", "Regenerate")
    page.wait(f"{LAST}?.querySelector('.count')?.textContent === '2/2' && {SUMMARY}")
    for width in (320, 375, 768, 1280, 1920):
        page.size(width, 800, phone=width < 400)
        for view in ("chat", "completion", "engine"):
            page.run(f"location.hash = '#{view}'")
            assert page.run("document.documentElement.scrollWidth") <= width
            cut = page.run(
                "[...document.querySelectorAll('header *, #log button, #composer button')]"
                ".filter((each) => each.checkVisibility() && !each.closest('.hidden, .skip, select'))"
                ".map((each) => [each.outerHTML, each.getBoundingClientRect()])"
                ".filter(([_, place]) => place.right > innerWidth || place.left < 0).map(([html]) => html)"
            )
            assert cut == [], (width, view)
            if view == "engine":  # whose server here makes no reports
                assert page.run(TABLE), f"the table of requests is cut at {width}"
            heights = page.run(
                "['.row', '#send'].map((each) => document.querySelector(`#composer ${each}`).offsetHeight)"
            )
            assert heights[0] == heights[1], f"the buttons below the message take several lines at {width}"
    page.errors.clear()  # the engine of this server makes no reports


def test_a_message_of_any_length_moves_no_button(page: Browser) -> None:
    page.size(900, 700)
    place = "document.getElementById('send').getBoundingClientRect().right"
    before = page.run(place)
    for count in range(1, 6):
        page.run(f"document.getElementById('status').textContent = 'a message of some length '.repeat({count})")
        assert page.run(place) == before
    page.size(1280, 800)


def test_a_key_is_asked_for_and_kept_out_of_addresses(browser: Browser, start: Callable[..., ServedEngine]) -> None:
    server = start(entries("a, rights: [observe]", "b"))
    browser.open(f"{server.url}/")
    browser.wait("document.getElementById('key-dialog').open")
    # which models there are, and whether they read images, needs the key
    assert browser.run("document.getElementById('image-button').hidden")
    assert browser.run("document.getElementById('forget').hidden")
    reason = "document.getElementById('key-reason').textContent"
    assert browser.run(reason) == ""
    browser.click("#key")
    browser.write("no-key")
    browser.press("Enter")
    assert browser.wait(reason) == "The server does not accept this key."
    assert not browser.run("document.getElementById('forget').hidden")
    browser.click("#key")
    browser.write("a-key")
    browser.press("Enter")
    browser.wait("!document.getElementById('model').hidden")
    assert "a-key" not in browser.run("location.href + performance.getEntries().map((each) => each.name).join()")
    server.complete("a", range(1, 10))
    browser.click("nav a", "Engine")
    browser.click("#engine tbody button")
    timeline = browser.wait("document.querySelector('.timeline')?.textContent")
    assert all(event in timeline for event in ("queued", "admitted: 0 of 9 tokens", "first token", "finished"))
    assert "blocks" in browser.run("document.querySelector('canvas').ariaLabel")
    assert browser.run(
        """(() => {
          const box = document.querySelector('.map .scroll');
          const width = box.clientWidth;
          box.firstChild.style.height = '2000px';
          return box.scrollHeight > box.clientHeight && box.clientWidth === width;
        })()"""
    ), "a map that is scrolled becomes narrower than it was drawn"
    browser.press("Escape")
    browser.wait("!document.querySelector('.timeline')")
    browser.run("sessionStorage.setItem('octavo-api-key', 'b-key'); location.hash = '#chat'")
    browser.click("nav a", "Engine")
    assert "right observe" in browser.wait(
        "document.querySelector('#engine .note').textContent.includes('right') && "
        "document.querySelector('#engine .note').textContent"
    )
    browser.click("#key-button")
    browser.click("#key")
    browser.write("a-key")
    browser.press("Enter")
    browser.wait("document.querySelector('#engine canvas')")
    browser.run("sessionStorage.clear()")


def test_the_view_of_the_engine_says_that_it_is_paused(browser: Browser, start: Callable[..., ServedEngine]) -> None:
    server = start("")
    browser.open(f"{server.url}/#engine")
    browser.wait("document.querySelector('#engine .figures') !== null")
    assert browser.run("document.querySelector('#engine .paused') === null")
    assert server.ask("", "/pause", b"").status == 200
    shown = browser.wait("document.querySelector('#engine .paused')?.textContent")
    assert shown == "Generation is paused: requests wait until POST /resume."
    assert server.ask("", "/resume", b"").status == 200
    browser.wait("document.querySelector('#engine .paused') === null")
