"""One file's bytes from a hub: what came before a cut is kept, also by the next start, and all is
checked at the end.

`huggingface_hub` (2.4) goes on after a cut while it runs, but drops what came of the last 10 MB,
begins each run anew, and compares sizes only.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import httpx2
from huggingface_hub import constants
from huggingface_hub.utils import (
    hf_raise_for_status,
    http_stream_backoff,  # pyright: ignore[reportUnknownVariableType] - of untyped `kwargs`
)

from core.errors import ModelError
from deploy.hub.cache import partial_of
from deploy.hub.progress import Progress
from deploy.terminal import complain

TRIES = 5
"""Times in a row that nothing came, after which it is given up."""
PAUSE_S = 1.0

_CUTS = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError)
_SHA256 = re.compile("[0-9a-f]{64}")
_GIT_SHA1 = re.compile("[0-9a-f]{40}")
_READ_BYTES = 1 << 20


class RemoteFile(NamedTuple):
    """A file at a hub.

    Attributes:
        etag: large files' SHA-256, small ones' git hash; a mirror may have another form.
        size: bytes, None where the hub does not say.
    """

    url: str
    etag: str
    size: int | None


def fetch_blob(
    remote: RemoteFile, blob: Path, *, headers: Mapping[str, str], progress: Progress
) -> None:
    """Download `remote` to `blob`, which appears when it is whole.

    Raises:
        ModelError: other bytes came than the hub promised; they are not kept.
        Exception: one of `deploy.hub.refusals.HUB_ERRORS`; what came is kept for the next time.
    """
    partial = partial_of(blob)
    partial.touch()
    if remote.size is None or _size(partial) > remote.size:
        partial.write_bytes(b"")  # it may be all there is, and asking for more is an error
    progress.update(_size(partial))
    _grow(remote, partial, headers, progress)
    wrong = _what_is_wrong(partial, remote)
    if wrong:
        partial.unlink()
        msg = (
            f"{remote.url}: its {wrong} is wrong, so it was damaged on the way or at the hub; "
            "start again"
        )
        raise ModelError(msg)
    partial.replace(blob)


def _grow(
    remote: RemoteFile, partial: Path, headers: Mapping[str, str], progress: Progress
) -> None:
    """Append until the hub has no more; after a cut ask for the rest."""
    failures = 0
    while (done := _size(partial)) != remote.size:
        try:
            _append(remote, partial, headers, progress)
        except _CUTS as error:
            failures = 1 if _size(partial) > done else failures + 1
            if failures >= TRIES:
                raise
            reason = str(error) or type(error).__name__
            complain(f"warning: {remote.url}: the connection broke ({reason}); going on")
            time.sleep(PAUSE_S)
        else:
            return


def _append(
    remote: RemoteFile, partial: Path, headers: Mapping[str, str], progress: Progress
) -> None:
    done = _size(partial)
    asked = {**headers, "Accept-Encoding": "identity"}
    if done:
        asked["Range"] = f"bytes={done}-"
    with http_stream_backoff(
        "GET",
        remote.url,
        headers=asked,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        retry_on_exceptions=(),
        retry_on_status_codes=(408, 429),
    ) as response:
        hf_raise_for_status(response)
        goes_on = response.status_code == 206
        if not goes_on:
            progress.update(-done)
        with partial.open("ab" if goes_on else "wb") as file:
            for chunk in response.iter_bytes():
                file.write(chunk)
                progress.update(len(chunk))
                if remote.size is not None and file.tell() > remote.size:
                    return  # enough to know that it is wrong; the disk is not the hub's to fill


def _what_is_wrong(file: Path, remote: RemoteFile) -> str | None:
    if remote.size is not None and _size(file) != remote.size:
        return "size"
    if _SHA256.fullmatch(remote.etag):
        digest = hashlib.sha256()
    elif _GIT_SHA1.fullmatch(remote.etag):
        digest = hashlib.sha1(usedforsecurity=False)
        digest.update(f"blob {_size(file)}\0".encode())
    else:
        return None
    with file.open("rb") as data:
        while chunk := data.read(_READ_BYTES):
            digest.update(chunk)
    return None if digest.hexdigest() == remote.etag else "checksum"


def _size(file: Path) -> int:
    return file.stat().st_size
