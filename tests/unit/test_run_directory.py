"""deploy.launcher.run_directory: one directory a launcher, gone with it, abandoned ones removed."""

from __future__ import annotations

import stat
from pathlib import Path

from deploy.launcher.run_directory import RunDirectory, remove_abandoned


def test_directory_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        (run.path / "etcd").mkdir()
        assert run.path.parent == tmp_path
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == []


def test_neighbour_that_lives_is_left_alone(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as first, RunDirectory(tmp_path) as second:
        assert first.path != second.path
        assert {first.path, second.path} == set(tmp_path.iterdir())


def test_abandoned_directory_is_removed_others_are_not(tmp_path: Path) -> None:
    abandoned = tmp_path / "dovetail-dead"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    foreign = tmp_path / "dovetail-notes"
    foreign.mkdir()
    (tmp_path / "dovetail-file").touch()
    remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"dovetail-notes", "dovetail-file"}
