"""What operators order of a worker. The router passes it on; `/status` shows what follows."""

from __future__ import annotations

import math

import msgspec

from core.addresses import is_loopback
from core.errors import RequestError
from core.ids import WorkerId
from core.messages import DrainWorker, SwitchRole, WorkerOrder
from core.worker_record import Role
from router.api.fields import FieldReader, parse_body, refuse
from router.web.asgi import JSON, Receive, Scope, Send, check_json_content, read_body, send_bytes
from router.web.bearer_keys import BearerKeys
from router.web.context import ApiContext
from router.web.openapi.answers import Ordered
from router.web.openapi.requests import DrainRequest, RoleRequest
from router.web.routing import Answer, Operation, Route


class OrderRoutes:
    """The endpoints."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._operator_keys = BearerKeys(context.config.api.operator_keys)

    def routes(self) -> list[Route]:
        """Return them."""
        return [
            Route("POST", "/drain", self._drain, _DRAIN),
            Route("POST", "/role", self._role, _ROLE),
        ]

    async def _drain(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = await self._reader(scope, receive)
        worker_id = _worker_of(reader)
        default = self._context.config.control_plane.drain_s
        deadline_s = reader.number("deadline_s", default, 0.0, math.inf)
        self._pass_on(reader, worker_id, DrainWorker(deadline_s))
        await _answer(send, worker_id, "drain")

    async def _role(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = await self._reader(scope, receive)
        worker_id = _worker_of(reader)
        role = reader.text("role")
        if role not in tuple(Role):
            refuse("role", role, " or ".join(repr(one.value) for one in Role))
        self._pass_on(reader, worker_id, SwitchRole(Role(role)))
        await _answer(send, worker_id, "role")

    def _pass_on(self, reader: FieldReader, worker_id: WorkerId, order: WorkerOrder) -> None:
        is_forced = reader.boolean("force", default=False)
        _refuse_unknown(reader)
        self._context.dispatcher.order(worker_id, order, is_forced=is_forced)

    async def _reader(self, scope: Scope, receive: Receive) -> FieldReader:
        if self._operator_keys:
            self._check_is_operator(scope)
        elif not self._context.config.api.keys:
            _check_is_near(scope)
        check_json_content(scope)
        max_bytes = self._context.config.http.max_body_bytes
        return FieldReader(parse_body(await read_body(scope, receive, max_bytes)))

    def _check_is_operator(self, scope: Scope) -> None:
        if not self._operator_keys.has(scope):
            msg = "authorization: an order wants 'Bearer' and one of api.operator_keys"
            raise RequestError(msg, status=403, code="orders_not_allowed")


def _check_is_near(scope: Scope) -> None:
    """Without keys, whoever reaches the API may ask it, but not take its workers away."""
    host = scope["client"][0] if scope["client"] else ""
    if not is_loopback(host):
        msg = f"orders from {host}: without api.keys they must come from the router's own machine"
        raise RequestError(msg, status=403, code="orders_not_allowed")


async def _answer(send: Send, worker_id: WorkerId, order: str) -> None:
    answer = Ordered(worker=worker_id, order=order)
    await send_bytes(send, 200, msgspec.json.encode(answer), [JSON])


def _worker_of(reader: FieldReader) -> WorkerId:
    worker_id = reader.text("worker")
    if worker_id is None:
        msg = "worker: is required, its id as /status shows it"
        raise RequestError(msg, param="worker", code="missing_required_parameter")
    return WorkerId(worker_id)


def _refuse_unknown(reader: FieldReader) -> None:
    """An order that is not wholly understood is not passed on."""
    for name in reader.unknown():
        refuse(name, reader.raw(name), "left out: an order has no such field")


_DRAIN = Operation(
    "Have a worker take nothing new, finish what runs or hand it over, and end.",
    "workers",
    {200: (Answer("The worker was told.", Ordered),)},
    body=DrainRequest,
)
_ROLE = Operation(
    "Have a worker finish or hand over what its role took, and take the work of another role.",
    "workers",
    {200: (Answer("The worker was told.", Ordered),)},
    body=RoleRequest,
)
