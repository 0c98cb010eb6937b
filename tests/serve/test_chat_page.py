"""The page in a real browser: a conversation, stop, retry, an error, probabilities, a narrow window, runs that grow."""

import json
import os

import pytest
from chromium import PATH, browser

from modicum.generate import SamplingParams
from modicum.serve import Access

pytestmark = pytest.mark.slow
NO_END = "{'0': -100, '3': -100}"


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    assert PATH, "these tests need chromium"
    with browser(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    (root / "first" / "pretrain" / "checkpoints" / "step-00000010").mkdir(parents=True)
    lines = [{"kind": "train", "step": s, "loss": 8 - s / 10, "tokens_per_second": 1000.0 + s} for s in range(1, 11)]
    write(root / "first" / "pretrain" / "metrics.jsonl", lines)
    (root / "first" / "evaluate").mkdir()
    sample = {"messages": [{"role": "text", "content": "Ports"}, {"role": "assistant", "content": "<b>are</b> doors"}]}
    (root / "first" / "evaluate" / "results.json").write_text(json.dumps({"samples": [sample]}))
    return root


def write(path, lines, mode="w"):
    with path.open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture(scope="module")
def site(start, runs):
    with start(runs=runs) as server:
        yield server


@pytest.fixture
def page(tab, site):
    page = tab()
    page.open(site.address)
    page.do("localStorage.clear(); sessionStorage.clear()")
    page.open(site.address)
    page.wait("document.querySelector('#model').innerText.startsWith('nano')")
    yield page
    assert page.complaints == []
    assert {url.split("/")[2] for url in page.requests if url.startswith("http")} == {site.address.split("/")[2]}


def settings(page, **values):
    for name, value in values.items():
        page.do(f"document.querySelector('#{name}').value = {json.dumps(str(value))}")


def say(page, text):
    page.do("document.querySelector('#question').focus()")
    page.type(text)
    page.press("Enter")


def wait_for_answer(page, count=2):
    page.wait(f"document.querySelectorAll('article').length === {count} && document.querySelector('#stop').disabled")
    return page.do("[...document.querySelectorAll('article .said')].map((one) => one.textContent)")


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
    page.do(
        "(() => { const there = window.fetch; window.fetch = (path, options) => there(path, options?.body ? "
        f"{{...options, body: JSON.stringify({{...JSON.parse(options.body), logit_bias: {NO_END}}})}} : options) }})()"
    )
    settings(page, max_tokens=900)
    say(page, "Go on")
    page.wait("document.querySelectorAll('article')[1]?.querySelector('.said').textContent.length > 20")
    assert page.do("document.querySelector('#send').disabled")
    page.click("#stop")
    site.wait_until_idle(3)
    _, stopped = wait_for_answer(page)
    assert page.text("article:last-child .how") == "stopped"
    settings(page, max_tokens=5, temperature=0)
    page.click("#retry")
    page.wait("document.querySelector('article:last-child .how').innerText.includes('cut at the limit')")
    assert wait_for_answer(page)[1] != stopped


def test_an_error_is_told_and_the_question_stays(page):
    say(page, "word " * 3000)
    page.wait("!document.querySelector('#error').hidden")
    assert "no room for an answer" in page.text("#error")
    assert page.do("document.querySelectorAll('article').length") == 1
    assert not page.do("document.querySelector('#retry').disabled")
    page.complaints.clear()  # the browser's own note of the status 400


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


def test_runs_are_shown_and_grow_while_they_train(page, runs):
    page.wait("!document.querySelector('#show-runs').hidden")
    page.click("#show-runs")
    page.wait("document.querySelectorAll('figure svg').length === 2")
    assert "7 at update 10" in page.text("#charts")
    assert "1 checkpoints" in page.text("#run-state")
    assert page.do("document.querySelector('#samples').textContent.includes('<b>are</b> doors')")
    metrics = runs / "first" / "pretrain" / "metrics.jsonl"
    write(metrics, [{"kind": "train", "step": 11, "loss": 3.5}, {"kind": "heldout", "step": 11, "loss": 4.0}], "a")
    page.wait("document.querySelector('#charts').innerText.includes('3.5 at update 11')", 10)
    assert page.do("document.querySelectorAll('circle').length") == 1
    with metrics.open("a") as file:
        file.write('{"kind": "tr\n')
    page.wait("document.querySelector('#run-state').innerText.includes('1 damaged lines')", 10)
    again = runs / "again"
    write(again, [{"kind": "train", "step": 1, "loss": 2.25}])
    os.replace(again, metrics)
    page.wait("document.querySelector('#charts').innerText.includes('2.25 at update 1')", 10)


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
