"""Files of packed weights: made once, mapped by all, and never in the way of a start."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from engine.executor.packed_file import Bytes, PackedName, open_packed

SIZE = 10_000
MODEL = PackedName("model", "3-ab")
NAME = "model.v3-ab"


class Packer:
    """Fills memory with 7 and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, memory: Bytes) -> None:
        assert not memory.any()
        self.calls += 1
        memory[:] = 7


def is_packed(memory: Bytes) -> bool:
    return memory.shape == (SIZE,) and bool((memory == 7).all()) and memory.ctypes.data % 4096 == 0


def test_packed_once_and_mapped_since(tmp_path: Path) -> None:
    cache, packer = tmp_path / "deep" / "cache", Packer()
    memories = [open_packed(cache, MODEL, SIZE, packer) for _ in range(3)]
    assert all(map(is_packed, memories))
    assert packer.calls == 1
    assert not memories[0].flags.writeable
    assert [path.name for path in cache.iterdir()] == [NAME]


def test_without_a_cache_into_own_memory() -> None:
    packer = Packer()
    assert is_packed(open_packed(None, MODEL, SIZE, packer))
    assert is_packed(open_packed(None, MODEL, SIZE, packer))
    assert packer.calls == 2


def test_a_file_of_another_size_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"x" * 100)
    packer = Packer()
    assert is_packed(open_packed(tmp_path, MODEL, SIZE, packer))
    assert is_packed(open_packed(tmp_path, MODEL, SIZE, packer))
    assert packer.calls == 1


def test_another_worker_that_was_faster_serves_both(tmp_path: Path) -> None:
    packer = Packer()

    def slower(memory: Bytes) -> None:
        memory[:] = 9
        open_packed(tmp_path, MODEL, SIZE, packer)

    assert is_packed(open_packed(tmp_path, MODEL, SIZE, slower))
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_what_other_versions_and_dead_processes_left_is_removed(tmp_path: Path) -> None:
    living = f"{NAME}.{os.getppid()}"
    for name in ("model.v0", f"{NAME}.4194305", living, "other.v0", "model.v0.1"):
        (tmp_path / name).write_bytes(b"old")
    open_packed(tmp_path, MODEL, SIZE, Packer())
    assert {path.name for path in tmp_path.iterdir()} == {NAME, living, "other.v0"}


@pytest.mark.parametrize("reason", ["a file in its place", "no room"])
def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: str,
) -> None:
    cache, packer = tmp_path / "cache", Packer()
    if reason == "no room":

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        cache.write_text("")
    with caplog.at_level(logging.WARNING):
        assert is_packed(open_packed(cache, MODEL, SIZE, packer))
    assert packer.calls == 1
    assert len(caplog.records) == 1
    assert "packed weights are not kept for the next start: " in caplog.text
    assert cache.is_file() or not [*cache.iterdir()]


def test_packing_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing(memory: Bytes) -> None:
        memory[:] = np.uint8(1)
        msg = "a weight"
        raise KeyError(msg)

    with pytest.raises(KeyError, match="a weight"):
        open_packed(tmp_path, MODEL, SIZE, failing)
    assert not [*tmp_path.iterdir()]
