"""deploy.launcher.cpu_shares: disjoint cores where there are enough, none where there are not."""

from __future__ import annotations

import pytest

from core.errors import UsageError
from deploy.launcher.cpu_shares import parse_cpus, share_cpus


@pytest.mark.parametrize(
    ("cpus", "workers", "threads", "shared"),
    [
        ([0, 1], 2, 0, [(1, (0,)), (1, (1,))]),
        ([0, 1], 1, 0, [(2, (0, 1))]),
        ([2, 3, 4, 5, 6], 2, 0, [(2, (2, 3)), (2, (4, 5))]),
        ([0, 1, 2, 3], 2, 1, [(1, (0,)), (1, (2,))]),
        ([0, 1], 3, 0, [(1, ()), (1, ()), (1, ())]),
        ([0, 1], 2, 2, [(2, ()), (2, ())]),
    ],
)
def test_shares(
    cpus: list[int], workers: int, threads: int, shared: list[tuple[int, tuple[int, ...]]]
) -> None:
    made = share_cpus(cpus, workers, threads)
    assert [(share.threads, share.cpus) for share in made] == shared


def test_cores_are_written_as_linux_does() -> None:
    assert parse_cpus("0,2, 4-7") == {0, 2, 4, 5, 6, 7}
    for wrong in ("", "a", "1-", "-1", "1;2"):
        with pytest.raises(UsageError, match="such as 0,2,4-7"):
            parse_cpus(wrong)
