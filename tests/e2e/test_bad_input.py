"""Bad input of every kind, through a real router: the one error shape, and no trace of it after.

Each answer has the status that its slip deserves; no process writes a stack trace; the cluster
answers afterwards and holds nothing.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.cluster import Cluster, Up

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BOTH = (CHAT, COMPLETIONS)
MODES = {
    "ignore": ("--executor", "mock"),
    "reject": ("--executor", "mock", "--set", "api.unknown_fields=reject"),
}


@pytest.fixture(scope="module", autouse=True)
def no_traces(up: Up) -> Iterator[None]:
    """After all tests: no process wrote a stack trace, died, or holds a block."""
    yield
    for arguments in MODES.values():
        cluster = up(*arguments)
        cluster.wait_until_idle()
        said = cluster.launched.transcript()
        assert "Traceback" not in said, said
        assert "died" not in said, said


@pytest.fixture(params=MODES)
def cluster(request: pytest.FixtureRequest, up: Up) -> Iterator[Cluster]:
    """Yield each cluster; it must serve after whatever the test sent."""
    cluster = up(*MODES[request.param])
    yield cluster
    body = {"prompt": "hello", "max_tokens": 2}
    assert cluster.http.post(cluster.url + COMPLETIONS, json=body).status_code == 200


@pytest.fixture
def ignoring(up: Up) -> Cluster:
    return up(*MODES["ignore"])


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error object of an answer that must be one."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    assert 'File "' not in answer.text
    return error


def fields_for(path: str, **fields: object) -> dict[str, object]:
    """Return a body that is right but for `fields`."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    return {**(chat if path == CHAT else {"prompt": "hi"}), "max_tokens": 2, **fields}


BODIES = {
    "empty": b"",
    "cut": b'{"prompt": "x"',
    "no JSON": b"prompt=x",
    "two objects": b'{"prompt":"x"}{}',
    "an array": b"[]",
    "null": b"null",
    "a text": b'"x"',
    "bad UTF-8": b'{"prompt":"\xff"}',
    "UTF-16": '{"prompt":"x"}'.encode("utf-16"),
    "half a surrogate pair": b'{"prompt":"\\ud800"}',
    "NaN": b'{"prompt":"x","temperature":NaN}',
    "Infinity": b'{"prompt":"x","temperature":Infinity}',
    "beyond a double": b'{"prompt":"x","temperature":1e999}',
    "5,000 digits": b'{"prompt":"x","seed":' + b"9" * 5000 + b"}",
    "deep arrays": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "deep and cut": b"[" * 100_000,
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bodies_that_are_no_json_object(ignoring: Cluster, path: str, body: bytes) -> None:
    answer = ignoring.http.post(ignoring.url + path, content=body)
    assert error_of(answer, 400)["code"] == "invalid_json"


SHARED_SLIPS: list[dict[str, object]] = [
    *({"n": value} for value in (0, -1, 129, 1.5, "2", True, [1])),
    *({"max_tokens": value} for value in (0, -5, 1.0, "4", True)),
    *({"temperature": value} for value in (-0.1, 2.1, "hot", True, {})),
    *({"top_p": value} for value in (0, -1, 1.1, "x")),
    *({"top_k": value} for value in (-2, 1.5, "x")),
    *({"min_p": value} for value in (-0.1, 1.1)),
    *({"presence_penalty": value} for value in (-2.1, 2.1)),
    *({"frequency_penalty": value} for value in (-2.1, 2.1)),
    *({"repetition_penalty": value} for value in (0, -1)),
    *({"seed": value} for value in (1.5, 1 << 64, -(1 << 63) - 1, "x")),
    *({"logit_bias": value} for value in ([1], "x", {"-1": 1}, {"49152": 1}, {"x": 1})),
    *({"logit_bias": {key: value}} for key, value in (("1", 101), ("1", "x"), ("9" * 5000, 1))),
    *({"stop": value} for value in (1, [1], [""], ["a"] * 65, {})),
    *({"stop_token_ids": value} for value in (["a"], [-1], [49152], 5)),
    *({"min_tokens": value} for value in (-1, "x")),
    *({"stream": value} for value in ("yes", 1)),
    *({"bad_words": value} for value in (3, [3])),
    *({"cache_salt": value} for value in ("", 5)),
    {"stream": True, "stream_options": []},
    {"priority": 1 << 40},
    {"ignore_eos": 1},
    {"model": 5},
    {"truncate_prompt_tokens": 0},
    {"return_token_ids": "yes"},
]
CHAT_SLIPS: list[dict[str, object]] = [
    *({"messages": value} for value in ("hi", 5, {}, [1], [[]], [{}])),
    *({"messages": [{"role": role, "content": "x"}]} for role in ("king", 5, None)),
    *(
        {"messages": [{"role": "user", "content": content}]}
        for content in (5, {}, [5], [{"type": "text"}], [{"type": "text", "text": 5}])
    ),
    {"messages": [{"role": "user", "content": "x", "name": 5}]},
    {"logprobs": 1},
    {"logprobs": True, "top_logprobs": 21},
    {"top_logprobs": 2},
    {"chat_template_kwargs": []},
]
COMPLETION_SLIPS: list[dict[str, object]] = [
    *({"prompt": value} for value in (5, True, {}, [1, "a"], [[1], "a"], [1.5], [True], [None])),
    *({"prompt": value} for value in ([-1], [49152], [1 << 70], ["a"] * 257)),
    *({"logprobs": value} for value in (-1, 21, True)),
]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, fields) for path in BOTH for fields in SHARED_SLIPS),
        *((CHAT, fields) for fields in CHAT_SLIPS),
        *((COMPLETIONS, fields) for fields in COMPLETION_SLIPS),
    ],
    ids=lambda value: str(value)[:50],
)
def test_values_of_a_wrong_kind_or_size(
    ignoring: Cluster, path: str, fields: dict[str, object]
) -> None:
    answer = ignoring.http.post(ignoring.url + path, json=fields_for(path, **fields))
    error = error_of(answer, 400)
    assert error["code"] == "invalid_value"
    *_, name = fields
    assert error["param"].startswith(name)
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"echo": True}),
        *((path, {"response_format": {"type": "json_object"}}) for path in BOTH),
        *((path, {"guided_json": {"type": "object"}}) for path in BOTH),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(
    cluster: Cluster, path: str, fields: dict[str, object]
) -> None:
    answer = cluster.http.post(cluster.url + path, json=fields_for(path, **fields))
    error = error_of(answer, 400)
    assert error["code"] == "unsupported_parameter"
    assert [error["param"]] == list(fields)


