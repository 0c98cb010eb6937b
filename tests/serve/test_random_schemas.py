"""Random schemas, sampled at temperature 1 from random weights: an answer that is finished is valid, every time."""

import json
from collections import Counter

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from json_schemas import SCHEMAS


def check(server, count):
    """Ask for `count` schemas, two answers each; how they ended."""
    ended = Counter()

    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
    @given(SCHEMAS)
    def ask(schema):
        asked = {
            "model": "nano",
            "messages": [{"role": "user", "content": "go"}],
            "temperature": 1.0,
            "seed": ended.total(),
            "n": 2,
            "max_tokens": 400,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        }
        with server.http() as http:
            response = http.post("/v1/chat/completions", json=asked)
        if response.status_code == 400:
            assert response.json()["error"]["code"] == "unsupported_grammar", response.text
            ended["refused"] += 1
            return
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            ended[choice["finish_reason"]] += 1
            if choice["finish_reason"] == "stop":
                answer = json.loads(choice["message"]["content"])
                jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(answer)

    ask()
    return ended


CHECKER = jsonschema.FormatChecker(["date", "uuid", "ipv4", "email"])


def test_finished_answers_are_valid(server):
    ended = check(server, 8)
    assert ended["stop"] >= 8


@pytest.mark.slow
def test_the_finished_answers_of_200_schemas_are_valid(server):
    ended = check(server, 200)
    print(dict(ended))
    assert ended["stop"] >= 300
    assert ended["refused"] <= 5
