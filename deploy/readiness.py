"""How a child process tells its launcher that it serves, or why it never will.

One JSON line on an inherited pipe, then the child closes its end. A process that was started by
hand has no pipe and says the same to its user on stdout.
"""

from __future__ import annotations

import os

import msgspec

from deploy.terminal import say


class Readiness(msgspec.Struct, frozen=True, tag="ready"):
    """A component serves.

    Attributes:
        name: "router", "prefill-0".
        address: host:port that it serves on; the router's is a URL.
        fabric: a worker's transport backend ("nixl").
        transport: what the backend uses, where it tells ("ucx (cma)").
        model: name of the served model, where it adds something.
    """

    name: str
    pid: int
    address: str
    fabric: str = ""
    transport: str = ""
    model: str = ""


class StartRefused(msgspec.Struct, frozen=True, tag="refused"):
    """A user's slip keeps the component from starting; the message is one line."""

    message: str


Report = Readiness | StartRefused


def announce(ready_fd: int | None, report: Report) -> None:
    """Tell the launcher, or the user where there is no launcher. Call once; closes `ready_fd`.

    A launcher that is gone already changes nothing: the child dies with it.
    """
    if ready_fd is None:
        if isinstance(report, Readiness):
            say(describe(report))
        return
    line = msgspec.json.encode(report) + b"\n"
    try:
        with os.fdopen(ready_fd, "wb") as pipe:
            pipe.write(line)
    except BrokenPipeError:
        return


def parse(line: bytes) -> Report | None:
    """Return what a child announced; None when it closed its pipe without a whole line."""
    if not line.endswith(b"\n"):
        return None
    return msgspec.json.decode(line, type=Report)


def describe(ready: Readiness) -> str:
    """Return the line that a person reads: name, pid, address, and what else is known."""
    line = f"{ready.name:<12} ready  pid {ready.pid:<8} {ready.address}"
    if ready.model:
        line += f"  serves {ready.model}"
    fabric = ", ".join(part for part in (ready.fabric, ready.transport) if part)
    return f"{line}  over {fabric}" if fabric else line
