"""All links of a router, and what follows from them: the served model, readiness, views."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from control_plane.rpc.refusals import PeersRefused
from core.errors import RequestError
from core.ids import Boot, WorkerId
from core.kv_layout import summary_difference
from core.messages import SwitchRole, WorkerOrder
from core.worker_record import Role, WorkerRecord
from router.dispatch.interface import ServedModel
from router.dispatch.worker_link import Dial, LinkOwner, LinkState, WorkerLink
from router.policy.staffing import refusal
from router.policy.views import WorkerView

ModelKey = tuple[str, str, int]
"""(name, fingerprint, block size): workers serve one request together only where all are equal."""

_PREFILL = Role.PREFILL
"""An enum's members are slow to look up in its class; this is asked often."""

_MAX_SHOWN = 80
"""Of a name that nobody has."""

_KEY_FIELDS = ("model", "model_fingerprint", "block_size")


_log = logging.getLogger(__name__)


class WorkerTable:
    """Links by worker id; follows the registry.

    The served model is that of the first worker that answers clients (not a prefill worker) whose
    stream opened. It is kept while such a worker of it is open; then it passes to what most of the
    open ones serve, or is kept for workers to come back where none is open.
    """

    def __init__(self, owner: LinkOwner, dial: Dial, refused: PeersRefused) -> None:
        self._owner = owner
        self._refused = refused
        self._dial = dial
        self._links: dict[WorkerId, WorkerLink] = {}
        self._group: asyncio.TaskGroup | None = None
        self._served: ModelKey | None = None
        self._warned: set[WorkerId] = set()
        self._preempted: dict[tuple[WorkerId, Boot], int] = {}

    def __iter__(self) -> Iterator[WorkerLink]:
        """Iterate over all links, in the order of their ids."""
        return iter([self._links[worker_id] for worker_id in sorted(self._links)])

    def get(self, worker_id: WorkerId) -> WorkerLink | None:
        """Return a worker's link; None for an unknown one."""
        return self._links.get(worker_id)

    def order(
        self, worker_id: WorkerId, order: WorkerOrder, *, is_forced: bool, is_strict: bool
    ) -> None:
        """Send a worker an operator's order; see `Dispatcher.order`.

        Args:
            is_strict: whether decode workers need a prefill worker.
        """
        link = self._links.get(worker_id)
        if link is None:
            known = ", ".join(sorted(self._links)) or "none"
            msg = f"worker = {worker_id[:_MAX_SHOWN]!r}: is not known; there are: {known}"
            raise RequestError(msg, status=404, param="worker", code="worker_not_found")
        if not link.is_open:
            msg = f"worker {worker_id!r} cannot be reached now; try again soon"
            raise RequestError(msg, status=503, code="worker_unreachable", retry_after_s=1.0)
        if link.is_leaving and isinstance(order, SwitchRole):
            msg = f"role = {str(order.role)!r}: {worker_id} was ordered to leave, and will"
            raise RequestError(msg, status=409, param="role", code="worker_leaving")
        role = link.lasting_role
        if role is not None and not is_forced:
            others = self._lasting_roles(link)
            refused = refusal(worker_id, role, order, others, is_strict=is_strict)
            if refused is not None:
                raise refused
        link.order(order)

    def _lasting_roles(self, without: WorkerLink) -> list[Role]:
        """Return the roles in which others of the same model serve, and go on serving."""
        key = _model_of(without.record)
        others = (
            link.lasting_role
            for link in self._links.values()
            if link is not without and _model_of(link.record) == key
        )
        return [role for role in others if role is not None]

    def keep_open(self, group: asyncio.TaskGroup) -> None:
        """Open the links, now and as they come, as tasks of `group`."""
        self._group = group
        for link in self._links.values():
            link.spawn(group)

    def drop_all(self, reason: str) -> None:
        """Close all links for good."""
        self._group = None
        for worker_id in list(self._links):
            self._drop(worker_id, reason)

    def seen(self, record: WorkerRecord) -> bool:
        """A worker registered, or its record changed; another boot means that the old is dead.
        Returns whether its role is another one now."""
        link = self._links.get(record.worker_id)
        if link is not None and link.record.boot == record.boot:
            return link.take_record(record)
        if link is not None:
            self._drop(record.worker_id, f"{record.worker_id} was started again")
        self._add(record)
        return False

    def unregistered(self, worker_id: WorkerId, boot: Boot) -> None:
        """A worker's key is gone: suspect, not dead, so a live stream is kept."""
        link = self._links.get(worker_id)
        if link is not None and link.record.boot == boot:
            link.is_registered = False
            self.drop_if_dead(link)

    def preempted(self, worker_id: WorkerId, boot: Boot, num_requests: int) -> None:
        """So many requests have no blocks there, as etcd has it; it may not have been seen yet."""
        self._preempted.pop((worker_id, boot), None)
        if num_requests:
            self._preempted[worker_id, boot] = num_requests
        link = self._links.get(worker_id)
        if link is not None and link.record.boot == boot:
            link.preemptions.recorded(num_requests, self._dial.clock.now())

    def drop_if_dead(self, link: WorkerLink) -> bool:
        """Drop a link whose key is gone and whose heartbeats are too; return whether it was."""
        worker_id = link.record.worker_id
        is_known = self._links.get(worker_id) is link
        if link.is_registered or (link.is_open and not link.is_suspect) or not is_known:
            return False
        self._drop(worker_id, "neither registered nor alive")
        return True

    def views(self, key: ModelKey) -> list[WorkerView]:
        """Return the workers of one model that can be sent to."""
        return [
            link.view()
            for link in self._links.values()
            if link.is_open and not link.is_draining and _model_of(link.record) == key
        ]

    def settle(self) -> None:
        """A link opened or was lost: see which model is served, and warn of who has another."""
        links = [link for link in self._links.values() if link.is_open]
        counts = Counter(_model_of(link.record) for link in links if _answers(link))
        if counts and self._served not in counts:
            self._served = counts.most_common(1)[0][0]
        if self._served is not None:
            for link in links:
                self._warn_of_another_model(link.record, self._served)
            self._warn_of_other_layouts([link.record for link in links])

    def served_model(self) -> ServedModel | None:
        """Return the served model, as its open workers have it or, without any, those to come.

        A worker whose handshake was refused says nothing of it.
        """
        if self._served is None:
            return None
        longest_open = longest_to_come = -1
        for link in self._links.values():
            if not _answers(link) or _model_of(link.record) != self._served:
                continue
            if link.is_open:
                longest_open = max(longest_open, link.record.max_model_len)
            elif link.may_open:
                longest_to_come = max(longest_to_come, link.record.max_model_len)
        max_model_len = longest_to_come if longest_open < 0 else longest_open
        if max_model_len < 0:
            return None
        name, fingerprint, block_size = self._served
        return ServedModel(name, max_model_len, block_size, fingerprint)

    def by_state(self) -> dict[str, int]:
        """Return how many workers are in each state; one that is gone is not kept."""
        counts = Counter(link.state for link in self._links.values())
        return {state.value: counts[state] for state in LinkState if state is not LinkState.GONE}

    def roles_alive(self) -> tuple[set[Role], set[Role]]:
        """Return the roles of the workers whose streams are open, that are neither suspect nor
        draining, and those of them that may be paired."""
        alive = [
            link
            for link in self._links.values()
            if link.is_open and not link.is_suspect and not link.is_draining
        ]
        paired = {link.record.role for link in alive if not link.load.is_unpaired}
        return {link.record.role for link in alive}, paired

    def _add(self, record: WorkerRecord) -> None:
        link = WorkerLink(record, self._owner, self._dial)
        num_preempted = self._preempted.get((record.worker_id, record.boot), 0)
        link.preemptions.recorded(num_preempted, self._dial.clock.now())
        self._links[record.worker_id] = link
        if self._group is not None:
            link.spawn(self._group)

    def _drop(self, worker_id: WorkerId, reason: str) -> None:
        self._warned.discard(worker_id)
        self._links.pop(worker_id).drop(reason)

    def _warn_of_another_model(self, record: WorkerRecord, served: ModelKey) -> None:
        fields = zip(_KEY_FIELDS, _model_of(record), served, strict=True)
        differing = [(name, its, ours) for name, its, ours in fields if its != ours]
        if differing:
            texts = [f"{name} {its!r} (served: {ours!r})" for name, its, ours in differing]
            self._refuse(record, differing[0][0], f"gets no requests: it has {', '.join(texts)}")

    def _warn_of_other_layouts(self, records: Sequence[WorkerRecord]) -> None:
        """Tell of prefill workers whose blocks no decode worker of the served model can take."""
        served = [record for record in records if _model_of(record) == self._served]
        layouts = {record.layout for record in served if record.role is Role.DECODE}
        for record in served:
            if record.role is _PREFILL and layouts and record.layout not in layouts:
                differing = summary_difference(record.layout, min(layouts))
                assert differing is not None, "they are not equal"
                name, its, theirs = differing
                text = f"is not paired: {name} {its} (decode has: {theirs})"
                self._refuse(record, name, text)

    def _refuse(self, record: WorkerRecord, field: str, text: str) -> None:
        if record.worker_id not in self._warned:
            self._warned.add(record.worker_id)
            self._refused.count(field)
            _log.warning("%s %s", record.worker_id, text)


def key_of(model: ServedModel) -> ModelKey:
    """Return what a worker must serve to take part."""
    return model.name, model.model_fingerprint, model.block_size


def _model_of(record: WorkerRecord) -> ModelKey:
    return record.model, record.model_fingerprint, record.block_size


def _answers(link: WorkerLink) -> bool:
    return link.record.role is not _PREFILL
