"""Headless Chromium through its DevTools protocol: enough to use a page as a person does."""

import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from contextlib import ExitStack, contextmanager

from websockets.sync.client import connect

PATH = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


class Page:
    """One tab. `complaints`: what the browser's console, its security policy and its scripts complained about."""

    def __init__(self, socket):
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints = []
        self.requests = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (message := json.loads(self._socket.recv(timeout=30))).get("id") != number:
            self._note(message)
        assert "error" not in message, message
        return message["result"]

    def _note(self, event):
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"])
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def do(self, script):
        """The value of a script, which may be a promise."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition, seconds=20):
        """The value of `condition` once it is true."""
        until = time.monotonic() + seconds
        while not (value := self.do(condition)):
            assert time.monotonic() < until, f"{condition}\n{self.do('document.body.innerText')}\n{self.complaints}"
            time.sleep(0.02)
        return value

    def open(self, url):
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def close(self):
        self.send("Page.close")

    def type(self, text):
        self.send("Input.insertText", text=text)

    def press(self, key, code=None):
        codes = {"Enter": 13, "Tab": 9, "ArrowRight": 39, "Escape": 27}
        shared = {"key": key, "code": code or key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **shared, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **shared)

    def click(self, selector):
        self.do(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector):
        return self.do(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def resize(self, width, height):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)


@contextmanager
def browser(folder):
    """A function that opens a fresh tab."""
    command = [PATH, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={folder}", "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        note = folder / "DevToolsActivePort"
        until = time.monotonic() + 60
        while not (note.exists() and note.read_text().count("\n")):
            assert time.monotonic() < until, "Chromium did not start"
            assert process.poll() is None, "Chromium ended"
            time.sleep(0.05)
        port = note.read_text().split()[0]

        def tab():
            request = urllib.request.Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT")
            with urllib.request.urlopen(request) as answer:
                address = json.load(answer)["webSocketDebuggerUrl"]
            return Page(sockets.enter_context(connect(address, max_size=None)))

        with ExitStack() as sockets:
            yield tab
    finally:
        process.terminate()
        process.wait(20)
