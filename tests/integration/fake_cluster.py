"""`dovetail up` with stand-ins for worker and router: the launcher's own behaviour, fast.

Run as `fake_cluster.py up DIRECTORY PREFILL DECODE PORT ETCD ROUTERS` (etcd empty: embedded); it
starts this file again for each child. DIRECTORY holds what a test wants (`refuse-NAME`,
`crash-NAME`, `stubborn-NAME`) and `journal`, to which children append.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import os
import signal
import sys
import threading
from pathlib import Path

from core.clock import SystemClock
from core.config import load
from core.errors import DovetailError, UsageError
from deploy.launcher.launcher import run_up
from deploy.launcher.parent_death import die_with_parent
from deploy.options import UpOptions
from deploy.readiness import Readiness, StartRefused, announce
from deploy.terminal import complain

EVENTS = [
    {"choices": [{"delta": {"role": "assistant", "content": "Par"}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "is."}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "dovetail": {
            "prefill_worker": "prefill-0",
            "decode_worker": "decode-0",
            "blocks_transferred": 3,
            "bytes_transferred": 1_105_920,
        },
    },
]


class FakeApi(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "fake-model"}]}).encode(), "application/json")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        lines = [f"data: {json.dumps(event)}\n\n" for event in EVENTS]
        self._answer("".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Say nothing."""

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def up(directory: str, prefill: str, decode: str, port: str, etcd: str, routers: str) -> int:
    config = load({}, {"http.port": port, "control_plane.etcd": etcd})
    options = UpOptions(int(prefill), int(decode), 0, Path(directory), num_routers=int(routers))
    program = (sys.executable, __file__)
    try:
        return asyncio.run(run_up(config, options, clock=SystemClock(), program=program))
    except UsageError as error:
        complain(str(error))
        return 2
    except DovetailError as error:
        complain(str(error))
        return 1


def child(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("command")
    parser.add_argument("--id", default="router")
    for name in ("--config", "--model"):
        parser.add_argument(name, type=Path)
    for name in ("--ready-fd", "--port"):
        parser.add_argument(name, type=int, default=0)
    known, _ = parser.parse_known_args(argv)
    die_with_parent(known.parent_pid)
    play(known.id, known.model, known.port, known.ready_fd)
    return 0


def play(name: str, directory: Path, port: int, ready_fd: int) -> None:
    if (directory / f"refuse-{name}").exists():
        announce(ready_fd, StartRefused("model 'x': is no GGUF file"))
        sys.exit(2)
    if (directory / f"crash-{name}").exists():
        sys.exit(3)
    if (directory / f"stubborn-{name}").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        # The launcher's stop: a worker takes SIGTERM for a drain.
        number = signal.SIGTERM if name.startswith("router") else signal.SIGUSR1
        signal.signal(number, lambda *_: (note(directory, f"stop {name}"), os._exit(0)))
    note(directory, f"start {name}")
    address = "127.0.0.1:1"
    if name.startswith("router"):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), FakeApi)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{port}"
    announce(ready_fd, Readiness(name, os.getpid(), address, fabric="fake"))
    while True:
        signal.pause()


def note(directory: Path, line: str) -> None:
    with (directory / "journal").open("a") as journal:
        journal.write(f"{line}\n")


if __name__ == "__main__":
    if sys.argv[1] == "up":
        sys.exit(up(*sys.argv[2:]))
    sys.exit(child(sys.argv[1:]))
