"""A typed face of NIXL's C++ agent: its calls without `nixl._api`'s conveniences and torch.

Every exception of NIXL becomes `FabricError` with its kind in the message. Not thread-safe.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import NewType, ParamSpec, TypeVar, cast

from core.addresses import is_loopback
from core.environment import pip_command, set_default
from core.errors import FabricError
from kv_transfer.nixl.bindings import Bindings, NativeAgent, Registration

Descriptor = tuple[int, int]
"""Address and bytes."""

Request = NewType("Request", int)
"""NIXL's handle of one transfer."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

_BINDINGS = "nixl_cu12._bindings"  # works without CUDA; the package `nixl` would choose by torch


class NixlAgent:
    """One agent on the UCX backend, without a progress thread: its calls make the progress.

    Args:
        name: unique among the agents that ever meet.
        listen: an address of 127.0.0.0/8 or ::1 keeps UCX on the loopback device; with any other,
            UCX chooses among all devices, or as UCX_NET_DEVICES says.

    Raises:
        FabricError: the wheel is missing, or UCX does not start.
    """

    def __init__(self, name: str, *, listen: str) -> None:
        self._nixl = _load(listen)
        self._errors = _exceptions(self._nixl)
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = False
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        config.captureTelemetry = False
        self._native: NativeAgent | None = self._call(self._nixl.nixlAgent, name, config)
        self._call(self._native.createBackend, "UCX", {})

    def register(self, address: int, num_bytes: int) -> Registration:
        """Register host memory for access by peers."""
        descs = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, num_bytes, 0, "")])
        self._call(self._agent.registerMem, descs, [])
        return descs

    def deregister(self, registration: Registration) -> None:
        """Undo `register`. Writes under way may still land."""
        self._call(self._agent.deregisterMem, registration, [])

    def metadata(self) -> bytes:
        """Return what a peer needs to reach what is registered now; under 0.5 kB."""
        return self._call(self._agent.getLocalMD)

    def load_peer(self, metadata: bytes) -> str:
        """Learn a peer; return the name that its metadata gives."""
        name = self._call(self._agent.loadRemoteMD, metadata)
        return name.decode() if isinstance(name, bytes) else name

    def forget_peer(self, name: str) -> None:
        """Forget a peer and disconnect from it."""
        self._call(self._agent.invalidateRemoteMD, name)

    def prepare_write(
        self, peer: str, local: Iterable[Descriptor], target: Iterable[Descriptor], tag: bytes
    ) -> Request:
        """Check a write of pairwise equal descriptors against what both sides registered."""
        return self._prepare(self._nixl.NIXL_WRITE, peer, local, target, tag)

    def prepare_read(
        self, peer: str, local: Iterable[Descriptor], source: Iterable[Descriptor]
    ) -> Request:
        """Check a read alike; nobody is notified of it."""
        return self._prepare(self._nixl.NIXL_READ, peer, local, source, b"")

    def post(self, request: Request, tag: bytes) -> bool:
        """Start a prepared write, or with an empty tag a read; return whether it is complete
        already.

        On CMA it copies here and now, with the GIL released.
        """
        return self._call(self._agent.postXferReq, request, tag) == self._nixl.NIXL_SUCCESS

    def is_done(self, request: Request) -> bool:
        """Make progress, and return whether a posted request is complete."""
        return self._call(self._agent.getXferStatus, request) == self._nixl.NIXL_SUCCESS

    def release(self, request: Request) -> None:
        """Free a request that is complete or failed."""
        self._call(self._agent.releaseXferReq, request)

    def notifications(self) -> dict[str, list[bytes]]:
        """Make progress, and return and forget the payloads that arrived, by sender's name."""
        return self._call(self._agent.getNotifs, {}, [])

    def close(self) -> None:
        """Destroy the agent; idempotent."""
        self._native = None  # the binding owns the agent: the last reference destroys it

    def _prepare(
        self,
        operation: object,
        peer: str,
        local: Iterable[Descriptor],
        remote: Iterable[Descriptor],
        tag: bytes,
    ) -> Request:
        kind = self._nixl.DRAM_SEG
        here = self._nixl.nixlXferDList(kind, [(address, size, 0) for address, size in local])
        there = self._nixl.nixlXferDList(kind, [(address, size, 0) for address, size in remote])
        create = self._agent.createXferReq
        return Request(self._call(create, operation, here, there, peer, tag, []))

    @property
    def _agent(self) -> NativeAgent:
        if self._native is None:
            msg = "the NIXL agent is closed"
            raise FabricError(msg)
        return self._native

    def _call(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except self._errors as error:
            kind = type(error).__name__.removeprefix("nixl").removesuffix("Error")
            msg = f"NIXL {kind}: {error}"
            raise FabricError(msg) from error


def _load(listen: str) -> Bindings:
    """Import the bindings; UCX reads its variables when its libraries are loaded."""
    if is_loopback(listen):
        set_default("UCX_NET_DEVICES", "lo")
    set_default("UCX_LOG_FILE", "stderr")  # standard output belongs to the command line
    try:
        module = importlib.import_module(_BINDINGS)
    except ImportError as error:
        command = f"{pip_command()} install nixl==1.5.1"
        msg = f"the wheel nixl-cu12 cannot be imported ({command}): {error}"
        raise FabricError(msg) from error
    return cast("Bindings", cast("object", module))


def _exceptions(module: object) -> tuple[type[Exception], ...]:
    """Return NIXL's exception classes; they share no base."""
    members = (getattr(module, name) for name in dir(module) if name.endswith("Error"))
    return tuple(member for member in members if issubclass(member, Exception))
