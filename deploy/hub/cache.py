"""One repository's folder in the cache that all programs of Hugging Face share.

    HF_HUB_CACHE/models--ORG--NAME/refs/main                    the commit that a branch is at
                                  /blobs/ETAG                   one file's bytes
                                  /snapshots/COMMIT/config.json a link to its blob
    HF_HUB_CACHE/.locks/models--ORG--NAME/dovetail.lock

Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache. A blob gets its name when
it is whole, so whatever a snapshot links to is.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

_PARTIAL = ".dovetail.incomplete"


class CachedRepository:
    """A repository's folder; it need not exist.

    Attributes:
        root: of the whole cache.
    """

    def __init__(self, root: Path, repository: str) -> None:
        name = "--".join(["models", *repository.split("/")])
        self.root = root
        self._folder = root / name
        self._lock = root / ".locks" / name / "dovetail.lock"

    def commit(self, revision: str) -> str:
        """Return the commit that a branch or tag was at when it was last asked for; a commit is
        its own."""
        try:
            return (self._folder / "refs" / revision).read_text(encoding="utf-8").strip()
        except OSError:
            return revision

    def remember(self, revision: str, commit: str) -> None:
        """Note the commit that a branch or tag is at; under the lock."""
        file = self._folder / "refs" / revision
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f"{file.name}.{os.getpid()}")
        fresh.write_text(commit, encoding="utf-8")
        fresh.replace(file)

    def snapshot(self, commit: str) -> Path:
        """Return the folder of a commit's files."""
        return self._folder / "snapshots" / commit

    def names(self, commit: str) -> set[str]:
        """Return the files that are there of a commit."""
        snapshot = self.snapshot(commit)
        return {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}

    def blob(self, etag: str) -> Path:
        """Return where a file's bytes are, or go; its folder exists."""
        folder = self._folder / "blobs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / etag

    def partial_bytes(self) -> int:
        """Return how much is there of files that are not whole."""
        files = (self._folder / "blobs").glob(f"*{_PARTIAL}")
        return sum(file.stat().st_size for file in files)

    def link(self, commit: str, name: str, blob: Path) -> None:
        """Put a whole blob into a snapshot."""
        file = self.snapshot(commit) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # a link to a blob that somebody removed
        try:
            file.symlink_to(os.path.relpath(blob, file.parent))
        except OSError:  # a file system without links: the file itself, as the library does it
            blob.replace(file)

    @contextmanager
    def locked(self, on_wait: Callable[[], None]) -> Generator[None]:
        """Be the only process of ours that writes to this repository; the kernel frees the lock of
        a process that dies.

        Args:
            on_wait: called when another one holds it.
        """
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def partial_of(blob: Path) -> Path:
    """Return where a blob grows."""
    return blob.with_name(f"{blob.name}{_PARTIAL}")
