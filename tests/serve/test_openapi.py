"""The published description and the server agree: schemathesis finds no failure of ours and no undescribed answer."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


def check(address, count, mode, only=""):
    """`count` requests to every operation, most of them to the model that is there; statuses that were seen."""
    seen = {}
    for result in schemathesis.openapi.from_url(f"{address}/openapi.json").get_all_operations():
        operation = result.ok()
        if not operation.path.startswith(only):
            continue

        _ask(operation, count, mode, seen)
    return seen


def _ask(operation, count, mode, seen):
    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
    @given(operation.as_strategy(generation_mode=mode), st.integers(0, 3))
    def ask(case, dice):
        if isinstance(case.body, dict) and dice:
            case.body["model"] = "nano"
            if isinstance(case.body.get("n"), int):
                case.body["n"] = min(case.body["n"], 2)
            for name in ("max_tokens", "max_completion_tokens"):
                if isinstance(case.body.get(name), int):
                    case.body[name] = min(case.body[name], 8)
        response = case.call_and_validate(checks=CHECKS, timeout=60)
        seen.setdefault(operation.path, set()).add(response.status_code)

    ask()


def test_what_is_described_is_what_is_answered(server):
    seen = check(server.address, 4, GenerationMode.POSITIVE)
    assert seen["/v1/models"] == {200}
    assert {"/v1/chat/completions", "/v1/completions", "/health", "/metrics"} <= seen.keys()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_that_a_machine_thinks_of_breaks_the_server(server, mode):
    seen = check(server.address, 150, mode, only="/v1/c")
    assert 400 in seen["/v1/chat/completions"]
    assert mode is GenerationMode.NEGATIVE or 200 in seen["/v1/completions"]
    server.wait_until_idle()
