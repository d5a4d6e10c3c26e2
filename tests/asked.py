"""One completion on its way as a client sees it: what came so far, its end, how to leave it."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from core.sampling_params import SamplingParams
from engine.executor.mock_tokens import expected_tokens
from tests.router_server import smollm2_text

ANSWER_TIMEOUT_S = 120.0
"""Generous: a test fails by it only where a client would hang."""


def prompt_of(length: int, salt: int) -> list[int]:
    """Return token ids of which no block begins another salt's prompt."""
    return [1000 + (salt * 7177 + at * 7919) % 40_000 for at in range(length)]


def mock_answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return what the mock executor must answer, by its oracle."""
    text = smollm2_text()
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0, eos_token_ids=text.eos_token_ids
    )
    return list(expected_tokens(prompt, sampling, vocab_size=text.vocab_size))


class Asked:
    """A greedy completion of token ids, on a connection and a thread of its own.

    Attributes:
        tokens: ids that came so far.
        status: HTTP's, None until the head came.
        error: api.md's error object, of the body or of the stream's last event.
        path: the `dovetail` object of a complete answer.
        failure: why there is neither: the connection broke.

    Args:
        disaggregate: the header's wish; "always" takes the fabric where there is a prefill worker.
    """

    def __init__(
        self,
        url: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stream: bool = True,
        disaggregate: str = "auto",
        **fields: object,
    ) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.tokens: list[int] = []
        self.status: int | None = None
        self.error: dict[str, Any] | None = None
        self.path: dict[str, Any] = {}
        self.failure = ""
        self._is_stream = stream
        self._is_over = False
        self._changed = threading.Condition()
        parts = urlsplit(url)
        assert parts.hostname
        self._connection = http.client.HTTPConnection(
            parts.hostname, parts.port, timeout=ANSWER_TIMEOUT_S
        )
        self._connection.connect()
        self._socket: socket.socket = self._connection.sock
        body = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "stream": stream,
            **fields,
        }
        headers = {
            "content-type": "application/json",
            "x-dovetail-trace": "1",
            "x-dovetail-disaggregate": disaggregate,
        }
        self._connection.request("POST", "/v1/completions", msgspec.json.encode(body), headers)
        self._thread = threading.Thread(target=self._read, name="client", daemon=True)
        self._thread.start()

    @property
    def is_whole(self) -> bool:
        """Whether it was answered, without an error."""
        return self._is_over and self.status == 200 and not self.error and not self.failure

    def wait_for_tokens(self, count: int) -> None:
        """Return once so many tokens have come; asserts that they do."""
        self._wait(lambda: len(self.tokens) >= count or self._is_over)
        assert len(self.tokens) >= count, self.report()

    def end(self) -> Asked:
        """Return itself once it ended, in whatever way; asserts that it does not hang."""
        self._wait(lambda: self._is_over)
        self._thread.join()
        return self

    def whole(self) -> list[int]:
        """Return the tokens once it was answered without an error."""
        self.end()
        assert self.is_whole, self.report()
        return self.tokens

    def expect_mock_answer(self) -> None:
        """Assert that it was answered, and that every token is what the mock's oracle says."""
        assert self.whole() == mock_answer(self.prompt, self.max_tokens), self.report()

    def expect_mock_answer_or_503(self) -> None:
        """Assert that it was answered right, or broke off right with a typed, retriable error."""
        self.end()
        right = mock_answer(self.prompt, self.max_tokens)
        if self.is_whole:
            assert self.tokens == right, self.report()
            return
        assert self.error is not None, self.report()
        assert self.error["code"] in ("worker_lost", "no_worker"), self.report()
        assert self.status in (200, 503), self.report()
        assert self.tokens == right[: len(self.tokens)], self.report()

    def leave(self) -> None:
        """Go away, as a client who was killed: the kernel closes the connection."""
        with contextlib.suppress(OSError):  # its own end has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def report(self) -> str:
        """Return what came of it."""
        what = self.error or self.failure or ("whole" if self._is_over else "still running")
        return f"{self.status}, {len(self.tokens)} of {self.max_tokens} tokens, {what}, {self.path}"

    def _wait(self, is_there: Callable[[], bool]) -> None:
        with self._changed:
            came = self._changed.wait_for(is_there, ANSWER_TIMEOUT_S)
        assert came, f"nothing more within {ANSWER_TIMEOUT_S:g} s: {self.report()}"

    def _read(self) -> None:
        try:
            self._take(self._connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            self.failure = repr(error)
        finally:
            self._connection.close()
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _take(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        if response.status != 200 or not self._is_stream:
            self._take_object(response.read())
            return
        for line in response:
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data:"):
                self._take_object(line[5:])
        if self.error is None:
            self.failure = "the stream ended early"

    def _take_object(self, data: bytes) -> None:
        whole = msgspec.json.decode(data)
        with self._changed:
            self.error = whole.get("error")
            self.path = whole.get("dovetail") or self.path
            for choice in whole.get("choices", ()):
                self.tokens += choice.get("token_ids") or []
            self._changed.notify_all()
