"""The chat in a real browser: a conversation, stop, retry, errors, probabilities, a narrow window."""

import pytest
from chatting import kept, say, settings, wait_for_answer

from modicum.generate import SamplingParams
from modicum.serve import Access

pytestmark = pytest.mark.slow
NO_END = "{'0': -100, '3': -100}"


def ask_for_a_long_answer(page):
    """It is still coming."""
    page.do(
        "(() => { const there = window.fetch; window.fetch = (path, options) => there(path, options?.body ? "
        f"{{...options, body: JSON.stringify({{...JSON.parse(options.body), logit_bias: {NO_END}}})}} : options) }})()"
    )
    settings(page, max_tokens=900)
    say(page, "Go on")
    page.wait("document.querySelectorAll('article')[1]?.querySelector('.said').textContent.length > 20")


def test_a_conversation_is_held_and_kept(page, site, generator):
    settings(page, temperature=0, max_tokens=12)
    say(page, "What is <b>a port</b>?")
    question, answer = wait_for_answer(page)
    assert question == "What is <b>a port</b>?"
    assert page.do("document.querySelectorAll('article b').length") == 0
    ids = generator.tokenizer.render([{"role": "user", "content": question}], add_generation_prompt=True).ids
    assert answer == generator.generate([ids], SamplingParams(temperature=0, top_p=0.95, max_new_tokens=12))[0].text
    say(page, "And two?")
    assert wait_for_answer(page, 4)[:2] == [question, answer]
    page.click("#new")
    say(page, "Another")
    wait_for_answer(page)
    page.open(site.address)
    assert page.do("document.querySelectorAll('#conversations li').length") == 2
    page.click("#conversations li:last-child button")
    assert page.do("document.querySelectorAll('article').length") == 4
    page.click("#conversations li:last-child button:last-child")
    assert page.do("document.querySelectorAll('#conversations li').length") == 1


def test_stop_ends_an_answer_and_frees_its_slot_and_retry_asks_again(page, site):
    ask_for_a_long_answer(page)
    assert page.do("document.querySelector('#send').disabled")
    page.click("#stop")
    site.wait_until_idle(3)
    _, stopped = wait_for_answer(page)
    assert page.text("article:last-child .how") == "stopped"
    settings(page, max_tokens=5, temperature=0)
    page.click("#retry")
    page.wait("document.querySelector('article:last-child .how').innerText.includes('cut at the limit')")
    assert wait_for_answer(page)[1] != stopped


def test_a_click_on_the_open_conversation_leaves_its_answer_alone(page):
    ask_for_a_long_answer(page)
    page.click("#conversations button[aria-pressed=true]")
    assert not page.do("document.querySelector('#stop').disabled")
    page.click("#stop")
    wait_for_answer(page)
    settings(page, max_tokens=5)
    page.click("#retry")
    said = wait_for_answer(page)
    assert said[0] == "Go on"
    assert said == [message["content"] for message in kept(page)[0]["messages"]]


def test_an_answer_that_cannot_be_kept_locks_nothing(page):
    settings(page, max_tokens=3)
    say(page, "Hello")
    wait_for_answer(page)
    page.do("Storage.prototype.setItem = () => { throw new Error('no') }")
    page.click("#retry")
    wait_for_answer(page)
    assert not page.do("document.querySelector('#log').hasAttribute('aria-busy')")
    assert not page.do("document.querySelector('#send').disabled")
    assert len(page.complaints) == 1
    page.complaints.clear()


def test_an_error_is_told_and_the_question_stays(page):
    say(page, "word " * 3000)
    page.wait("!document.querySelector('#error').hidden")
    assert "no room for an answer" in page.text("#error")
    assert page.do("document.querySelectorAll('article').length") == 1
    assert not page.do("document.querySelector('#retry').disabled")
    page.complaints.clear()  # the browser's own note of the status 400


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("line.error(new TypeError('network error'))", "The answer broke off."),
        ("line.close()", "The answer broke off."),
        ("line.enqueue(bytes({ error: { message: 'out of memory' } }))", "out of memory"),
    ],
)
def test_an_answer_that_breaks_off_says_so_and_can_be_asked_again(page, end, why):
    page.do(
        """(() => {
            const there = window.fetch;
            window.bytes = (object) => new TextEncoder().encode(`data: ${JSON.stringify(object)}\n\n`);
            window.fetch = async () => {
                window.fetch = there;
                return new Response(new ReadableStream({ start: (line) => { window.line = line; } }));
            };
        })()"""
    )
    settings(page, max_tokens=5, temperature=0)
    say(page, "Go on")
    page.wait("Boolean(window.line)")
    page.do("line.enqueue(bytes({ choices: [{ delta: { content: 'Half an' } }] }))")
    page.wait("document.querySelector('#log').textContent.endsWith('Half an')")
    page.do(end)
    assert wait_for_answer(page) == ["Go on", "Half an"]
    assert (page.text("#error"), page.text("article:last-child .how")) == (why, "broken off")
    assert kept(page)[0]["messages"][1]["how"] == "broken off"
    page.click("#retry")
    assert wait_for_answer(page)[1] != "Half an"
    assert "cut at the limit" in page.text("article:last-child .how")
    assert page.text("#error") == ""


