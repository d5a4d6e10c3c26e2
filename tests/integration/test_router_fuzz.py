"""Whatever is sent, every answer has the one error shape or is as asked, and none is a 5xx."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from router.web.openapi.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.router_server import serving_in_thread, smollm2_text
from tests.scripted_dispatcher import ScriptedDispatcher, saying

TEXT = smollm2_text()
PATHS: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
VALID: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "0"]), inner)
    ),
    max_leaves=8,
)
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the base URL of a router."""
    with serving_in_thread(ScriptedDispatcher(saying(TEXT, "Hi."))) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    """Yield a client of it."""
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        yield client


def expect_clean(answer: httpx.Response) -> None:
    if answer.status_code == 200:
        assert '"finish_reason":"error"' not in answer.text
        return
    assert 400 <= answer.status_code < 500, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_bodies_of_known_fields_with_any_values(client: httpx.Client, path: str) -> None:
    names = PATHS[path].__struct_fields__
    before = psutil.Process().memory_info().rss

    @SETTINGS
    @given(st.dictionaries(st.sampled_from(names) | st.text(max_size=5), VALUES, max_size=4))
    def fuzz(fields: dict[str, Any]) -> None:
        for body in (fields, VALID[path] | fields):
            raw = json.dumps(body)  # as clients do: lone surrogates become escapes
            headers = {"content-type": "application/json"}
            expect_clean(client.post(path, content=raw, headers=headers))

    fuzz()
    assert psutil.Process().memory_info().rss - before < 64 << 20


@pytest.mark.parametrize("path", PATHS)
def test_bodies_of_any_bytes(client: httpx.Client, path: str) -> None:
    valid = json.dumps(VALID[path]).encode()

    @SETTINGS
    @given(
        st.binary(max_size=200)
        | st.tuples(st.integers(0, len(valid)), st.binary(max_size=3)).map(
            lambda cut: valid[: cut[0]] + cut[1] + valid[cut[0] :]
        )
    )
    def fuzz(raw: bytes) -> None:
        expect_clean(client.post(path, content=raw))

    fuzz()


def test_paths_queries_and_methods(client: httpx.Client) -> None:
    @SETTINGS
    @given(
        st.text(max_size=20).map(
            lambda text: quote(text.encode("utf-8", "surrogatepass"), safe="")
        ),
        st.sampled_from(["/{}", "/v1/models/{}", "/health?{}", "/v1/completions/{}", "/version/"]),
        st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]),
    )
    def fuzz(text: str, shape: str, method: str) -> None:
        answer = client.request(method, str(client.base_url) + shape.format(text))
        expect_clean(answer)
        if shape == "/health?{}":
            assert answer.status_code == (200 if method == "GET" else 405)

    fuzz()


def test_garbage_on_the_socket(client: httpx.Client) -> None:
    start = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

    @SETTINGS
    @given(
        st.sampled_from([b"", start, start[:40], start + b"2\r\n{}\r\n"]), st.binary(max_size=99)
    )
    def fuzz(begin: bytes, rest: bytes) -> None:
        with socket.create_connection(("127.0.0.1", client.base_url.port or 0), 60) as sock:
            sock.sendall(begin + rest)
            sock.shutdown(socket.SHUT_WR)
            with sock.makefile("rb") as answers:
                raw = answers.read()
        assert raw == b"" if not begin + rest else raw.startswith(b"HTTP/1.1 4"), raw
        assert b'{"error":{' in raw or not raw

    fuzz()


def test_the_document_holds(url: str) -> None:
    """Requests made from the document, good ones and slightly wrong ones."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    count = 0
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()

        @settings(SETTINGS, max_examples=20 if operation.body else 3)
        @given(operation.as_strategy() | operation.as_strategy(generation_mode=NEGATIVE))
        def fuzz(case: schemathesis.Case[Any]) -> None:
            case.call_and_validate(checks=CHECKS)

        fuzz()
        count += 1
    assert count == 14


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
NEGATIVE = schemathesis.GenerationMode.NEGATIVE
