"""A fence turns the old address into a sink and takes the data along."""

from __future__ import annotations

import ctypes
import errno
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.errors import FabricError
from core.memory_region import SEAL_BYTES, seal_of
from kv_transfer.bytes_region import BytesRegion
from kv_transfer.region import HUGE_PAGE_BYTES, HostRegion

NUM_BYTES = 3 * HUGE_PAGE_BYTES + 4096
Region = HostRegion | BytesRegion


@pytest.fixture(params=[HostRegion, BytesRegion])
def region(request: pytest.FixtureRequest) -> Iterator[Region]:
    made = request.param(NUM_BYTES)
    yield made
    made.close()


@pytest.fixture
def host() -> Iterator[HostRegion]:
    made = HostRegion(NUM_BYTES)
    yield made
    made.close()


def huge_kilobytes(address: int) -> int:
    """Return what of the mapping at an address is on huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    line = next(line for line in lines[start:] if line.startswith("AnonHugePages:"))
    return int(line.split()[1])


def test_memory_is_zero_writable_and_of_the_size_asked_for(region: Region) -> None:
    view = region.view()
    assert (region.num_bytes, len(view), region.generation) == (NUM_BYTES, NUM_BYTES, 0)
    assert bytes(view) == bytes(NUM_BYTES)
    view[NUM_BYTES - 1] = 7
    assert region.view()[NUM_BYTES - 1] == 7


def test_a_checksum_is_of_the_runs_in_order(region: Region) -> None:
    view = region.view()
    view[10:14], view[NUM_BYTES - 3 :] = b"tail", b"end"
    end = (NUM_BYTES - 3, 3)
    assert region.checksum([(10, 4), end]) == zlib.crc32(b"tailend")
    assert region.checksum([end, (10, 4)]) == zlib.crc32(b"endtail")
    whole = region.checksum([(0, NUM_BYTES)])
    assert whole == zlib.crc32(bytes(view)), "in pieces of a MiB"
    region.fence()
    assert region.checksum([(0, NUM_BYTES)]) == whole
    assert region.checksum([]) == 0


def test_fences_under_a_checksum_change_nothing_and_a_closed_region_has_none() -> None:
    region = HostRegion(NUM_BYTES)
    region.view()[:] = bytes(range(256)) * (NUM_BYTES // 256)
    wanted = region.checksum([(0, NUM_BYTES)])
    sums: list[int] = []
    reader = threading.Thread(
        target=lambda: sums.extend(region.checksum([(0, NUM_BYTES)]) for _ in range(5))
    )
    reader.start()
    while reader.is_alive():
        region.fence()
        region.release_sinks()
    reader.join()
    assert sums == [wanted] * 5
    region.close()
    with pytest.raises(FabricError, match="closed"):
        region.checksum([(0, 1)])


def test_a_fence_moves_the_data_and_leaves_a_sink(region: Region) -> None:
    before, old_address = region.view(), region.address
    before[0:5] = b"prompt"[:5]
    before[NUM_BYTES - 3 : NUM_BYTES] = b"end"
    assert region.fence() == 1
    assert region.generation == 1
    assert region.address != old_address
    after = region.view()
    assert (bytes(after[:5]), bytes(after[-3:])) == (b"promp", b"end")
    assert bytes(before[:5]) == bytes(5), "who reads the old address gets zeros"
    before[0:4] = b"late"
    assert bytes(after[:5]) == b"promp", "who writes to the old address harms nobody"


def test_every_fence_adds_a_sink_and_all_go_together(region: Region) -> None:
    region.view()[9] = 9
    addresses = {region.address}
    for generation in (1, 2, 3):
        assert region.fence() == generation
        addresses.add(region.address)
    assert len(addresses) == 4
    assert region.num_sinks == 3
    region.release_sinks()
    assert region.num_sinks == 0
    assert region.view()[9] == 9


def test_a_fence_takes_the_seal_along_and_makes_it_the_next_generations(region: Region) -> None:
    before = region.sealed_view()
    assert len(before) == NUM_BYTES + SEAL_BYTES
    assert bytes(before[NUM_BYTES:]) == seal_of(0)
    region.fence()
    assert bytes(before[NUM_BYTES:]) == bytes(SEAL_BYTES), "an old address has none"
    assert bytes(region.sealed_view()[NUM_BYTES:]) == seal_of(1)
    assert len({seal_of(generation) for generation in range(3)}) == 3


def test_a_region_of_whole_huge_pages_has_its_seal_behind_them() -> None:
    region = HostRegion(HUGE_PAGE_BYTES)
    assert bytes(region.sealed_view()[HUGE_PAGE_BYTES:]) == seal_of(0)
    region.close()


@pytest.mark.parametrize("kind", [HostRegion, BytesRegion])
def test_an_empty_region_is_refused(kind: type[Region]) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        kind(0)


def test_host_memory_is_on_huge_pages_before_and_after_a_fence(host: HostRegion) -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this kernel gives no huge pages")
    host.prefault()
    assert host.address % HUGE_PAGE_BYTES == 0
    backed = huge_kilobytes(host.address)
    assert backed > 0
    host.fence()
    assert host.address % HUGE_PAGE_BYTES == 0
    assert huge_kilobytes(host.address) == backed


def test_prefault_changes_no_byte_and_may_run_along_with_fences(host: HostRegion) -> None:
    host.view()[:3] = b"abc"
    threads = [threading.Thread(target=host.prefault) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        host.fence()
    for thread in threads:
        thread.join()
    assert bytes(host.view()[:4]) == b"abc\0"


def test_a_closed_region_says_so(host: HostRegion) -> None:
    host.close()
    host.close()
    host.prefault()
    with pytest.raises(FabricError, match="closed"):
        host.view()


def test_memory_that_cannot_be_had_is_an_error_with_its_reason() -> None:
    with pytest.raises(FabricError, match=r"mmap of .* bytes for the KV pool: Cannot allocate"):
        HostRegion(1 << 48)


class Refusing:
    """The C library, but one call of it fails."""

    def __init__(self, real: ctypes.CDLL, call: str, number: int) -> None:
        self._real = real
        self._call = call
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return self._refuse if name == self._call else getattr(self._real, name)

    def _refuse(self, *_: object) -> int:
        ctypes.set_errno(self._number)
        return -1


def test_a_fence_that_the_kernel_refuses_leaves_the_region_as_it_was(host: HostRegion) -> None:
    host.view()[:3] = b"abc"
    address, real = host.address, host._libc
    host._libc = Refusing(real, "mremap", errno.ENOMEM)  # type: ignore[assignment]
    with pytest.raises(FabricError, match=r"mremap.*Cannot allocate"):
        host.fence()
    assert (host.address, host.generation, host.num_sinks) == (address, 0, 0)
    assert bytes(host.view()[:3]) == b"abc"
    assert bytes(host.sealed_view()[NUM_BYTES:]) == seal_of(0)
    host._libc = real
    assert host.fence() == 1


def test_prefault_needs_no_new_kernel_and_says_when_memory_is_out(host: HostRegion) -> None:
    real = host._libc
    host._libc = Refusing(real, "madvise", errno.EINVAL)  # type: ignore[assignment]
    host.prefault()
    host._libc = Refusing(real, "madvise", errno.ENOMEM)  # type: ignore[assignment]
    with pytest.raises(FabricError, match=r"MADV_POPULATE_WRITE.*Cannot allocate"):
        host.prefault()
    host._libc = real


def test_another_system_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(FabricError, match=r"needs Linux .* this is darwin"):
        HostRegion(NUM_BYTES)