def test_probabilities_are_shown_and_reached_by_keys(page):
    page.do("document.querySelector('#probabilities').checked = true")
    settings(page, max_tokens=10, seed=1)
    say(page, "Hello")
    wait_for_answer(page)
    spans = "[...document.querySelectorAll('article:last-child .token')]"
    assert page.do(f"{spans}.length") > 3
    assert page.do(f"{spans}.every((one) => /^token p[0-5]$/.test(one.className))")
    assert page.do(f"{spans}.filter((one) => one.tabIndex === 0).length") == 1
    page.do(f"{spans}[0].focus()")
    assert len(page.text("#alternatives").splitlines()) == 6
    page.press("ArrowRight")
    assert page.do(f"document.activeElement === {spans}[1]")
    page.press("Escape")
    assert page.do("document.querySelector('#alternatives').hidden")


def test_a_turn_changes_nothing_that_was_there_before_it(page):
    """A screen reader reads what is put into the log, and a keyboard stands on what is there."""
    settings(page, max_tokens=3)
    say(page, "One")
    wait_for_answer(page)
    page.do(
        """(() => {
            const log = document.querySelector("#log");
            window.before = [...log.children];
            window.put = [];
            new MutationObserver((all) => all.forEach((one) => put.push(...one.addedNodes)))
                .observe(log, { childList: true });
        })()"""
    )
    say(page, "Two")
    wait_for_answer(page, 4)
    page.do("document.querySelector('#retry').focus()")
    page.click("#retry")
    assert page.do("document.activeElement.id") == "log", "its button went out"
    wait_for_answer(page, 4)
    assert page.do("put.map((one) => one.className)") == ["user", "assistant", "assistant"]
    assert page.do("before.every((one, at) => one === document.querySelector('#log').children[at])")
    page.do("document.querySelector('#conversations button').focus()")
    page.do("window.held = document.activeElement")
    page.click("#retry")
    wait_for_answer(page, 4)
    assert page.do("!held.isConnected"), "the list is made anew when an answer ends"
    assert page.do("document.activeElement.id === held.id")


def test_a_narrow_window_scrolls_nothing_sideways_and_shows_what_is_needed(page):
    page.resize(360, 640)
    say(page, "x" * 500)
    wait_for_answer(page)
    assert page.do("document.documentElement.scrollWidth") <= 360
    for selector in ("#question", "#send", "#stop", "#new"):
        box = f"document.querySelector('{selector}').getBoundingClientRect()"
        assert page.do(f"(({{left, right}}) => 0 <= left && right <= 360)({box})"), selector
        assert page.do(f"(({{top, bottom}}) => 0 <= top && bottom <= 640)({box})"), selector
    page.click("#settings summary")
    assert page.do("document.documentElement.scrollWidth") <= 360


def test_dark_and_light(page, site):
    back = "getComputedStyle(document.body).backgroundColor"
    first = page.do(back)
    page.click("#theme")
    assert page.do(back) != first
    page.open(site.address)
    assert page.do(back) != first, "the choice is kept"


def test_every_control_has_a_name_and_keys_reach_it(page):
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "spinbutton", "checkbox", "combobox", "log", "main"}
    controls = [node for node in nodes if node.get("role", {}).get("value") in roles and not node.get("ignored")]
    assert len(controls) >= 8
    assert [node["role"]["value"] for node in controls if not node.get("name", {}).get("value")] == []
    reached = set()
    for _ in range(20):
        page.press("Tab")
        reached.add(page.do("document.activeElement.id"))
    assert {"new", "log", "question", "send", "theme"} <= reached


def test_a_server_with_a_key_asks_for_it(tab, start):
    with start(access=Access(keys=("the-key",))) as server:
        page = tab()
        page.open(server.address)
        page.wait("document.querySelector('#key-dialog').open")
        page.do("document.querySelector('#key-value').value = 'the-key'")
        page.click("#key-dialog button")
        page.wait("document.querySelector('#model').innerText.startsWith('nano')")
        page.click("#key")
        page.do("document.querySelector('#key-value').value = ''")
        page.do("document.querySelector('#key-dialog').close()")  # as Escape does
        page.do("new Promise((done) => setTimeout(done, 200))")  # the dialog says later that it was closed
        assert page.do("sessionStorage.getItem('modicum-key')") == "the-key"
        settings(page, max_tokens=3)
        say(page, "Hello")
        wait_for_answer(page)
