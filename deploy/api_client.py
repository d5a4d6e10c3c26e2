"""A small client of the HTTP API for the command line. Reads no proxy variables."""

from __future__ import annotations

import http.client
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from core.errors import DovetailError, UsageError

START_ADVICE = "start one with `make up` or `dovetail up`, or give its --url"

T = TypeVar("T")


class Unreachable(DovetailError):  # noqa: N818 - reads as a state
    """Nothing answers HTTP there."""


class ApiRefusal(DovetailError):  # noqa: N818
    """The API answered with an error object, or not in the API's words.

    Attributes:
        status: HTTP's, 0 where it answered 200 first.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to a choice."""

    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """One choice in a chunk."""

    delta: Delta = Delta()
    finish_reason: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Inner part of api.md's error object."""

    message: str


class Chunk(msgspec.Struct, frozen=True):
    """One event of a chat stream; fields that nobody here reads are skipped.

    Attributes:
        dovetail: the request's path, where `x-dovetail-trace: 1` asked for it.
    """

    choices: list[Choice] = []
    dovetail: dict[str, Any] | None = None
    error: ErrorBody | None = None

    @property
    def text(self) -> str:
        """The new text of the only choice."""
        return "".join(choice.delta.content or "" for choice in self.choices)


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class _Error(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiAddress(msgspec.Struct, frozen=True):
    """Where the API is, and by whose leave it answers.

    Attributes:
        url: of the router, with or without `http://` and `/v1`.
        url_source: the flag or variable that the URL came from, for messages.
        api_key: empty where the API wants none.
    """

    url: str
    url_source: str = "--url"
    api_key: str = ""


class ApiClient:
    """One connection a call; blocking.

    Args:
        advice: what to do when nothing answers; ends that message.
        timeout_s: silence after which a call fails.
    """

    def __init__(
        self,
        address: ApiAddress,
        *,
        advice: str = "",
        timeout_s: float = 600.0,
    ) -> None:
        url, api_key = address.url, address.api_key
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            msg = f"{address.url_source} {url!r}: must be like http://127.0.0.1:8000"
            raise UsageError(msg)
        if not (api_key.isascii() and api_key.isprintable()):
            msg = "--api-key (or OPENAI_API_KEY): must be printable ASCII"
            raise UsageError(msg)
        self._is_https = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._advice = f"; {advice}" if advice else ""
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = f"{parts.scheme}://{parts.netloc}{self._prefix}"

    def get(self, path: str, wanted: type[T]) -> T:
        """Return the JSON at `path` as `wanted`.

        Raises:
            Unreachable, ApiRefusal: one line each.
            UsageError: the API wants another key.
        """
        with self._request("GET", path, None, {}) as response:
            return self._decode(response.read(), wanted)

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """Send JSON to `path`; its answer says no more than that it was taken.

        Raises:
            Unreachable, ApiRefusal: one line each.
            UsageError: the API wants another key.
        """
        data = msgspec.json.encode(body)
        with self._request("POST", path, data, {"content-type": "application/json"}) as response:
            response.read()

    def model(self) -> str:
        """Return the name of the served model."""
        models = self.get("/v1/models", _Models).data
        if not models:
            msg = f"{self.url} serves no model yet: no worker has joined"
            raise ApiRefusal(msg)
        return models[0].id

    def chat(
        self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Iterator[Chunk]:
        """Stream a chat completion; closing the iterator closes the connection, which aborts it.

        Raises:
            Unreachable, ApiRefusal: also for an error event in the stream, or one that breaks off.
            UsageError: the API wants another key.
        """
        data = msgspec.json.encode({**body, "stream": True})
        sent = {"content-type": "application/json", **(headers or {})}
        with self._request("POST", "/v1/chat/completions", data, sent) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].strip()
                if event == b"[DONE]":
                    return
                chunk = self._decode(event, Chunk)
                if chunk.error is not None:
                    raise ApiRefusal(chunk.error.message)
                yield chunk
        msg = "the answer broke off: the cluster closed the connection"
        raise ApiRefusal(msg)

    @contextmanager
    def _request(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> Generator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, self._prefix + path, data, {**self._headers, **headers})
            response = connection.getresponse()
            if response.status == http.HTTPStatus.UNAUTHORIZED:
                msg = f"{self._refusal(response)}; give --api-key, or set OPENAI_API_KEY"
                raise UsageError(msg)
            if response.status != 200:
                raise ApiRefusal(self._refusal(response), response.status)
            yield response
        except (OSError, http.client.HTTPException) as error:
            msg = f"no cluster answers at {self.url} ({_reason(error)}){self._advice}"
            raise Unreachable(msg) from None
        finally:
            connection.close()

    def _refusal(self, response: http.client.HTTPResponse) -> str:
        body = response.read()
        try:
            message = msgspec.json.decode(body, type=_Error).error.message
        except msgspec.DecodeError:
            message = f"{self.url} is no Dovetail router"
        return f"{message} (HTTP {response.status})"

    def _decode(self, data: bytes, wanted: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=wanted)
        except msgspec.DecodeError:
            msg = f"{self.url} answered in a way that is not the OpenAI API's"
            raise ApiRefusal(msg) from None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
