"""All links of a router, and what follows from them: the served model, readiness, views."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

from core.ids import Boot, WorkerId
from core.worker_record import Role, WorkerRecord
from router.dispatch.interface import ServedModel
from router.dispatch.worker_link import Dial, LinkOwner, WorkerLink
from router.policy.views import WorkerView

ModelKey = tuple[str, str, int]
"""(name, fingerprint, block size): workers serve one request together only where all are equal."""


class WorkerTable:
    """Links by worker id; follows the registry."""

    def __init__(self, owner: LinkOwner, dial: Dial) -> None:
        self._owner = owner
        self._dial = dial
        self._links: dict[WorkerId, WorkerLink] = {}
        self._group: asyncio.TaskGroup | None = None

    def __iter__(self) -> Iterator[WorkerLink]:
        """Iterate over all links, in the order of their ids."""
        return iter([self._links[worker_id] for worker_id in sorted(self._links)])

    def get(self, worker_id: WorkerId) -> WorkerLink | None:
        """Return a worker's link; None for an unknown one."""
        return self._links.get(worker_id)

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

    def seen(self, record: WorkerRecord) -> None:
        """A worker registered, or its record changed; another boot means that the old is dead."""
        link = self._links.get(record.worker_id)
        if link is not None and link.record.boot == record.boot:
            link.record = record
            link.is_registered = True
            return
        if link is not None:
            self._drop(record.worker_id, f"{record.worker_id} was started again")
        self._add(record)

    def unregistered(self, worker_id: WorkerId, boot: Boot) -> None:
        """A worker's key is gone: suspect, not dead, so a live stream is kept."""
        link = self._links.get(worker_id)
        if link is not None and link.record.boot == boot:
            link.is_registered = False
            self.drop_if_dead(link)

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
            if link.is_open and _model_of(link.record) == key
        ]

    def served_model(self) -> ServedModel | None:
        """Return the model that most open links serve; without any, that of the registered."""
        links = [link for link in self._links.values() if link.is_open] or self._links.values()
        counts = Counter(_model_of(link.record) for link in links)
        if not counts:
            return None
        key, _ = counts.most_common(1)[0]
        lengths = [
            link.record.max_model_len
            for link in links
            if _model_of(link.record) == key and link.record.role is not Role.PREFILL
        ]
        if not lengths:
            return None
        name, fingerprint, block_size = key
        return ServedModel(name, max(lengths), block_size, fingerprint)

    def roles_alive(self) -> set[Role]:
        """Return the roles of the workers whose streams are open and not suspect."""
        return {
            link.record.role
            for link in self._links.values()
            if link.is_open and not link.is_suspect
        }

    def _add(self, record: WorkerRecord) -> None:
        link = WorkerLink(record, self._owner, self._dial)
        self._links[record.worker_id] = link
        if self._group is not None:
            link.spawn(self._group)

    def _drop(self, worker_id: WorkerId, reason: str) -> None:
        self._links.pop(worker_id).drop(reason)


def key_of(model: ServedModel) -> ModelKey:
    """Return what a worker must serve to take part."""
    return model.name, model.model_fingerprint, model.block_size


def _model_of(record: WorkerRecord) -> ModelKey:
    return record.model, record.model_fingerprint, record.block_size
