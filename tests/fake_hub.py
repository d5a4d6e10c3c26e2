"""A hub on this machine that speaks Hugging Face's protocol, as far as downloads need it.

Small files come from the hub itself, with their git hash as ETag; weights are redirected to a
content server of another host name, with their SHA-256, as the real one does.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

WEIGHTS = (".safetensors", ".gguf", ".bin")


class Seen(NamedTuple):
    """A request.

    Attributes:
        byte_range: its Range header, or nothing.
        token: what it carried, or nothing.
    """

    method: str
    path: str
    byte_range: str
    token: str


class FakeHub(ThreadingHTTPServer):
    """Serves repositories until closed.

    Attributes:
        url: for HF_ENDPOINT.
        seen: every request so far.
        token: what gated repositories want.
        gated: their names.
        cuts: by file name, bytes after which the next answers break off, one each.
        statuses: by path prefix, a status that is answered instead.
        statuses_after_cut: join these when an answer broke off.
        damaged: names of files whose bytes come wrong.
        shortened: names of files that end early, as if they were whole.
        lengthened: names of files that do not end where they should.
        ignores_range: always send the whole file.
        gate: cleared, the content server and the paths in `frozen` wait until it is set.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.seen: list[Seen] = []
        self.token = ""
        self.gated: set[str] = set()
        self.cuts: dict[str, list[int]] = {}
        self.statuses: dict[str, int] = {}
        self.statuses_after_cut: dict[str, int] = {}
        self.damaged: set[str] = set()
        self.shortened: set[str] = set()
        self.lengthened: set[str] = set()
        self.frozen: set[str] = {"/cdn"}
        self.ignores_range = False
        self.gate = threading.Event()
        self.gate.set()
        self._commits: dict[tuple[str, str], Mapping[str, bytes]] = {}
        self._refs: dict[tuple[str, str], str] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that left."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def add(self, repository: str, files: Mapping[str, bytes], *, revision: str = "main") -> str:
        """Make a branch or tag a commit of these files; return the commit."""
        digest = hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False)
        commit = digest.hexdigest()
        self._commits[repository, commit] = files
        self._refs[repository, revision] = commit
        return commit

    def rename_commit(self, repository: str, commit: str) -> None:
        """Give a repository's main branch a commit of another name."""
        files = self._commits[repository, self._refs[repository, "main"]]
        self._commits[repository, commit] = files
        self._refs[repository, "main"] = commit

    def find(self, repository: str, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        """Return a revision's commit and files."""
        commit = self._refs.get((repository, revision), revision)
        files = self._commits.get((repository, commit))
        return None if files is None else (commit, files)

    def has(self, repository: str) -> bool:
        """Whether there is such a repository."""
        return any(name == repository for name, _ in self._commits)

    def content(self, digest: str) -> tuple[str, bytes]:
        """Return the weights of a SHA-256, with their name."""
        for files in self._commits.values():
            for name, data in files.items():
                if hashlib.sha256(data).hexdigest() == digest:
                    return name, data
        raise KeyError(digest)

    def gets(self, part: str) -> list[Seen]:
        """Return the requests for bytes whose path has `part` in it."""
        return [seen for seen in self.seen if seen.method == "GET" and part in seen.path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> FakeHub:
        return cast("FakeHub", self.server)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.seen.append(Seen(self.command, path, self.headers.get("Range", ""), token))
        if any(path.startswith(prefix) for prefix in self.hub.frozen):
            self.hub.gate.wait()
        for prefix, status in self.hub.statuses.items():
            if path.startswith(prefix):
                self._send(status, b"<html>no</html>", {"Content-Type": "text/html"})
                return
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[0] == "cdn":
            name, data = self.hub.content(parts[1])
            self._send_file(name, data, {})
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._list("/".join(parts[2:4]), "/".join(parts[5:]) or "main", token)
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), token)
        else:
            self._send(404, b"", {})

    def _refuse(self, repository: str, revision: str, token: str) -> bool:
        hub = self.hub
        if not hub.has(repository):
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif hub.find(repository, revision) is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif repository in hub.gated and token != hub.token:
            self._send(403 if token else 401, b"", {"X-Error-Code": "GatedRepo"})
        else:
            return False
        return True

    def _list(self, repository: str, revision: str, token: str) -> None:
        found = self.hub.find(repository, revision)
        if self._refuse(repository, revision, token) or found is None:
            return
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": _git_hash(data)}
            for name, data in found[1].items()
        ]
        body = json.dumps({"id": repository, "sha": found[0], "siblings": siblings})
        self._send(200, body.encode(), {"Content-Type": "application/json"})

    def _resolve(self, repository: str, revision: str, name: str, token: str) -> None:
        found = self.hub.find(repository, revision)
        if self._refuse(repository, revision, token) or found is None:
            return
        commit, files = found
        data = files[name]
        headers = {"X-Repo-Commit": commit}
        if not name.endswith(WEIGHTS):
            self._send_file(name, data, {**headers, "ETag": f'"{_git_hash(data)}"'})
            return
        digest = hashlib.sha256(data).hexdigest()
        linked = {
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"http://localhost:{self.hub.server_port}/cdn/{digest}",
        }
        self._send(302, b"", {**headers, **linked})

    def _send_file(self, name: str, data: bytes, headers: Mapping[str, str]) -> None:
        start = 0
        if (given := self.headers.get("Range")) and not self.hub.ignores_range:
            start = int(given.removeprefix("bytes=").partition("-")[0])
            headers = {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        if name in self.hub.damaged:
            data = bytes(byte ^ 1 for byte in data)
        if name in self.hub.shortened and self.command == "GET":
            data = data[:-1]
        if name in self.hub.lengthened and self.command == "GET":
            data += bytes(32 << 20)
        cut = self.hub.cuts.get(name) if self.command == "GET" else None
        cut_after = cut.pop(0) if cut else None
        self._send(206 if start else 200, data[start:], headers, cut_after=cut_after)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], *, cut_after: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut_after])
        if cut_after is not None:
            self.close_connection = True
            self.hub.statuses.update(self.hub.statuses_after_cut)


def _git_hash(data: bytes) -> str:
    header = f"blob {len(data)}\0".encode()
    return hashlib.sha1(header + data, usedforsecurity=False).hexdigest()


@contextmanager
def running_hub() -> Generator[FakeHub]:
    """Serve from a thread."""
    with FakeHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.gate.set()
            hub.shutdown()
            thread.join()
