"""A cluster of real processes that may be killed, stopped and frozen at any time, and which can
tell what is left of requests that are over."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from core.clock import SystemClock
from core.worker_record import Role
from tests.chaos_leaks import grown, in_use, still_counted
from tests.etcd_server import EtcdServer, reserve_ports
from tests.faults import RECOVERY_S, statuses, until
from tests.launched import Launched
from tests.scrape import Scrape, total_over

PREFILLS = ("prefill-0", "prefill-1")
DECODES = ("decode-0", "decode-1")
ROUTERS = ("router-0", "router-1")

TRY_S = 1.5
"""Without progress until an attempt is given up."""

_STOP_S = 60.0
"""Generous: from SIGTERM to the end, on a busy machine."""

_OUTAGE_S = 150.0
"""A worker registers before it serves: generous where etcd is frozen for a minute."""

_NOT_YET = (404, 409, 503)
"""What a router answers that does not know a worker, or who else serves, or has no stream yet."""

_POOLED_THREADS = 8
"""What gRPC's pool and asyncio's may grow by; a thread a request, or a peer's life, is more."""

_FILES_OF_A_PAIR = 2
"""A stream and the fabric's: workers of one role meet once one has been in the other, or moved."""

_POLL_S = 0.1

_SETTINGS = (
    "--log-level", "info",
    "--set", f"kv_transfer.try_s={TRY_S}",
    "--set", "kv_transfer.quarantine_s=0.5",
    "--set", "control_plane.lease_s=3",
)  # fmt: skip

_MOCK = (
    "--set", "engine.executor=mock",
    "--set", "engine.chunk_tokens=128",
    "--set", "engine.mock_prompt_token_s=0.0001",
)  # fmt: skip


class Shape(NamedTuple):
    """Which processes there are, and what all of them are told."""

    prefills: tuple[str, ...] = PREFILLS
    decodes: tuple[str, ...] = DECODES
    routers: tuple[str, ...] = ROUTERS
    settings: tuple[str, ...] = ()


CROWDED = Shape(
    routers=ROUTERS[:1],
    settings=(*_MOCK, "--set", "engine.mock_step_s=0.008", "--set", f"engine.kv_memory={1 << 18}"),
)
"""256 blocks a worker, which 200 requests at once fight for."""

STEADY = Shape(
    settings=(*_MOCK, "--set", "engine.mock_step_s=0.02", "--set", f"engine.kv_memory={1 << 19}")
)

MODEL = Shape(
    prefills=PREFILLS[:1],
    settings=(
        "--set", "engine.threads=1", "--set", f"engine.kv_memory={1 << 27}",
        "--set", "engine.chunk_tokens=128",
    ),
)  # fmt: skip
"""The default model; on one machine all workers have one numerics id."""


@dataclass
class RouterEnd:
    """One router, as a `tests.faults.Router`."""

    url: str
    http: httpx.Client


