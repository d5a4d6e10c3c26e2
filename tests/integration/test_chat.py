"""deploy.cli.chat over HTTP: pipes, terminals, Ctrl-C, and answers that go wrong."""

from __future__ import annotations

import http.server
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from core.environment import child_environment
from deploy.cli.main import main

PATIENCE_S = 30.0


class Api(http.server.ThreadingHTTPServer):
    """Answers each chat request with `events`; `None` among them waits until the client left."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.events: Sequence[bytes | None] = [text("Hi"), text(" you"), b"[DONE]"]
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.client_left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Api  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._start()
        self.wfile.write(b'{"object":"list","data":[{"id":"m","object":"model"}]}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(json.loads(body))
        self.server.headers.append(dict(self.headers.items()))
        self._start(self.server.status)
        try:
            self._send_events()
        except ConnectionError:  # it left what was on its way
            self.server.client_left.set()

    def _send_events(self) -> None:
        for event in self.server.events:
            if event is None:
                self.connection.recv(1)  # returns when the client closes
                self.server.client_left.set()
                return
            prefix = b"" if self.server.status != 200 else b"data: "
            self.wfile.write(prefix + event + b"\n\n")

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Say nothing."""

    def _start(self, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()


def text(content: str) -> bytes:
    return json.dumps({"choices": [{"delta": {"content": content}}]}).encode()


@pytest.fixture
def api() -> Iterator[Api]:
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def without_openai_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def pipe_in(monkeypatch: pytest.MonkeyPatch, message: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(message), encoding="utf-8"))


