"""Brings a model from a hub into the cache, once, and says where it is.

    list the repository -> choose files -> lock -> each file that is missing, one after the other,
    small ones first -> link it into the snapshot -> note the commit

The list names a commit, and everything comes of that. Without a network, and without an answer, the
cache's copy is used, if it is whole. `huggingface_hub` reads HF_TOKEN, HF_ENDPOINT, HF_HOME,
HF_HUB_CACHE and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath

import msgspec
from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,  # pyright: ignore[reportUnknownVariableType] - of an untyped `dict`
    hf_hub_url,
    is_offline_mode,
)
from huggingface_hub.utils import (
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType] - of an untyped `dict`
)

from core.clock import Clock
from core.errors import ModelError
from deploy.hub.blob import RemoteFile, fetch_blob
from deploy.hub.cache import CachedRepository
from deploy.hub.model_id import ModelId
from deploy.hub.progress import progress_of, size
from deploy.hub.refusals import HUB_ERRORS, not_cached, refusal
from deploy.hub.wanted_files import (
    INDEX,
    check_safetensors,
    text_files,
    wanted_gguf,
    weight_files,
)
from deploy.terminal import complain, say

_TIMEOUT_S = 10.0
_PLAIN_NAME = re.compile(r"[\w-]+")


class Listing(msgspec.Struct, frozen=True):
    """A repository at one commit.

    Attributes:
        sizes: bytes by file name; 0 where the hub does not say.
    """

    commit: str
    sizes: dict[str, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def fetch_model(model: ModelId, *, only_text: bool, clock: Clock) -> Path:
    """Return the model's directory, or its GGUF file, with all files that are needed.

    Args:
        only_text: without safetensors; for a router.

    Raises:
        ModelError: one line that says what to do.
    """
    _speak_in_lines()
    root = Path(constants.HF_HUB_CACHE).absolute()
    repository = CachedRepository(root, model.repository)
    if is_offline_mode():
        cached = _cached(model, repository, only_text=only_text)
        if cached is None:
            raise ModelError(not_cached(model, root))
        return cached
    try:
        listing = _list(model)
    except HUB_ERRORS as error:
        problem = refusal(error, model, root)
        cached = _cached(model, repository, only_text=only_text)
        if cached is None:
            raise ModelError(problem) from None
        complain(f"warning: {problem} (the copy in the cache is used)")
        return cached
    download = _Download(model, listing, repository, clock)
    try:
        return download.run(only_text=only_text)
    except HUB_ERRORS as error:
        raise ModelError(refusal(error, model, root)) from None


def _list(model: ModelId) -> Listing:
    info = HfApi().model_info(
        model.repository, revision=model.revision, files_metadata=True, timeout=_TIMEOUT_S
    )
    commit = info.sha or ""
    if not _PLAIN_NAME.fullmatch(commit):
        msg = f"a commit {commit!r}"
        raise ValueError(msg)
    files = {file.rfilename: file.size or 0 for file in info.siblings or []}
    return Listing(commit, {name: size for name, size in files.items() if _is_inside(name)})


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _cached(model: ModelId, repository: CachedRepository, *, only_text: bool) -> Path | None:
    """Return the cache's copy if it is whole. Its configuration came before its weights."""
    commit = repository.commit(model.revision)
    snapshot, names = repository.snapshot(commit), repository.names(commit)
    try:
        gguf = wanted_gguf(model, names)
        if gguf is not None:
            return snapshot / gguf
        if not only_text:
            check_safetensors(model, names)
            weights = weight_files(_indexed(snapshot) if INDEX in names else None)
            return snapshot if names.issuperset(weights) else None
    except ModelError:
        return None
    return snapshot if text_files(names) else None


