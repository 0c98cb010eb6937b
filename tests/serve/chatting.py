"""The chat's page as a person uses it."""

import json


def connect(page, site):
    page.open(site.address)
    page.wait("document.querySelector('#model').innerText.startsWith('nano')")


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


def kept(page):
    return page.do("JSON.parse(localStorage.getItem('modicum-conversations'))")
