"""`dovetail drain` and `dovetail role` against a router that plays its part."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest

from core.clock import ManualClock
from core.errors import DovetailError, UsageError
from deploy.api_client import ApiAddress, ApiRefusal
from deploy.cli import orders
from deploy.cli.orders import run_drain, run_role


class Router(ThreadingHTTPServer):
    """Shows one state of its only worker after another, the last one for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.states: list[dict[str, Any] | None] = []
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.refusal: tuple[int, str] | None = None

    @property
    def address(self) -> ApiAddress:
        return ApiAddress(f"http://127.0.0.1:{self.server_address[1]}")

    def status(self) -> dict[str, Any]:
        state = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        return {"workers": [] if state is None else [state]}


class _Handler(BaseHTTPRequestHandler):
    @property
    def _router(self) -> Router:
        return cast("Router", self.server)

    def do_GET(self) -> None:
        self._say(200, self._router.status())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._router.orders.append((self.path, body))
        refusal = self._router.refusal
        status, message = refusal or (200, "")
        self._say(status, {"error": {"message": message}} if refusal else {})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Say nothing."""

    def _say(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    monkeypatch.setattr(orders.time, "sleep", CLOCK.advance)
    with Router() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


CLOCK = ManualClock()


def worker(**changes: Any) -> dict[str, Any]:
    return {"id": "d", "role": "decode", "state": "live", "boot": "b7", "pid": 7, **changes}


def drain(router: Router, *, is_forced: bool = False) -> int:
    return run_drain(router.address, "d", deadline_s=9.0, is_forced=is_forced, clock=CLOCK)


def switch(router: Router) -> int:
    return run_role(router.address, "d", "both", is_forced=False, clock=CLOCK)


def test_drain_returns_once_the_worker_has_left(
    router: Router, capsys: pytest.CaptureFixture[str]
) -> None:
    router.states = [worker(), worker(state="draining"), None]
    assert drain(router) == 0
    assert router.orders == [("/drain", {"worker": "d", "deadline_s": 9.0, "force": False})]
    assert capsys.readouterr().out.splitlines()[-1] == "d has left"


@pytest.mark.parametrize("pid", [7, 8])
def test_another_process_in_its_place_means_that_it_has_left(
    router: Router, capsys: pytest.CaptureFixture[str], pid: int
) -> None:
    """Also where it has the same pid, as in a container."""
    router.states = [worker(), worker(boot="b8", pid=pid)]
    assert drain(router, is_forced=True) == 0
    assert router.orders == [("/drain", {"worker": "d", "deadline_s": 9.0, "force": True})]
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"d has left, and was started again since: pid {pid}"


def test_role_returns_once_the_worker_serves_in_it(
    router: Router, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"role": "both"}
    draining = worker(state="draining")
    router.states = [worker(), worker(), draining, {**draining, **both}, worker(**both)]
    assert switch(router) == 0
    assert router.orders == [("/role", {"worker": "d", "role": "both", "force": False})]
    assert capsys.readouterr().out.splitlines()[-1] == "d has role both"


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (None, "d has left, and never had role both"),
        (worker(boot="b8"), "d ended, and was started again with role decode: order it again"),
        (worker(role="prefill"), "d has role prefill, not both: it got another order meanwhile"),
    ],
)
def test_a_role_that_will_never_come_is_not_waited_for(
    router: Router, last: dict[str, Any] | None, told: str
) -> None:
    router.states = [worker(), worker(), worker(state="draining"), last]
    started = CLOCK.now()
    with pytest.raises(DovetailError, match=told):
        switch(router)
    assert CLOCK.now() - started < 1


def test_a_worker_started_again_with_the_role_has_it(router: Router) -> None:
    router.states = [worker(), worker(state="lost"), worker(boot="b8", role="both")]
    assert switch(router) == 0


def test_one_that_does_not_obey_in_time_is_an_error(router: Router) -> None:
    router.states = [worker()]
    with pytest.raises(DovetailError, match="d has not left within 9 s"):
        drain(router)
    with pytest.raises(DovetailError, match="d does not have role both yet"):
        switch(router)


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        ((404, "worker = 'd': is not known"), UsageError),
        ((409, "worker = 'd': d is the last worker that decodes"), UsageError),
        ((503, "worker 'd' cannot be reached now"), ApiRefusal),
    ],
)
def test_a_refusal_is_told(
    router: Router, refusal: tuple[int, str], kind: type[DovetailError]
) -> None:
    router.states = [worker()]
    router.refusal = refusal
    for order in (drain, switch):
        with pytest.raises(kind, match=re.escape(refusal[1])):
            order(router)
