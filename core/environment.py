"""The only reader of the process environment."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ETCD_PASSWORD = "DOVETAIL_ETCD_PASSWORD"  # noqa: S105 - the variable's name
"""Names the variable that may hold the password of `control_plane.etcd_user`."""


def etcd_password() -> str:
    """Return the password of our user in etcd; empty: it is not in the environment."""
    return os.environ.get(ETCD_PASSWORD, "")


def native_library() -> Path | None:
    """Return DOVETAIL_NATIVE_LIBRARY, another build of the native kernels (one with sanitizers)."""
    path = os.environ.get("DOVETAIL_NATIVE_LIBRARY", "")
    return Path(path) if path else None


def temporary_directory() -> Path:
    """Return where files of one run go; whoever makes one removes it."""
    return Path(tempfile.gettempdir())


def cache_directory() -> Path | None:
    """Return where files go that can be made again, by the XDG base directory specification; None:
    this user has no such place."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # others are to be ignored
        return Path(named, "dovetail")
    try:
        return Path.home() / ".cache" / "dovetail"
    except RuntimeError:
        return None


def pip_command() -> str:
    """Return what a user types for the pip of this Python: another one would install elsewhere."""
    if sys.prefix == sys.base_prefix:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def openai_base_url() -> str:
    """Return OPENAI_BASE_URL, by which OpenAI clients find their API; empty where it is not set."""
    return os.environ.get("OPENAI_BASE_URL", "").strip()


def openai_api_key() -> str:
    """Return OPENAI_API_KEY; empty where it is not set."""
    return os.environ.get("OPENAI_API_KEY", "").strip()


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a child process: ours without proxies, plus `extra`.

    Internal channels stay inside the cluster, so no proxy variable may redirect them.
    """
    inherited = {
        name: value for name, value in os.environ.items() if name.lower() not in _PROXY_VARIABLES
    }
    return {**inherited, **(extra or {})}


def without_proxies() -> None:
    """Remove the proxy variables from this process; grpc and aiohttp read them at connect time."""
    for name in [name for name in os.environ if name.lower() in _PROXY_VARIABLES]:
        del os.environ[name]


def set_default(name: str, value: str) -> None:
    """Set a variable that a native library reads when it is loaded, unless the user did."""
    os.environ.setdefault(name, value)


def let_threads_sleep() -> None:
    """Make OpenMP's threads sleep at their barriers instead of spinning; call before torch is
    imported (NIXL imports it too).

    Spinning threads of several processes on the same cores keep each other from arriving: with a
    busy neighbour a prefill of 512 tokens took 3.5-17 s on two cores, and 0.5-1.7 s asleep.
    """
    set_default("OMP_WAIT_POLICY", "PASSIVE")


def let_grpc_be_quiet() -> None:
    """Keep gRPC's own lines off stderr unless the user wants them; call before grpc is imported.

    What goes wrong reaches us as exceptions, and is told once; gRPC would tell it at each attempt.
    """
    set_default("GRPC_VERBOSITY", "ERROR")


def let_tokenizers_be_serial() -> None:
    """Keep `tokenizers` from starting a thread a core, and from handing each text over to one."""
    set_default("TOKENIZERS_PARALLELISM", "false")


_PROXY_VARIABLES = frozenset(
    {"http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy"}
)
