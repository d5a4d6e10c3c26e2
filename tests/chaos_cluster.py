"""A cluster of real processes whose prefill workers may be killed and frozen at any time, and which
can tell what is left of requests that are over."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil

from core.clock import SystemClock
from tests.etcd_server import EtcdServer
from tests.faults import RECOVERY_S, statuses, until
from tests.launched import Launched
from tests.scrape import BLOCK_STATES, IN_USE, Scrape, total_over

PREFILLS = ("prefill-0", "prefill-1")
DECODES = ("decode-0", "decode-1")

TRY_S = 1.5
"""Without progress until an attempt is given up."""

_POLL_S = 0.1

_SETTINGS = (
    "--log-level", "warning",
    "--set", "engine.executor=mock",
    "--set", f"engine.kv_memory={256 * 1024}",  # 256 blocks
    "--set", "engine.chunk_tokens=128",
    "--set", "engine.mock_step_s=0.008",
    "--set", "engine.mock_prompt_token_s=0.0001",
    "--set", f"kv_transfer.try_s={TRY_S}",
    "--set", "kv_transfer.quarantine_s=0.5",
    "--set", "control_plane.lease_s=3",
)  # fmt: skip


class ChaosCluster:
    """etcd, a router, two decode and two prefill workers; a `tests.faults.Router`. A context.

    Nobody starts again what dies: a launcher's growing delays would leave later chaos without
    victims. The test does, under the same id.
    """

    def __init__(self, directory: Path, etcd: EtcdServer) -> None:
        self._directory = directory
        self._etcd = etcd
        self._stack = ExitStack()
        self._lives: dict[str, list[Launched]] = {}
        self._sizes: dict[str, int] = {}
        self._toil_before: Counter[str] = Counter()
        self.http = self._stack.enter_context(httpx.Client(trust_env=False, timeout=30))

    def __enter__(self) -> ChaosCluster:
        with ExitStack() as stack:  # ends what began where it does not become ready
            stack.callback(self._stack.close)
            self._start_all()
            stack.pop_all()
        return self

    def _start_all(self) -> None:
        for name in (*PREFILLS, *DECODES):
            self.start(name)
        self._launch("router", "router", "--port", "0")
        ready = self._life("router").wait_for(r"ready .*(http://\S+)", RECOVERY_S)
        self.url = ready[1]
        self.port = int(self.url.rpartition(":")[2])
        self.wait_live()

    def __exit__(self, *error: object) -> None:
        """Stop each with SIGTERM; all must end well where the test did."""
        with self._stack:
            if error[0] is not None:
                return
            for name in ("router", *DECODES, *PREFILLS):
                self.thaw(name)
                life = self._life(name)
                assert life.stop(signal.SIGTERM) == 0, life.transcript()
                life.assert_nothing_left()

    def start(self, worker: str) -> None:
        """Begin a worker's next life; returns at once."""
        role = worker.partition("-")[0]
        self._launch(worker, "worker", "--role", role, "--id", worker)

    def wait_ready(self, worker: str) -> None:
        """Return once its present life has registered."""
        self._life(worker).wait_for(r" ready +pid ", RECOVERY_S)

    def kill(self, worker: str) -> None:
        """kill -9, frozen or not."""
        process = self._life(worker).process
        process.kill()
        process.wait()

    def freeze(self, worker: str) -> None:
        """SIGSTOP."""
        self._life(worker).process.send_signal(signal.SIGSTOP)

    def thaw(self, worker: str) -> None:
        """SIGCONT; changes nothing where it runs."""
        self._life(worker).process.send_signal(signal.SIGCONT)

    def wait_live(self) -> None:
        """Return once the router has a stream to the present life of each worker; asserts that
        nobody died but who was killed."""
        pids = {name: self._life(name).process.pid for name in (*PREFILLS, *DECODES)}

        def look() -> bool:
            dead = self._dead()
            assert not dead, "\n".join(self._life(name).transcript() for name in dead)
            known = statuses(self)
            live = {name for name, one in known.items() if one["state"] == "live"}
            return live >= pids.keys() and all(known[name]["pid"] == pids[name] for name in pids)

        until(look, "all workers live")

    def workers(self) -> dict[str, Scrape]:
        """Return each worker's series."""
        return {
            name: Scrape.of(self.http, f"http://{status['metrics_address']}")
            for name, status in statuses(self).items()
        }

    def begin(self) -> None:
        """Count from here on, and take what is open now for what may stay open: everyone must be
        connected with everyone."""
        self._toil_before = self._toil_in_all()
        self._sizes = self._sizes_now()

    def toil(self) -> Counter[str]:
        """Return what the decode workers have gone through since `begin`."""
        toil = self._toil_in_all()
        toil.subtract(self._toil_before)
        return toil

    def _toil_in_all(self) -> Counter[str]:
        workers = self.workers()
        decodes = [workers[name] for name in DECODES]
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
            found = dead or self._in_use() or self._grown()
            if dead or not found or clock.now() >= end:
                return found
            time.sleep(_POLL_S)

    def complaints(self) -> list[str]:
        """Return what any process, dead ones too, logged as an error."""
        lines = [line for lives in self._lives.values() for life in lives for line in life.err]
        return [line for line in lines if _COMPLAINT.match(line)]

    def _dead(self) -> list[str]:
        return [name for name in self._lives if self._life(name).process.poll() is not None]

    def _in_use(self) -> list[str]:
        """Return what the processes' series say of requests under way."""
        found: list[str] = []
        workers = self.workers()
        for name, series in workers.items():
            blocks = series.blocks
            found += [f"{name}: {blocks[state]} {state}" for state in IN_USE if blocks[state]]
            if sum(blocks[state] for state in BLOCK_STATES) != blocks["total"]:
                found.append(f"{name}: {blocks} do not sum up")
        router = Scrape.of(self.http, self.url)
        for name, series in {**workers, "router": router}.items():
            totals = [(gauge, series.total(gauge)) for gauge in _GAUGES]
            found += [f"{name}: {total:g} {gauge}" for gauge, total in totals if total]
        return found

    def _grown(self) -> list[str]:
        now, allowed = self._sizes_now(), self._sizes
        grown = [name for name in allowed if now[name] > allowed[name]]
        return [f"{name}: {now[name]} were {allowed[name]}" for name in grown]

    def _sizes_now(self) -> dict[str, int]:
        """Return what must not grow: open files of those that live on, and etcd's keys."""
        lasting = {name: self._life(name).process.pid for name in ("router", *DECODES)}
        sizes = {f"files of {name}": psutil.Process(pid).num_fds() for name, pid in lasting.items()}
        keys = self._etcd.ctl("get", "--prefix", "--keys-only", "/dovetail/").split()
        return sizes | {"etcd keys": len(keys)}

    def _launch(self, name: str, *arguments: str) -> None:
        program = str(Path(sys.executable).with_name("dovetail"))
        lives = self._lives.setdefault(name, [])
        directory = self._directory / f"{name}.{len(lives)}"
        command = [program, *arguments, "--etcd", self._etcd.endpoint, *_SETTINGS]
        lives.append(self._stack.enter_context(Launched(command, directory)))

    def _life(self, name: str) -> Launched:
        return self._lives[name][-1]


_COMPLAINT = re.compile(r"\S+ \S+ (ERROR|CRITICAL) |Traceback ")

_GAUGES = (
    "dovetail:requests",
    "dovetail:http_requests",
    "dovetail:worker_requests",
    "dovetail:prefill_attempts",
    "dovetail:engine_sequences",
    "dovetail:quarantined_attempts",
)
