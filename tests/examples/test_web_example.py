"""The page in headless Chromium. Needs chromium, and npm to fetch what examples/web/package.json names."""

import re
import shutil
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlencode

import pytest

pytestmark = pytest.mark.slow
WEB = Path(__file__).parents[2] / "examples" / "web"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def page(exported, tmp_path_factory):
    """A function that opens the page with a message, and returns the document when it has been answered."""
    for program in ("chromium", "npm"):
        assert shutil.which(program), f"{program} is not installed: apt install chromium npm"
    place = tmp_path_factory.mktemp("web") / "site"
    shutil.copytree(WEB, place, ignore=shutil.ignore_patterns("node_modules", "model"))
    install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(install, cwd=place, check=True, capture_output=True, timeout=240)
    shutil.copytree(exported[1], place / "model")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=place))
    Thread(target=server.serve_forever, daemon=True).start()

    def page(**given):
        address = f"http://127.0.0.1:{server.server_port}/index.html?{urlencode(given)}"
        profile = f"--user-data-dir={place.parent / 'profile'}"
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", profile]
        # the page's clock runs ahead while it waits, and stops while it works
        command += ["--virtual-time-budget=120000", "--dump-dom", address]
        return subprocess.run(command, capture_output=True, text=True, timeout=150, check=True).stdout

    yield page
    server.shutdown()


def test_the_page_says_the_tokens_that_the_checkpoint_says(page, exported, goes_on):
    checkpoint, _ = exported
    for text in ("A model", "What does it say elsewhere? 1, 2, 3."):
        document = page(text=text, tokens=24)
        asked = checkpoint.tokenizer.render([{"role": "user", "content": text}], add_generation_prompt=True).ids
        wanted = goes_on(asked, 24)
        assert wanted
        found = re.search(r'<output[^>]*data-ids="([\d ]*)"', document)
        assert found, document[:2000]
        assert [int(token) for token in found[1].split()] == wanted


def test_a_model_that_is_not_there_is_told_in_the_page(page):
    assert "It does not run here: " in page(model="elsewhere/")