class _Download:
    def __init__(
        self, model: ModelId, listing: Listing, repository: CachedRepository, clock: Clock
    ) -> None:
        self._model = model
        self._listing = listing
        self._repository = repository
        self._clock = clock
        self._snapshot = repository.snapshot(listing.commit)
        self._headers = build_hf_headers()

    def run(self, *, only_text: bool) -> Path:
        """Bring what is missing; return the directory or the GGUF file."""
        names = self._listing.sizes
        gguf = wanted_gguf(self._model, names)
        if gguf is not None:
            self._bring([gguf])
        elif only_text:
            self._bring(text_files(names))
        else:
            check_safetensors(self._model, names)
            self._bring_safetensors(text_files(names))
        self._remember()
        return self._snapshot / gguf if gguf is not None else self._snapshot

    def _bring_safetensors(self, texts: Sequence[str]) -> None:
        if INDEX not in self._listing.sizes:
            self._bring([*texts, *weight_files(None)])
            return
        self._bring([INDEX])
        weights = weight_files(_indexed(self._snapshot))
        unknown = [name for name in weights if name not in self._listing.sizes]
        if unknown:
            msg = f"model {str(self._model)!r}: {INDEX} names {unknown[0]}, which it does not have"
            raise ModelError(msg)
        self._bring([*texts, *weights])

    def _bring(self, names: Sequence[str]) -> None:
        if not self._missing(names):
            return
        with self._locked():
            missing = self._missing(names)
            if missing:
                self._bring_missing(missing)

    def _remember(self) -> None:
        revision, commit = self._model.revision, self._listing.commit
        if self._repository.commit(revision) != commit:
            with self._locked():
                self._repository.remember(revision, commit)

    def _locked(self) -> AbstractContextManager[None]:
        waited_for = f"waiting     another process downloads {self._model}"
        return self._repository.locked(lambda: say(waited_for))

    def _missing(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if not (self._snapshot / name).exists()]

    def _bring_missing(self, names: Sequence[str]) -> None:
        total = sum(self._listing.sizes[name] for name in names)
        self._require_space(total)
        files = "1 file" if len(names) == 1 else f"{len(names)} files"
        say(f"download    {self._model}: {files}, {size(total)}, to {self._repository.root}")
        with progress_of(str(self._model), total, self._clock) as progress:
            for name in names:
                remote = self._look_up(name)
                blob = self._repository.blob(remote.etag)
                if not blob.exists():
                    fetch_blob(remote, blob, headers=self._headers, progress=progress)
                self._repository.link(self._listing.commit, name, blob)

    def _look_up(self, name: str) -> RemoteFile:
        url = hf_hub_url(self._model.repository, name, revision=self._listing.commit)
        found = get_hf_file_metadata(url, headers=self._headers, timeout=_TIMEOUT_S)
        etag, num_bytes = found.etag or "", found.size
        if not _PLAIN_NAME.fullmatch(etag):
            msg = f"an ETag {etag!r}"
            raise ValueError(msg)
        if num_bytes is not None and num_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
            msg = (
                f"model {str(self._model)!r}: {name} has {size(num_bytes)}, too much to be "
                f"downloaded here; bring it by `hf download {self._model.repository} {name}`"
            )
            raise ModelError(msg)
        return RemoteFile(url, etag, num_bytes)

    def _require_space(self, wanted: int) -> None:
        root = self._repository.root
        here = next(folder for folder in (root, *root.parents) if folder.exists())
        wanted -= self._repository.partial_bytes()
        free = shutil.disk_usage(here).free
        if free < wanted:
            msg = (
                f"model {str(self._model)!r}: needs {size(wanted)}, and {size(free)} are free in "
                f"{root}; make room, or set HF_HOME"
            )
            raise ModelError(msg)


def _indexed(snapshot: Path) -> list[str]:
    file = snapshot / INDEX
    try:
        return list(msgspec.json.decode(file.read_bytes(), type=_Index).weight_map.values())
    except msgspec.DecodeError as error:
        msg = f"{file}: not an index of safetensors shards ({error})"
        raise ModelError(msg) from None


class _Lines(logging.Handler):
    """The library's warnings, each one line, as ours are."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(f"warning: {record.getMessage()}")


def _speak_in_lines() -> None:
    library = logging.getLogger("huggingface_hub")
    library.handlers[:] = [_Lines(logging.WARNING)]
    library.propagate = False
