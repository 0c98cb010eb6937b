"""The report's page: whole, self-contained, accessible, and deaf to whatever a model wrote."""

import copy
import re
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modicum.road.report.page import render_page

VOID = {"meta", "br", "img", "source", "link", "hr"}


class Page(HTMLParser):
    """Every element with its attributes and text; raises when a tag is closed out of order."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, **dict(attrs), "text": ""}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, **attributes):
        wanted = attributes.items()
        return [e for e in self.elements if e["tag"] == tag and all(e.get(key) == value for key, value in wanted)]


def page_of(figures):
    return Page(render_page(figures, dict.fromkeys(figures["training"], ()), "name: harbour\n"))


SECTIONS = [
    "training",
    "heldout",
    "choices",
    "answers",
    "samples",
    "corpus",
    "plan",
    "settings",
    "licences",
]


def test_every_section_stands_on_the_page_and_the_contents_lead_to_it(figures):
    page = page_of(figures)
    assert [section["id"] for section in page.all("section")] == SECTIONS
    ids = {element["id"] for element in page.elements if "id" in element}
    assert {link["href"].removeprefix("#") for link in page.all("a")} <= ids


def test_a_run_without_tuning_leaves_the_page_whole(without_tuning):
    page = page_of(without_tuning)
    absent = {"answers", "samples"}
    assert [section["id"] for section in page.all("section")] == [name for name in SECTIONS if name not in absent]
    assert "chat" not in page.all("main")[0]["text"]


@pytest.mark.parametrize("part", ["heldout", "choices", "corpus", "plan"])
def test_a_part_that_was_not_measured_leaves_the_page_whole(figures, part):
    figures[part] = None
    if part == "heldout":
        figures["headline"]["bits_per_byte"] = {}
    if part == "choices":
        figures["headline"]["choices"] = None
    page = page_of(figures)
    gone = {part, "licences"} if part == "corpus" else {part}
    assert [section["id"] for section in page.all("section")] == [name for name in SECTIONS if name not in gone]


@pytest.mark.parametrize("part", ["chat", "loss"])
def test_half_of_what_is_told_of_answers_stands_alone_with_the_reason_for_the_other(figures, part):
    figures["answers"][part] = None
    figures["not_measured"] = {"answers": "there is <no> room"}
    page = page_of(figures)
    answers = page.all("section", id="answers")[0]["text"]
    assert ("Ended by themselves" in answers) == (part == "loss")
    assert ("nats a token" in answers) == (part == "chat")
    assert "Answers: not measured: there is <no> room." in page.all("main")[0]["text"]
    figures["answers"] = {"chat": None, "loss": None}
    assert not page_of(figures).all("section", id="answers")


def test_the_page_asks_nothing_of_the_network_and_runs_nothing(figures):
    from modicum.road.report.plots import Picture

    pictures = [Picture(name, f"a plot of {name}", b"png", {"(x)": b"png"}) for name in ("a", "b", "c")]
    html = render_page(figures, dict.fromkeys(figures["training"], pictures), "name: harbour\n")
    page = Page(html)
    assert not {element["tag"] for element in page.elements} & {"script", "link", "iframe", "object", "form", "base"}
    for element in page.elements:
        assert not any(key.startswith("on") for key in element)
        for key in ("src", "srcset", "href", "action", "data"):
            assert element.get(key, "#").startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"url\(|@import|https?://", html)
    policy = page.all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy.startswith("default-src 'none'")


def test_tables_and_pictures_say_what_they_are(figures):
    from modicum.road.report.plots import Picture

    pictures = {name: [Picture("a", "loss falls", b"png", {})] for name in figures["training"]}
    page = Page(render_page(figures, pictures, ""))
    assert len(page.all("table")) == len(page.all("caption")) > 5
    assert all("scope" in header for header in page.all("th"))
    assert [image["alt"] for image in page.all("img")] == ["loss falls"] * 2
    assert page.all("html")[0]["lang"] == "en"


def test_scores_are_told_in_plain_words_flattering_or_not(figures):
    text = page_of(figures).all("main")[0]["text"]
    assert "Not distinguishable from chance (25.0 %): the interval covers it." in text
    assert "Above chance (25.0 %), but not distinguishable from counting shared words (35.0 %)." in text
    assert "+7 %" in text  # the plan's 600 s against 560 s measured


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"])).filter(str.strip)
HOSTILE = st.sampled_from(
    [
        "<script>alert(1)</script>",
        "</dd></dl></main><img src=x onerror=alert(1)>",
        "{{ 7 * 7 }}{% raw %}",
        "&lt;b&gt; &amp; \"quotes\" 'too'",
        "<!-- ]]> -->",
        "</style><style>body{display:none}</style>",
    ]
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=TEXTS | HOSTILE, asked=TEXTS | HOSTILE)
def test_what_a_model_wrote_stays_text(figures, said, asked):
    plain = copy.deepcopy(figures)
    tags = [element["tag"] for element in page_of(plain).elements]
    plain["samples"][0]["messages"] = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    plain["samples"][0]["reference"] = said
    page = page_of(plain)
    assert [element["tag"] for element in page.elements] == tags
    assert page.all("dd", **{"class": "user"})[0]["text"] == asked
    assert page.all("dd", **{"class": "assistant"})[0]["text"] == said
    assert page.all("dd", **{"class": "reference"})[0]["text"] == said


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>'])
def test_names_from_the_corpus_and_the_recipe_stay_text(figures, hostile):
    tags = [element["tag"] for element in page_of(figures).elements]
    figures["corpus"]["sources"][0]["licences"] = {
        hostile: {"documents": 1, "bytes": 1},
        "b": {"documents": 1, "bytes": 1},
    }
    figures["corpus"]["warnings"] = [hostile]
    for result in figures["heldout"].values():
        result["domains"][hostile] = result["domains"].pop("novels")
    for result in figures["choices"].values():
        result["per_source"][hostile] = result["per_source"].pop("CWE")
    figures["name"] = hostile
    page = Page(render_page(figures, dict.fromkeys(figures["training"], ()), hostile))
    assert [element["tag"] for element in page.elements] == tags
    assert page.all("h1")[0]["text"] == hostile
    assert page.all("pre")[0]["text"] == hostile


def test_an_empty_answer_is_said_to_be_empty(figures):
    figures["samples"][0]["messages"][-1]["content"] = " \n"
    assert page_of(figures).all("dd", **{"class": "assistant"})[0]["text"] == "(nothing)"


def test_an_answer_that_was_cut_off_says_so(figures):
    assert not page_of(figures).all("dd", **{"class": "cut"})
    figures["samples"][0]["finish_reason"] = "length"
    assert page_of(figures).all("dd", **{"class": "cut"})[0]["text"] == "cut off here"


def test_a_base_model_alone_shows_how_it_goes_on(without_tuning):
    messages = [{"role": "text", "content": "It was a"}, {"role": "assistant", "content": " dark harbour."}]
    without_tuning["samples"] = [{"messages": messages, "reference": " night", "finish_reason": "stop"}]
    page = page_of(without_tuning)
    assert [term["text"] for term in page.all("dt")][-3:] == ["Given", "The model", "The document"]


def test_one_document_has_no_interval(figures):
    whole = page_of(figures).all("section", id="heldout")[0]["text"].count(" to ")
    for result in figures["heldout"].values():
        result["domains"]["novels"] = {**result["domains"]["novels"], "documents": 1}
    assert page_of(figures).all("section", id="heldout")[0]["text"].count(" to ") == whole - 3


def test_what_was_measured_on_one_unit_stands_without_an_interval(figures):
    """As results.json has it: null for both ends of an interval that cannot be known."""
    unknown = {"low": None, "high": None}
    for result in figures["heldout"].values():
        one = {**result["total"], **unknown, "documents": 1}
        result |= {"total": one, "domains": {"novels": one}}
    del figures["answers"]["loss"]["chat_shuffled"]
    for loss in figures["answers"]["loss"].values():
        loss |= unknown
    page = page_of(figures)
    assert "interval" not in page.all("section", id="heldout")[0]["text"]
    answers = page.all("section", id="answers")[0]["text"]
    assert "1.900 nats a token" in answers
    assert " to " not in answers.split("1.900 nats a token")[1]
    assert "lower than the base model’s." in answers
