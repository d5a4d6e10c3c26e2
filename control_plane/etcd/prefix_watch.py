"""All keys of a prefix, followed without a gap through whatever etcd does.

    list at one revision -> on_listing -> watch from the next -> on_changes ...
          ^                                        |
          +---- anything that may hide a change ---+

That is: a compaction, a cancelled or reconnected watch, an etcd that does not answer, a revision
that goes backwards or another `world` (an etcd that came back empty keeps its cluster and member
ids), and a watch that fell silent, which a poll every `POLL_S` finds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from control_plane import background
from control_plane.background import OnFailure
from control_plane.etcd.client import EtcdClient, WatchLostError
from control_plane.etcd.values import Deleted, KeyValue, Listing
from core.back_off import BackOff
from core.errors import ControlPlaneError
from core.shared_ticks import next_multiple, sleep_s

POLL_S = 5.0
"""Between two looks at etcd that back the watch up."""

_GRACE_S = 0.5
"""How long a watch may lag behind a poll."""

_log = logging.getLogger(__name__)


class PrefixListener(Protocol):
    """Whoever follows a prefix. Callbacks run on the event loop and must not block."""

    def on_listing(self, listing: Listing, *, replay_from: int) -> int:
        """Take everything that is there now, in place of all that was told before.

        Args:
            replay_from: the first revision whose changes can be told again, as far as is known:
                earlier ones are compacted.

        Returns:
            The first revision whose changes are to be told, from `replay_from` to
            `listing.revision + 1`, which tells only what is new. Should it turn out to be
            compacted, another listing follows, with a later `replay_from`.
        """
        ...

    def on_changes(self, changes: list[KeyValue | Deleted]) -> None:
        """Take changes, in the order of their revisions."""
        ...


class PrefixWatch:
    """Follows one prefix until closed. Make it on the event loop.

    Args:
        world_key: changes whenever etcd lost its data.
        on_failure: told when the listener fails: nothing is followed any more, and the last view
            would hold for ever.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        listener: PrefixListener,
        *,
        world_key: str,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._listener = listener
        self._world_key = world_key
        self._back_off = BackOff(first_s=0.1, limit_s=2.0)
        self._seen_revision = 0
        self._keys: set[str] = set()
        self._compacted = 0
        self._is_wanted = asyncio.Event()
        self._is_listed = asyncio.Event()
        self._following = background.start(
            self._follow_for_ever(), name=f"watch {prefix}", on_failure=on_failure
        )

    def list_again(self) -> None:
        """Begin with a new listing."""
        self._is_wanted.set()

    async def wait_listed(self) -> None:
        """Return once the listener knows what is there."""
        await self._is_listed.wait()

    async def close(self) -> None:
        """Stop; no callback follows."""
        await background.stop(self._following)

    async def _follow_for_ever(self) -> None:
        while True:
            try:
                await self._follow()
                self._back_off.reset()
            except ControlPlaneError as error:
                _log.debug("%s is listed again: %s", self._prefix, error)
                await asyncio.sleep(self._back_off.next_s(self._client.rng))

    async def _follow(self) -> None:
        """List and watch; return or raise when it is time to list again."""
        self._is_wanted.clear()
        world = await self._client.get(self._world_key)
        listing = await self._client.get_prefix(self._prefix)
        self._seen_revision = listing.revision
        self._keys = {item.key for item in listing.items}
        if listing.revision < self._compacted:
            self._compacted = 0  # another history
        start = self._listener.on_listing(listing, replay_from=self._compacted + 1)
        self._is_listed.set()
        parts = [
            asyncio.ensure_future(self._watch(start)),
            asyncio.ensure_future(self._poll(world.value if world else None)),
            asyncio.ensure_future(self._wait_until_wanted()),
        ]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in parts:
                if part.done():
                    part.result()
        except WatchLostError as error:
            self._compacted = max(self._compacted, error.compact_revision)
            raise
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _watch(self, start_revision: int) -> None:
        changes = self._client.watch(self._prefix, start_revision)
        async with contextlib.aclosing(changes):
            async for batch in changes:
                self._back_off.reset()
                self._seen_revision = max(self._seen_revision, batch[-1].mod_revision)
                for change in batch:
                    if isinstance(change, Deleted):
                        self._keys.discard(change.key)
                    else:
                        self._keys.add(change.key)
                self._listener.on_changes(batch)

    async def _wait_until_wanted(self) -> None:
        await self._is_wanted.wait()

    async def _poll(self, world: bytes | None) -> None:
        """Return when the watch shows something else than etcd has."""
        clock, checked_revision = self._client.clock, 0
        while True:
            await asyncio.sleep(sleep_s(next_multiple(POLL_S, clock.now()), clock.now()))
            look = await self._client.look(self._world_key)
            current = look.item.value if look.item else None
            world = world or current  # the first worker makes it
            if current != world:
                _log.info("etcd lost its data, or another took its place: listing again")
                return
            if world is not None and look.revision == checked_revision:
                continue  # nothing was written anywhere
            if await self._is_behind():
                seen_revision = self._seen_revision
                await asyncio.sleep(_GRACE_S)
                if self._seen_revision == seen_revision and await self._is_behind():
                    _log.info("the watch of %s fell silent: listing again", self._prefix)
                    return
            else:
                checked_revision = look.revision

    async def _is_behind(self) -> bool:
        newest = await self._client.newest(self._prefix)
        return (
            newest.revision < self._seen_revision
            or newest.mod_revision > self._seen_revision
            or newest.num_keys != len(self._keys)
        )