def test_pipe_gets_one_answer(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, b" Hello\nthere\n")
    flags = ["--system", "Be brief.", "--max-tokens", "9", "--temperature", "0", "--api-key", "k"]
    assert main(["chat", "--url", api.url, *flags]) == 0
    assert capsys.readouterr().out == "Hi you\n"
    assert api.bodies == [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hello\nthere"},
            ],
            "max_tokens": 9,
            "temperature": 0.0,
            "stream": True,
        }
    ]
    assert api.headers[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("status", "events", "said"),
    [
        (429, [b'{"error":{"message":"all workers are busy"}}'], "all workers are busy (HTTP 429)"),
        (404, [b"<html>"], "is no Dovetail router (HTTP 404)"),
        (200, [text("Hi"), b'{"error":{"message":"worker lost"}}'], "worker lost"),
        (200, [text("Hi")], "the answer broke off"),
        (200, [b"{"], "not the OpenAI API's"),
    ],
)
def test_failure_is_one_line(
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    events: Sequence[bytes | None],
    said: str,
) -> None:
    api.status, api.events = status, events
    pipe_in(monkeypatch, b"Hello")
    assert main(["chat", "--url", api.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dovetail: ")
    assert said in line


def test_a_key_that_is_missing_is_a_slip_that_says_how_to_give_it(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.status, api.events = 401, [b'{"error":{"message":"authorization: must be a key"}}']
    pipe_in(monkeypatch, b"Hello")
    assert main(["chat", "--url", api.url]) == 2
    assert capsys.readouterr().err == (
        "dovetail: authorization: must be a key (HTTP 401); give --api-key, or set OPENAI_API_KEY\n"
    )


@pytest.mark.parametrize("message", [b"", b" \n", b"\xff"])
def test_nothing_to_answer_is_a_slip(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], message: bytes
) -> None:
    pipe_in(monkeypatch, message)
    assert main(["chat", "--url", api.url]) == 2
    assert "stdin is" in capsys.readouterr().err
    assert api.bodies == []


def test_control_characters_do_not_reach_the_terminal(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.events = [text("a\x1b[2Jb\x9bc\n\td\x7f"), b"[DONE]"]
    pipe_in(monkeypatch, b"Hello")
    assert main(["chat", "--url", api.url]) == 0
    assert capsys.readouterr().out == "a[2Jbc\n\td\n"


class Terminal:
    """`dovetail chat` in a pseudo-terminal, started with SIGINT ignored, as background jobs are."""

    def __init__(self, url: str) -> None:
        self._fd, other = pty.openpty()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy", "chat", "--url", url],
            stdin=other,
            stdout=other,
            stderr=other,
            env=child_environment({"TERM": "dumb"}),
            start_new_session=True,
        )
        signal.signal(signal.SIGINT, before)
        os.close(other)
        self._seen = b""

    def until(self, wanted: bytes) -> None:
        """Read until `wanted` came; what came before it is forgotten."""
        while wanted not in self._seen:
            ready, _, _ = select.select([self._fd], [], [], PATIENCE_S)
            assert ready, f"{wanted!r} did not come after {self._seen!r}"
            self._seen += os.read(self._fd, 4096)
        self._seen = self._seen.partition(wanted)[2]

    def type(self, line: bytes) -> None:
        os.write(self._fd, line)

    def close(self) -> int:
        code = self.process.wait(10)
        os.close(self._fd)
        return code


def test_ctrl_c_stops_the_answer_and_not_the_program(api: Api) -> None:
    api.events = [text("Once upon"), None]
    terminal = Terminal(api.url)
    terminal.until(b"you> ")
    terminal.type(b"A story\n")
    terminal.until(b"Once upon")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until(b"[stopped]")
    assert api.client_left.wait(5), "the request was not aborted"
    terminal.until(b"you> ")
    api.events = [text("Fine"), b"[DONE]"]
    terminal.type(b"And now?\n")
    terminal.until(b"Fine")
    assert [message["content"] for message in api.bodies[1]["messages"]] == [
        "A story",
        "Once upon",
        "And now?",
    ]
    terminal.until(b"you> ")
    terminal.type(b"/new\n")
    terminal.until(b"you> ")
    terminal.type(b"Afresh\n")
    terminal.until(b"Fine")
    assert len(api.bodies[2]["messages"]) == 1
    terminal.until(b"you> ")
    terminal.type(b"\x04")
    assert terminal.close() == 0


def test_refused_message_is_not_kept(api: Api) -> None:
    api.status, api.events = 503, [b'{"error":{"message":"try later"}}']
    terminal = Terminal(api.url)
    terminal.until(b"you> ")
    terminal.type(b"One\n")
    terminal.until(b"dovetail: try later (HTTP 503)")
    terminal.until(b"you> ")
    api.status, api.events = 200, [text("Fine"), b"[DONE]"]
    terminal.type(b"Two\n")
    terminal.until(b"Fine")
    assert [message["content"] for message in api.bodies[1]["messages"]] == ["Two"]
    terminal.until(b"you> ")
    terminal.type(b"\x04")
    assert terminal.close() == 0


def test_a_reader_who_left_ends_the_answer_quietly(api: Api) -> None:
    api.events = [*[text("x" * 4096)] * 40, None]  # more than a pipe holds, and no end
    command = [sys.executable, "-m", "deploy", "chat", "--url", api.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        assert chat.stderr is not None
        chat.stdin.write(b"hello")
        chat.stdin.close()
        assert chat.stdout.read(30) == b"x" * 30
        chat.stdout.close()
        try:
            assert chat.wait(20) == 0
        finally:
            chat.kill()
        assert chat.stderr.read() == b""
    assert api.client_left.wait(20)


def asked_with(api: Api, monkeypatch: pytest.MonkeyPatch, *flags: str) -> str | None:
    """Run a chat; return the Authorization header of its request."""
    pipe_in(monkeypatch, b"Hello")
    assert main(["chat", *flags]) == 0
    return api.headers[-1].get("authorization")


def test_openai_s_variables_are_the_defaults_and_flags_win(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{api.url}/v1")
    assert asked_with(api, monkeypatch) is None
    monkeypatch.setenv("OPENAI_API_KEY", "from the shell")
    assert asked_with(api, monkeypatch) == "Bearer from the shell"
    assert asked_with(api, monkeypatch, "--api-key", "given") == "Bearer given"
    assert asked_with(api, monkeypatch, "--api-key", "") is None
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert asked_with(api, monkeypatch, "--url", api.url) == "Bearer from the shell"
    assert capsys.readouterr().out == "Hi you\n" * 5


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        (("OPENAI_BASE_URL", "ftp://x"), "OPENAI_BASE_URL 'ftp://x': must be like http://127"),
        (("OPENAI_API_KEY", "two\nlines"), "OPENAI_API_KEY): must be printable ASCII"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "status"])
def test_a_slip_in_a_variable_is_one_line(
    command: str,
    variable: tuple[str, str],
    said: str,
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", api.url)
    monkeypatch.setenv(*variable)
    pipe_in(monkeypatch, b"Hello")
    assert main([command]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
