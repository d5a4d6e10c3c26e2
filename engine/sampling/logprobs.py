"""Log-probabilities of chosen and of most likely tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from core.request import TokenLogprobs
from engine.kernels.host_device import integers_on
from engine.sampling.read_back import floats, table


class PendingLogprobs(NamedTuple):
    """Log-probabilities, on the device until `ReadBack` has copied their tensors.

    Attributes:
        rows: the sampled rows that asked.
        num_top: how many alternatives each asked for.
        chosen: float32 [len(rows)].
        top_ids: int64 [len(rows), largest num_top].
        top: float32, likewise, most likely first.
    """

    rows: tuple[int, ...]
    num_top: tuple[int, ...]
    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the host needs."""
        return self.chosen, self.top_ids, self.top

    def on_host(self, chosen: Tensor, top_ids: Tensor, top: Tensor) -> PendingLogprobs:
        """Return the same with `tensors` read back."""
        return self._replace(chosen=chosen, top_ids=top_ids, top=top)


def log_probabilities(logits: Tensor, rows: list[int]) -> Tensor:
    """Return the log-softmax of some rows of unmodified logits, a new float32 tensor."""
    return torch.log_softmax(logits[integers_on(logits.device, rows)], dim=-1)


def pick(
    log_probs: Tensor, rows: list[int], num_top: list[int], token_ids: Tensor
) -> PendingLogprobs:
    """Pick the chosen tokens' and the most likely ones.

    Args:
        log_probs: from `log_probabilities`.
        rows: the same.
        num_top: alternatives asked for, one a row.
        token_ids: int64, the sampled tokens of all rows.
    """
    tokens = token_ids[integers_on(token_ids.device, rows)]
    chosen = log_probs.gather(1, tokens[:, None])[:, 0]
    top, top_ids = log_probs.topk(min(max(num_top), log_probs.shape[1]), dim=1)
    return PendingLogprobs(tuple(rows), tuple(num_top), chosen, top_ids, top)


def to_host(pending: PendingLogprobs) -> dict[int, TokenLogprobs]:
    """Return the values by row; the tensors are on the CPU by now."""
    chosen = floats(pending.chosen)
    top_ids, top = table(pending.top_ids), table(pending.top)
    return {
        row: TokenLogprobs(chosen[i], tuple(top_ids[i][:count]), tuple(top[i][:count]))
        for i, (row, count) in enumerate(zip(pending.rows, pending.num_top, strict=True))
    }
