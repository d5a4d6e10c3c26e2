"""POST /drain and POST /role: passed on whole, or refused by the field that is wrong."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from core.clock import SystemClock
from core.config import Config
from core.messages import DrainWorker, SwitchRole
from core.worker_record import Role
from router.web.app import create_app
from tests.router_server import ON_UVLOOP, configured, serving, smollm2_text
from tests.scripted_dispatcher import ScriptedDispatcher, saying

pytestmark = pytest.mark.anyio

TEXT = smollm2_text()


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the loop that the router process runs on."""
    return ON_UVLOOP


async def test_orders_are_passed_on() -> None:
    dispatcher = ScriptedDispatcher(saying(TEXT, "x"))
    async with serving(dispatcher) as client:
        drained = await client.post("/drain", json={"worker": "d0", "deadline_s": 5})
        assert (drained.status_code, drained.json()) == (200, {"worker": "d0", "order": "drain"})
        assert (await client.post("/drain", json={"worker": "d1"})).status_code == 200
        switched = await client.post("/role", json={"worker": "d0", "role": "both"})
        assert (switched.status_code, switched.json()) == (200, {"worker": "d0", "order": "role"})
        forced = {"worker": "d0", "role": "prefill", "force": True}
        assert (await client.post("/role", json=forced)).status_code == 200
    assert dispatcher.forced == [False, False, False, True]
    assert dispatcher.orders == [
        ("d0", DrainWorker(5.0)),
        ("d1", DrainWorker(60.0)),
        ("d0", SwitchRole(Role.BOTH)),
        ("d0", SwitchRole(Role.PREFILL)),
    ]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/drain", {}, "worker"),
        ("/drain", {"worker": 3}, "worker"),
        ("/drain", {"worker": "d0", "deadline_s": -1}, "deadline_s"),
        ("/drain", {"worker": "d0", "deadline": 5}, "deadline"),
        ("/drain", {"worker": "d0", "force": "yes"}, "force"),
        ("/role", {"worker": "d0"}, "role"),
        ("/role", {"worker": "d0", "role": "boss"}, "role"),
        ("/role", {"worker": "d0", "role": "both", "now": True}, "now"),
    ],
)
async def test_slips_name_their_field(path: str, body: dict[str, Any], param: str) -> None:
    dispatcher = ScriptedDispatcher(saying(TEXT, "x"))
    async with serving(dispatcher) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert dispatcher.orders == []


async def test_an_order_wants_a_key_where_the_api_does() -> None:
    dispatcher = ScriptedDispatcher(saying(TEXT, "x"))
    async with serving(dispatcher, configured(api={"keys": ("secret",)})) as client:
        assert (await client.post("/drain", json={"worker": "d0"})).status_code == 401
    assert dispatcher.orders == []


@pytest.mark.parametrize("keys", [(), ("secret",)])
async def test_an_order_wants_an_operator_s_key_where_there_are_any(keys: tuple[str, ...]) -> None:
    dispatcher = ScriptedDispatcher(saying(TEXT, "x"))
    api: dict[str, object] = {"keys": keys, "operator_keys": ("boss", "chief")}
    async with serving(dispatcher, configured(api=api)) as client:
        for key, status in (("secret", 403), ("chief", 200)):
            given = {"authorization": f"Bearer {key}"}
            answer = await client.post("/drain", json={"worker": "d0"}, headers=given)
            assert answer.status_code == status
            assert (await client.get("/v1/models", headers=given)).status_code == 200
        keyless = await client.post("/drain", json={"worker": "d0"})
        assert keyless.status_code == (401 if keys else 403)
    assert len(dispatcher.orders) == 1


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 200), ("::1", 200), ("10.0.0.9", 403)])
async def test_without_keys_orders_come_from_the_same_machine(host: str, status: int) -> None:
    dispatcher = ScriptedDispatcher(saying(TEXT, "x"))
    app = create_app(
        dispatcher=dispatcher,
        text=TEXT,
        config=Config(),
        clock=SystemClock(),
        registry=CollectorRegistry(),
    )
    from_host = httpx.ASGITransport(app, client=(host, 5000))
    async with httpx.AsyncClient(transport=from_host, base_url="http://router") as client:
        answer = await client.post("/drain", json={"worker": "d0"})
    assert answer.status_code == status
    assert bool(dispatcher.orders) == (status == 200)
