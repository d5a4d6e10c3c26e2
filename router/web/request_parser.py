"""Bytes to HTTP/1.1 requests: llhttp (by httptools) with limits, and each refusal as one error.

bytes -> RequestParser.feed -> sink.head, sink.body ..., sink.end; and again for the next request
"""

from __future__ import annotations

import re
from typing import NoReturn, Protocol
from urllib.parse import unquote

import httptools
import msgspec

from core.errors import RequestError

MAX_HEAD_BYTES = 64 << 10
"""Of a request line and its headers; of what stands between two parts of a body, or behind it
(chunks' extensions, trailers); and of each as far as it came, since llhttp collects a line until it
ends."""

_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*")
"""RFC 9110, 7.2: a name or an address, and a port; empty where the target has no host."""


class RequestHead(msgspec.Struct, frozen=True):
    """A request line and its headers.

    Attributes:
        path: percent-decoded, without the query.
        raw_path, query: as they came.
        headers: names in lower case.
        version: "1.1" or "1.0".
        keeps_alive: another request may follow on the connection.
        expects_continue: the client waits for `100 Continue` before it sends the body.
    """

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    version: str
    keeps_alive: bool
    expects_continue: bool


class RequestSink(Protocol):
    """Takes what the parser found, in order."""

    def head(self, head: RequestHead) -> None:
        """A request begins."""
        ...

    def body(self, data: bytes) -> None:
        """Some of its body."""
        ...

    def end(self) -> None:
        """It is complete."""
        ...


class RequestParser:
    """One connection's parser; of no use after it refused.

    Attributes:
        has_begun: some bytes of a request came, and it is not complete.
        in_head: `has_begun`, and its head is not complete.
    """

    __slots__ = (
        "_expects_continue",
        "_has_body_now",
        "_headers",
        "_method",
        "_num_bytes",
        "_parser",
        "_refusal",
        "_sink",
        "_target",
        "has_begun",
        "in_head",
    )

    def __init__(self, sink: RequestSink) -> None:
        self._sink = sink
        self._parser = _new_parser(self)
        self._refusal: RequestError | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._method = b""
        self._target = b""
        self._num_bytes = 0  # of the head, or since the last part of the body
        self._has_body_now = False  # what is being parsed held some of a body
        self._expects_continue = False
        self.has_begun = False
        self.in_head = False

    def feed(self, data: bytes | memoryview) -> None:
        """Parse; the sink is told of what became complete.

        Raises:
            RequestError: 400, 405, 431 or 505; the connection cannot be understood any further.
        """
        rest: bytes | memoryview = data
        while rest:
            rest = self._feed(rest)

    def _feed(self, data: bytes | memoryview) -> bytes:
        """Parse; return what has to be parsed anew."""
        self._has_body_now = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            offset: int = upgrade.args[0]
            return self._without_upgrade(bytes(data[offset:]))
        except httptools.HttpParserCallbackError:
            if self._refusal is None:
                raise  # a defect here, not in the request
            raise self._refusal from None
        except httptools.HttpParserError as error:
            msg = f"the request is not HTTP/1.1: {error}"
            raise RequestError(msg, code="malformed_request") from None
        if self.has_begun and not self._has_body_now:
            self._count(len(data))
        return b""

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Nothing is upgraded here, and HTTP lets a server answer as if it had not been asked. But
        llhttp takes what follows the head, a body too, for the other protocol's. Return the request
        again, without what asked for one."""
        version = self._parser.get_http_version()
        self._parser = _new_parser(self)
        lines = [b"%b %b HTTP/%b" % (self._method, self._target, version.encode())]
        for name, value in self._headers:
            if name == b"connection":
                lines.append(b"connection: " + value.lower().replace(b"upgrade", b""))
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", rest])

    # -- callbacks of httptools ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.has_begun = self.in_head = True
        self._target = b""
        self._headers = []
        self._num_bytes = 0
        self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        self._target += url

    def on_header(self, name: bytes, value: bytes | None) -> None:
        value = value or b""
        self._count(len(name) + len(value) + 4)
        if not self.in_head:
            return  # a trailer; nobody reads those
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        version = parser.get_http_version()
        self._method = parser.get_method()
        if version not in ("1.0", "1.1"):
            self._refuse(f"HTTP/{version}: only HTTP/1.1 is spoken here", 505, "http_version")
        if self._method == b"CONNECT":
            self._refuse("CONNECT: this is no proxy", 405, "method_not_allowed")
        self._check_host(version)
        if parser.should_upgrade():
            return  # see _parse_anew
        self.in_head = False
        self._num_bytes = 0
        raw_path, _, query = _origin_form(self._target).partition(b"?")
        path = raw_path.decode("latin-1")
        self._sink.head(
            RequestHead(
                method=self._method.decode("ascii"),
                path=unquote(path) if "%" in path else path,
                raw_path=raw_path,
                query=query,
                headers=self._headers,
                version=version,
                keeps_alive=version == "1.1" and parser.should_keep_alive(),
                expects_continue=self._expects_continue and version == "1.1",
            )
        )

    def on_body(self, body: bytes) -> None:
        self._has_body_now = True
        self._num_bytes = 0
        self._sink.body(body)

    def on_message_complete(self) -> None:
        if self.in_head:
            return  # see _parse_anew
        self.has_begun = False
        self._sink.end()

    def _check_host(self, version: str) -> None:
        """Proxies route by the host: one who reads another line than we do is led astray."""
        hosts = [value for name, value in self._headers if name == b"host"]
        if not hosts and version == "1.0":
            return
        if len(hosts) != 1 or _HOST.fullmatch(hosts[0].strip()) is None:
            shown = ", ".join(repr(value.decode("latin-1")) for value in hosts) or "absent"
            msg = (
                f"host = {shown[:200]}: must be one header that holds a name, or a name and a port"
            )
            self._refuse(msg, 400, "invalid_host")

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_HEAD_BYTES:
            msg = f"request line, headers and trailers are too long: at most {MAX_HEAD_BYTES} bytes"
            self._refuse(msg, 431, "request_header_too_large")

    def _refuse(self, message: str, status: int, code: str) -> NoReturn:
        self._refusal = RequestError(message, status=status, code=code)
        raise self._refusal


def _origin_form(target: bytes) -> bytes:
    """Return path and query; proxies may be sent `http://host/path`."""
    target = target.partition(b"#")[0]
    if target.startswith(b"/"):
        return target
    _, scheme, rest = target.partition(b"://")
    if not scheme:
        return target  # `*` and CONNECT's host:port are no route of ours
    before, question_mark, query = rest.partition(b"?")
    _, _, path = before.partition(b"/")
    return b"/" + path + question_mark + query


def _new_parser(target: object) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(target)
    # Bytes after a request with `connection: close` are dropped by the connection; as an error they
    # would spoil this request.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