@pytest.mark.parametrize("path", BOTH)
def test_unknown_fields(cluster: Cluster, path: str, up: Up) -> None:
    answer = cluster.http.post(cluster.url + path, json=fields_for(path, wisdom=9, temprature=1))
    if cluster is up(*MODES["ignore"]):
        assert answer.status_code == 200
        assert answer.headers["x-dovetail-ignored"] == "wisdom, temprature"
        return
    error = error_of(answer, 400)
    assert (error["param"], error["code"]) == ("wisdom", "unknown_parameter")


@pytest.mark.parametrize("path", BOTH)
def test_what_is_missing(cluster: Cluster, path: str) -> None:
    wanted = "messages" if path == CHAT else "prompt"
    error = error_of(cluster.http.post(cluster.url + path, json={"max_tokens": 2}), 400)
    assert (error["param"], error["code"]) == (wanted, "missing_required_parameter")
    error = error_of(cluster.http.post(cluster.url + path, json={wanted: []}), 400)
    assert error["code"] == "empty_prompt"


@pytest.mark.parametrize("path", BOTH)
def test_models_that_are_not_served(cluster: Cluster, path: str) -> None:
    for name in ("gpt-4o", "", "../../etc/passwd", "x" * 10_000):
        answer = cluster.http.post(cluster.url + path, json=fields_for(path, model=name))
        assert error_of(answer, 404)["code"] == "model_not_found"


def test_prompts_and_answers_beyond_the_context(cluster: Cluster) -> None:
    for fields in ({"prompt": [1] * 9000}, {"prompt": "a " * 100_000}, {"max_tokens": 10**30}):
        body = fields_for(COMPLETIONS, **fields)
        answer = cluster.http.post(cluster.url + COMPLETIONS, json=body)
        assert error_of(answer, 400)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_bodies_that_are_huge(ignoring: Cluster, path: str) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(33):
            yield b" " * (1 << 20)

    body = b" " * ((32 << 20) + 1)
    for content in (body, parts()):
        try:
            answer = ignoring.http.post(ignoring.url + path, content=content)
        except httpx.WriteError:  # the router did not wait for the rest
            continue
        assert error_of(answer, 413)["code"] == "request_too_large"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "application/xml", "x"])
