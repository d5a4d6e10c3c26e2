"""Types of NIXL's C++ extension module, which ships none; only what `nixl.agent` uses."""
# ruff: noqa: N802, N815 - the names are NIXL's

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NewType, Protocol

Registration = NewType("Registration", object)
"""NIXL's list of registered descriptors."""


class NativeAgent(Protocol):
    """`nixlAgent` of the bindings, as far as it is used here."""

    def createBackend(self, kind: str, params: Mapping[str, str], /) -> int: ...
    def registerMem(self, descs: object, backends: list[int], /) -> None: ...
    def deregisterMem(self, descs: object, backends: list[int], /) -> None: ...
    def getLocalMD(self) -> bytes: ...
    def loadRemoteMD(self, metadata: bytes, /) -> bytes | str: ...
    def invalidateRemoteMD(self, name: str, /) -> None: ...
    def createXferReq(
        self,
        operation: object,
        local: object,
        remote: object,
        agent: str,
        notification: bytes,
        backends: list[int],
        /,
    ) -> int: ...
    def postXferReq(self, request: int, notification: bytes, /) -> object: ...
    def getXferStatus(self, request: int, /) -> object: ...
    def releaseXferReq(self, request: int, /) -> None: ...
    def getNotifs(
        self, known: Mapping[str, list[bytes]], backends: list[int], /
    ) -> dict[str, list[bytes]]: ...


class AgentConfig(Protocol):
    useProgThread: bool
    useListenThread: bool
    syncMode: object
    captureTelemetry: bool


class Bindings(Protocol):
    """The extension module, as far as it is used here."""

    DRAM_SEG: object
    NIXL_READ: object
    NIXL_WRITE: object
    NIXL_SUCCESS: object
    NIXL_THREAD_SYNC_NONE: object

    def nixlAgentConfig(self) -> AgentConfig: ...
    def nixlAgent(self, name: str, config: AgentConfig, /) -> NativeAgent: ...
    def nixlRegDList(
        self, kind: object, descs: Sequence[tuple[int, int, int, str]], /
    ) -> Registration: ...
    def nixlXferDList(self, kind: object, descs: Sequence[tuple[int, int, int]], /) -> object: ...
