"""deploy.address: reading host:port, and telling who can reach it."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from core.addresses import is_loopback
from core.config import load
from core.errors import UsageError
from deploy.address import (
    claim_port,
    claim_ports,
    exposure_warning,
    fabric_warning,
    is_wildcard,
    parse_listen,
    reachable_url,
)
from deploy.cli.main import main
from router.web.server import listen


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("10.0.0.1:7000", ("10.0.0.1", 7000)),
        ("10.0.0.1", ("10.0.0.1", 0)),
        (":7000", ("127.0.0.1", 7000)),
        ("[::1]:7000", ("::1", 7000)),
        ("[::1]", ("::1", 0)),
        ("host:0", ("host", 0)),
    ],
)
def test_listen_is_host_and_port(text: str, parsed: tuple[str, int]) -> None:
    assert parse_listen(text) == parsed


@pytest.mark.parametrize("text", ["host:port", "host:65536", "host:-1", "host:"])
def test_bad_port_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="from 0"):
        parse_listen(text)


def test_loopback() -> None:
    loopback = (
        *("127.0.0.1", "127.0.0.2", "127.255.0.1", "localhost", "LOCALHOST"),
        *("::1", "[::1]", "::ffff:127.0.0.1"),
    )
    assert [host for host in loopback if not is_loopback(host)] == []
    others = ("0.0.0.0", "10.0.0.1", "::", "::ffff:10.0.0.1", "example.org", "")
    assert not any(is_loopback(host) for host in others)


def test_wildcard() -> None:
    assert is_wildcard("0.0.0.0")
    assert not is_wildcard("127.0.0.1")


def test_url_of_a_wildcard_is_loopback() -> None:
    assert reachable_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert reachable_url("::1", 80) == "http://[::1]:80"
    assert reachable_url("10.0.0.1", 80) == "http://10.0.0.1:80"


def test_exposure_without_keys_is_warned_of() -> None:
    open_to_all = load({"http": {"host": "0.0.0.0"}})
    assert "0.0.0.0 without authentication" in (exposure_warning(open_to_all) or "")
    assert exposure_warning(load({})) is None
    assert exposure_warning(load({"http": {"host": "0.0.0.0"}, "api": {"keys": ["k"]}})) is None


def test_a_fabric_that_others_reach_is_warned_of() -> None:
    open_to_all = load({"kv_transfer": {"listen": "10.0.0.1"}})
    assert "the fabric binds to 10.0.0.1" in (fabric_warning(open_to_all) or "")
    assert fabric_warning(load({})) is None


@pytest.mark.parametrize(
    ("argv", "ran"),
    [
        (["up", "--port", "0"], "run_up"),
        (["worker", "--role", "both", "--etcd", "h:1"], "run_worker"),
    ],
)
def test_commands_warn_of_an_open_fabric_before_they_run(
    argv: list[str],
    ran: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run(*_: object, **__: object) -> int:
        return 0

    module = {"run_up": "deploy.launcher.launcher", "run_worker": "deploy.worker.process"}[ran]
    monkeypatch.setattr(f"{module}.{ran}", run)
    for host, warned in (("10.0.0.1", True), ("127.0.0.1", False)):
        assert main([*argv, "--set", f"kv_transfer.listen={host}"]) == 0
        assert ("the fabric binds to 10.0.0.1" in capsys.readouterr().err) == warned


def test_port_in_use_is_refused_and_a_free_one_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = pytest.raises(UsageError, match=f"127.0.0.1:{port}: Address already in use; cho")
        with refused, claim_port("127.0.0.1", port):
            pass
    with claim_port("127.0.0.1", 0) as free:
        assert free > 0


def test_a_claimed_port_is_the_router_s_alone() -> None:
    with claim_port("127.0.0.1", 0) as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):  # its second life too
            router = listen("127.0.0.1", port)
            with router, socket.create_connection(("127.0.0.1", port)):
                pass
    with ExitStack() as stack:
        ports = [stack.enter_context(claim_port("127.0.0.1", 0)) for _ in range(200)]
        assert len(set(ports)) == 200


@pytest.mark.parametrize("host", ["203.0.113.1", "no such host.invalid"])
def test_host_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="cannot bind to"), claim_port(host, 0):
        pass


def test_routers_get_neighbouring_ports_or_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = pytest.raises(UsageError, match=f"127.0.0.1:{port}: Address already in use; cho")
        with refused, claim_ports("127.0.0.1", port - 1, 2):
            pass
    with claim_ports("127.0.0.1", 0, 3) as free:
        assert len(set(free)) == 3
    too_high = pytest.raises(UsageError, match="--routers 3: --port must be at most 65533, not 65")
    with too_high, claim_ports("127.0.0.1", 65534, 3):
        pass