class ChaosCluster:
    """etcd, routers, prefill and decode workers. A context.

    Nobody starts again what dies: a launcher's growing delays would leave later chaos without
    victims. The test does, under the same id. The first of each role keeps its address, too.
    """

    def __init__(self, directory: Path, etcd: EtcdServer, shape: Shape = CROWDED) -> None:
        self.shape = shape
        self.etcd = etcd
        self.workers = (*shape.prefills, *shape.decodes)
        self.ended_badly: list[str] = []
        self._directory = directory
        self._stack = ExitStack()
        self._lives: dict[str, list[Launched]] = {}
        self._sizes: dict[str, int] = {}
        self._toil_before: Counter[str] = Counter()
        self._http = self._stack.enter_context(httpx.Client(trust_env=False, timeout=30))
        fixed = (*shape.routers, *shape.prefills[:1], *shape.decodes[:1])
        self.ports = dict(zip(fixed, reserve_ports(len(fixed), self._stack), strict=True))

    def __enter__(self) -> ChaosCluster:
        with ExitStack() as stack:  # ends what began where it does not become ready
            stack.callback(self._stack.close)
            for name in (*self.workers, *self.shape.routers):
                self.start(name)
            for name in self.shape.routers:
                self.wait_ready(name)
            self.wait_live()
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop each with SIGTERM; all must end well where the test did."""
        with self._stack:
            if error[0] is not None:
                return
            for name in (*self.shape.routers, *self.shape.decodes, *self.shape.prefills):
                self.thaw(name)
                life = self._life(name)
                assert life.stop(signal.SIGTERM, _STOP_S) == 0, life.transcript()
                life.assert_nothing_left()

    def start(self, name: str) -> None:
        """Begin a process's next life; returns at once."""
        if name in self.shape.routers:
            self._launch(name, "router", "--id", name, "--port", str(self.ports[name]))
            return
        listen = ("--listen", f"127.0.0.1:{self.ports[name]}") if name in self.ports else ()
        role = name.partition("-")[0]
        self._launch(name, "worker", "--role", role, "--id", name, *listen)

    def wait_ready(self, name: str) -> None:
        """Return once its present life says that it serves: a worker is registered by then, and a
        router knows who is."""
        self._life(name).wait_for(r" ready +pid ", _OUTAGE_S)

    def kill(self, name: str) -> None:
        """kill -9, frozen or not."""
        process = self._life(name).process
        process.kill()
        process.wait()

    def terminate(self, name: str) -> None:
        """SIGTERM; returns once it has ended."""
        life = self._life(name)
        code = life.stop(signal.SIGTERM, _STOP_S)
        if code:
            self.ended_badly.append(f"{name} ended with {code} after SIGTERM")

    def order(self, router: str, order: str, body: Mapping[str, str]) -> None:
        """Do what `dovetail drain` and `dovetail role` do; a router that has just begun may not
        know the worker yet."""
        end = self.router(router)

        def send() -> bool:
            answer = end.http.post(f"{end.url}/{order}", json=body)
            assert answer.is_success or answer.status_code in _NOT_YET, answer.text
            return answer.is_success

        until(send, f"{router} passes on: {order} {body}", poll_s=_POLL_S)

    def wait_left(self, name: str) -> None:
        """Return once a worker that was told to leave has ended."""
        code = self._life(name).wait(_STOP_S)
        if code:
            self.ended_badly.append(f"{name} ended with {code} after it was drained")

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self._life(name).process.send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT; changes nothing where it runs."""
        self._life(name).process.send_signal(signal.SIGCONT)

    def router(self, name: str) -> RouterEnd:
        """Return a router to ask."""
        return RouterEnd(f"http://127.0.0.1:{self.ports[name]}", self._http)

    def wait_live(self) -> None:
        """Return once each router has a stream to the present life of each worker; asserts that
        nobody died but who was killed."""
        dead = self._dead()
        assert not dead, "\n".join(self._life(name).transcript() for name in dead)
        for router in self.shape.routers:
            for worker in self.workers:
                self.wait_known(router, worker)

    def wait_known(self, router: str, worker: str, role: Role | None = None) -> None:
        """Return once a router has a stream to the present life of a worker, in a role if one is
        given."""

        def look() -> bool:
            known = statuses(self.router(router)).get(worker)
            pid = self._life(worker).process.pid
            if known is None or (known["state"], known["pid"]) != ("live", pid):
                return False
            return role in (None, known["role"])

        what = f"{worker} live at {router}" + (f" as {role}" if role else "")
        until(look, what, _OUTAGE_S if role else RECOVERY_S, poll_s=_POLL_S)

    def wait_serving(self, router: str) -> None:
        """Return once a router says that it could serve."""
        end = self.router(router)
        ready = f"{end.url}/health/ready"
        until(lambda: end.http.get(ready).is_success, f"{router} serves", poll_s=_POLL_S)

    def scrapes(self) -> dict[str, Scrape]:
        """Return each worker's series."""
        return {
            name: Scrape.of(self._http, f"http://{status['metrics_address']}")
            for name, status in statuses(self.router(self.shape.routers[0])).items()
        }

    def begin(self) -> None:
        """Count from here on, and take what is open now for what may stay open: everyone must be
        connected with everyone."""
        self._toil_before = self._toil_in_all()
        self._sizes = {
            name: count + self._may_grow(name) for name, count in self._sizes_now().items()
        }

    def _may_grow(self, name: str) -> int:
        """Return what is opened once however long it lasts."""
        what, _, process = name.partition(" of ")
        if what == "threads":
            return _POOLED_THREADS
        if what == "files" and process in self.workers:
            peers = [one for one in self.workers if one[:-1] == process[:-1] and one != process]
            return _FILES_OF_A_PAIR * len(peers)
        return 0

    def toil(self) -> Counter[str]:
        """Return what the decode workers have gone through since `begin`."""
        toil = self._toil_in_all()
        toil.subtract(self._toil_before)
        return toil

    def _toil_in_all(self) -> Counter[str]:
        workers = self.scrapes()
        decodes = [workers[name] for name in self.shape.decodes]
        outcomes = ("completed", "peer_lost", "timed_out", "revoked")
        counts = {
            outcome: total_over(decodes, "dovetail:handoffs_total", outcome=outcome)
            for outcome in outcomes
        }
        counts["fences"] = total_over(decodes, "dovetail:fences_total")
        counts["preemptions"] = total_over(decodes, "vllm:num_preemptions_total")
        return Counter({name: int(count) for name, count in counts.items()})

    def leaks(self, timeout_s: float = RECOVERY_S) -> list[str]:
        """Return what is left of requests that are over, and who died.

        Args:
            timeout_s: for all to be idle; generous for a busy machine.
        """
        clock = SystemClock()
        end = clock.now() + timeout_s
        while True:
            dead = [f"{name} died" for name in self._dead()]
            found = dead or self._in_use() or grown(self._sizes, self._sizes_now())
            if dead or not found or clock.now() >= end:
                return found
            time.sleep(_POLL_S)

    def complaints(self) -> list[str]:
        """Return what any process, dead ones too, logged as an error, and who ended badly."""
        lines = [line for lives in self._lives.values() for life in lives for line in life.err]
        return [*self.ended_badly, *(line for line in lines if _COMPLAINT.match(line))]

    def log(self, name: str) -> list[str]:
        """Return what a process's present life has logged so far."""
        return list(self._life(name).err)

    def pid(self, name: str) -> int:
        """Return the process id of a present life."""
        return self._life(name).process.pid

    def dispatches(self) -> dict[str, set[str]]:
        """Return the workers that each request was sent to, by the request's `x-request-id`."""
        found: dict[str, set[str]] = {}
        lives = [life for name in self.shape.routers for life in self._lives[name]]
        for line in (line for life in lives for line in life.err):
            sent = _SENT.search(line)
            if sent:
                found.setdefault(sent[2], set()).add(sent[1])
        return found

    def _dead(self) -> list[str]:
        return [name for name in self._lives if self._life(name).process.poll() is not None]

    def _in_use(self) -> list[str]:
        ends = {name: self.router(name) for name in self.shape.routers}
        routers = {name: Scrape.of(end.http, end.url) for name, end in ends.items()}
        found = in_use(self.scrapes(), routers)
        for name, end in ends.items():
            found += still_counted(name, statuses(end))
        return found

    def _sizes_now(self) -> dict[str, int]:
        """Return what must not grow. A later life of a process has no more open than the first."""
        sizes: dict[str, int] = {}
        for name in self._lives:
            process = psutil.Process(self._life(name).process.pid)
            sizes[f"files of {name}"] = process.num_fds()
            sizes[f"threads of {name}"] = process.num_threads()
        keys = self.etcd.ctl("get", "--prefix", "--keys-only", "/dovetail/").split()
        _, *leases = self.etcd.ctl("lease", "list").splitlines()
        return sizes | {"etcd keys": len(keys), "etcd leases": len(leases)}

    def _launch(self, name: str, *arguments: str) -> None:
        program = str(Path(sys.executable).with_name("dovetail"))
        lives = self._lives.setdefault(name, [])
        directory = self._directory / f"{name}.{len(lives)}"
        shared = ("--etcd", self.etcd.endpoint, *_SETTINGS, *self.shape.settings)
        lives.append(self._stack.enter_context(Launched([program, *arguments, *shared], directory)))

    def _life(self, name: str) -> Launched:
        return self._lives[name][-1]


_COMPLAINT = re.compile(r"\S+ \S+ (ERROR|CRITICAL) |Traceback ")

_SENT = re.compile(r": sent to (\S+): .* request_id=(\S+)$")