def test_content_types(ignoring: Cluster, path: str, kind: str) -> None:
    headers = {"content-type": kind}
    answer = ignoring.http.post(ignoring.url + path, content=b"{}", headers=headers)
    assert error_of(answer, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/models/%ff%00", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", CHAT, 405),
        ("PUT", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/metrics", 405),
    ],
)
def test_routes_and_methods(cluster: Cluster, method: str, path: str, status: int) -> None:
    answer = cluster.http.request(method, cluster.url + path)
    code = error_of(answer, status)["code"]
    allowed = {405: ["method_not_allowed"], 404: ["not_found", "model_not_found"]}
    assert code in allowed[status]
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("x-dovetail-disaggregate", "perhaps", "x-dovetail-disaggregate"),
        ("x-dovetail-disaggregate", "\xff", "x-dovetail-disaggregate"),
    ],
)
def test_debug_headers(ignoring: Cluster, name: str, value: str, param: str) -> None:
    headers = [(name.encode(), value.encode("latin-1"))]
    answer = ignoring.http.post(ignoring.url + CHAT, json=fields_for(CHAT), headers=headers)
    assert error_of(answer, 400)["param"] == param


@pytest.mark.parametrize("name", [b"\xff\xfe", b"a" * 200, b"a b", b'"<script>'])
def test_unsafe_request_ids_are_replaced(ignoring: Cluster, name: bytes) -> None:
    headers = [(b"x-request-id", name)]
    answer = ignoring.http.post(ignoring.url + CHAT, json=fields_for(CHAT), headers=headers)
    assert answer.status_code == 200
    given = answer.headers["x-request-id"]
    assert given.encode("latin-1") != name
    assert given.isalnum()


POST = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n".encode()
SHORT = b"content-length: 50\r\n\r\n{}"
RAW = {
    "no HTTP": (b"\x00\x01\x02\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 100, 400),
    "length of letters": (POST + b"content-length: abc\r\n\r\n{}", 400),
    "negative length": (POST + b"content-length: -5\r\n\r\n{}", 400),
    "two lengths": (POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400),
    "length of 100 GB": (POST + b"content-length: 100000000000\r\n\r\n{}", 413),
    "shorter than said": (POST + SHORT, 400),
    "chunk without a size": (POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n", 400),
    "unknown method": (b"BREW /health HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "20,000 headers": (POST + b"x: y\r\n" * 20_000 + b"\r\n", 431),
    "path of 70 kB": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
    "path of raw bytes": (b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "content type of raw bytes": (
        POST + b"connection: close\r\ncontent-type: \xff\r\ncontent-length: 2\r\n\r\n{}",
        415,
    ),
}


@pytest.mark.parametrize(("sent", "status"), RAW.values(), ids=RAW)
def test_what_no_client_library_would_send(ignoring: Cluster, sent: bytes, status: int) -> None:
    """Where HTTP itself is broken the answer has the one error shape too."""
    where = urlsplit(ignoring.url)
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        connection.sendall(sent)
        if sent.endswith(SHORT):
            connection.shutdown(socket.SHUT_WR)
        answer = HTTPResponse(connection)
        answer.begin()
        body = answer.read()
    assert answer.status == status, body
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"


EXTREMES: list[dict[str, object]] = [
    *({"repetition_penalty": value} for value in (5e-324, 1e-39, 1e39, 1e308)),
    *({"temperature": value} for value in (5e-324, 1e-39)),
    *({"top_p": value} for value in (5e-324, 1e-39)),
    *({"min_p": value} for value in (5e-324, 1)),
    *({"top_k": value} for value in (1 << 31, 1 << 32, 10**30)),
    *({"seed": value} for value in (-(1 << 63), (1 << 64) - 1)),
    *({"min_tokens": value, "max_tokens": None} for value in (1 << 32, 10**30)),
    {"logit_bias": {str(token_id): -100 for token_id in range(49152)}},
    {"stop_token_ids": list(range(49152)), "min_tokens": 1},
    {"priority": -(1 << 31)},
    {"n": 128},
    {"cache_salt": "x" * 100_000},
    {"stop": ["x" * 1_000_000]},
]


@pytest.mark.parametrize("executor", [("--executor", "mock"), ("--colocated", "1")], ids=str)
@pytest.mark.parametrize("fields", EXTREMES, ids=lambda fields: str(fields)[:40])
def test_extremes_that_are_allowed_end_no_worker(
    up: Up, executor: tuple[str, ...], fields: dict[str, object]
) -> None:
    """On the real sampler too: a NaN there would end the step, and with it everybody's request."""
    cluster = up(*executor)
    answer = cluster.http.post(cluster.url + COMPLETIONS, json=fields_for(COMPLETIONS, **fields))
    assert answer.status_code == 200, answer.text
    assert "died" not in cluster.launched.transcript()
