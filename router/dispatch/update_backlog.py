"""Updates that a reader has not taken: the latest as they came, those before folded to bytes.

A client that does not read must cost little, however long its answer: an update of one token is
some 250 bytes, folded it is 4 (12 more for each log-probability).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

from core.ids import RequestId
from core.request import FinishReason, TokenLogprobs, TokenUpdate

_MAX_UNFOLDED = 64
"""Updates kept as they came; a reader that keeps up never has so many."""


class UpdateBacklog:
    """The unread updates of one request, in order for each sample."""

    __slots__ = ("_folded", "_latest")

    def __init__(self) -> None:
        self._latest: list[TokenUpdate] = []
        self._folded: dict[int, _Folded] = {}

    def __len__(self) -> int:
        return len(self._latest) + len(self._folded)

    def put(self, update: TokenUpdate) -> None:
        """Append one."""
        self._latest.append(update)
        if len(self._latest) > _MAX_UNFOLDED:
            for one in self._latest:
                folded = self._folded.get(one.sample_index)
                if folded is None:
                    folded = self._folded[one.sample_index] = _Folded(one)
                folded.add(one)
            self._latest.clear()

    def take(self) -> list[TokenUpdate]:
        """Remove and return all; what was folded is one update a sample."""
        latest, self._latest = self._latest, []
        if not self._folded:
            return latest
        folded, self._folded = self._folded, {}
        return [*(one.update(index) for index, one in folded.items()), *latest]


class _Folded:
    """Consecutive updates of one sample, as one."""

    __slots__ = (
        "_chosen",
        "_dispatch",
        "_finish_reason",
        "_num_top",
        "_request_id",
        "_start",
        "_token_ids",
        "_top",
        "_top_ids",
    )

    def __init__(self, first: TokenUpdate) -> None:
        self._request_id: RequestId = first.request_id
        self._dispatch = first.dispatch
        self._start = first.start_index
        self._token_ids = array("I")
        self._chosen = array("d")
        self._num_top = array("H")
        self._top_ids = array("I")
        self._top = array("d")
        self._finish_reason: FinishReason | None = None

    def add(self, update: TokenUpdate) -> None:
        self._token_ids.extend(update.token_ids)
        self._finish_reason = update.finish_reason
        for entry in update.logprobs:
            self._chosen.append(entry.chosen)
            self._num_top.append(len(entry.top))
            self._top_ids.extend(entry.top_ids)
            self._top.extend(entry.top)

    def update(self, sample_index: int) -> TokenUpdate:
        return TokenUpdate(
            self._request_id,
            sample_index,
            self._dispatch,
            self._start,
            tuple(self._token_ids),
            self._logprobs(),
            self._finish_reason,
        )

    def _logprobs(self) -> tuple[TokenLogprobs, ...]:
        ends = list(itertools.accumulate(self._num_top, initial=0))
        bounds: Sequence[tuple[int, int]] = list(itertools.pairwise(ends))
        return tuple(
            TokenLogprobs(chosen, tuple(self._top_ids[start:end]), tuple(self._top[start:end]))
            for chosen, (start, end) in zip(self._chosen, bounds, strict=True)
        )
