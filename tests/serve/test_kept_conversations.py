"""Conversations that a browser keeps: several tabs, and no room for them all."""

import pytest
from chatting import connect, kept, say, settings, wait_for_answer

pytestmark = pytest.mark.slow


def test_two_tabs_keep_each_others_conversations(page, tab, site):
    other = tab()
    connect(other, site)

    def begin(one, text):
        one.send("Page.bringToFront")
        one.click("#new")
        settings(one, max_tokens=3)
        say(one, text)
        wait_for_answer(one)

    begin(page, "First")
    other.wait("document.querySelector('#conversations').innerText.includes('First')")
    begin(other, "Second")
    page.wait("document.querySelector('#conversations').innerText.includes('Second')")
    assert page.text("article") == "You\nFirst", "the other tab's stays in the other tab"
    begin(page, "Third")
    other.wait("document.querySelector('#conversations').innerText.includes('Third')")
    assert [one["title"] for one in kept(page)] == ["Third", "Second", "First"]
    page.click("#conversations li:last-child button:last-child")
    begin(other, "Fourth")
    assert [one["title"] for one in kept(page)] == ["Fourth", "Third", "Second"]
    other.wait("!document.querySelector('#conversations').innerText.includes('First')")
    other.close()


def test_what_has_no_room_is_told_and_the_open_conversation_stays(page, site):
    page.do(
        """localStorage.setItem("modicum-conversations", JSON.stringify(Array.from({ length: 50 }, (_, at) =>
            ({ id: `${at}`, title: `number ${at}`, messages: [{ role: "user", content: "Go on" }] }))))"""
    )
    connect(page, site)
    page.click("#new")
    assert page.text("#error") == "Dropped to make room: number 49."
    assert [one["title"] for one in kept(page)] == ["New conversation", *(f"number {at}" for at in range(49))]
    page.click("#conversations li:last-child button")
    page.do(
        """(() => {
            const set = Storage.prototype.setItem;
            Storage.prototype.setItem = function (place, value) {
                if (value.length > 2000) throw new DOMException("full", "QuotaExceededError");
                set.call(this, place, value);
            };
        })()"""
    )
    settings(page, max_tokens=3)
    say(page, "Stay")
    wait_for_answer(page, 3)
    *others, opened = kept(page)
    assert (opened["title"], opened["messages"][1]["content"]) == ("number 48", "Stay")
    assert [one["title"] for one in others] == ["New conversation", *(f"number {at}" for at in range(len(others) - 1))]
    assert 10 < len(others) < 40
    assert all(f"number {at}" in page.text("#error") for at in range(len(others) - 1, 48))
