"""One function a command: from parsed arguments to a running process and its exit code."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import socket
import sys
from collections.abc import Callable, Sequence

import msgspec

from core.addresses import is_loopback
from core.clock import SystemClock
from core.config import Config
from core.environment import (
    let_tokenizers_be_serial,
    openai_api_key,
    openai_base_url,
    without_proxies,
)
from core.errors import DovetailError, UsageError
from core.ids import WorkerId
from core.worker_record import Role
from deploy.address import exposure_warning, fabric_warning, is_wildcard, parse_listen
from deploy.api_client import ApiAddress
from deploy.cli.arguments import DEFAULT_URL, parse
from deploy.launcher.cpu_shares import parse_cpus
from deploy.launcher.parent_death import die_with_parent
from deploy.model_path import FoundModel, find_model
from deploy.options import RouterOptions, UpOptions, WorkerOptions
from deploy.readiness import StartRefused, announce
from deploy.settings import load_config
from deploy.terminal import complain, say

FAILED = 1
USAGE_ERROR = 2

_CONFIG_KEY_BY_FLAG = {
    "model": "model.path",
    "served_model_name": "model.served_name",
    "executor": "engine.executor",
    "host": "http.host",
    "port": "http.port",
    "etcd": "control_plane.etcd",
    "log_level": "log.level",
    "log_format": "log.format",
}


def run(argv: Sequence[str]) -> int:
    """Run one command; errors become one line on stderr, or on the launcher's pipe."""
    ready_fd: int | None = None
    try:
        arguments = parse(argv)
        ready_fd = getattr(arguments, "ready_fd", None)
        if arguments.parent_pid is not None:
            die_with_parent(arguments.parent_pid)
        return _COMMANDS[arguments.command](arguments)
    except UsageError as error:
        if ready_fd is None:
            complain(str(error))
        else:
            announce(ready_fd, StartRefused(str(error)))
        return USAGE_ERROR
    except DovetailError as error:
        complain(str(error))
        return FAILED


def _up(arguments: argparse.Namespace) -> int:
    config = _config(arguments, defaults={"log.level": "warning"})
    _warn(exposure_warning(config))
    _warn(fabric_warning(config))
    options, config = _up_options(arguments, config)

    # Imported here, as in all commands: what a command does not use costs it no time.
    from deploy.launcher.launcher import run_up  # noqa: PLC0415

    return asyncio.run(run_up(config, options, clock=SystemClock()))


def _up_options(arguments: argparse.Namespace, config: Config) -> tuple[UpOptions, Config]:
    default = 0 if arguments.colocated else 1
    num_decode = default if arguments.decode is None else arguments.decode
    if not num_decode + arguments.colocated:
        msg = "up: nobody would generate: ask for at least one --decode or --colocated worker"
        raise UsageError(msg)
    model = find_model(config.model.path, SystemClock())  # last: it may be downloaded
    options = UpOptions(
        num_prefill=default if arguments.prefill is None else arguments.prefill,
        num_decode=num_decode,
        num_colocated=arguments.colocated,
        model_path=model.path,
        log_directory=arguments.log_dir,
        num_routers=arguments.routers,
    )
    return options, _named(config, model)


def _named(config: Config, model: FoundModel) -> Config:
    """Serve a model under the name that it was found by, unless the user gave one."""
    if config.model.served_name or not model.served_name:
        return config
    named = msgspec.structs.replace(config.model, served_name=model.served_name)
    return msgspec.structs.replace(config, model=named)


def _router(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    _require_etcd(config, "router")
    model = find_model(config.model.path, SystemClock(), only_text=True)
    config = _named(config, model)
    options = RouterOptions(name=arguments.id, model_path=model.path, ready_fd=arguments.ready_fd)
    if arguments.parent_pid is None:  # else the launcher said it
        _warn(exposure_warning(config))
    without_proxies()
    let_tokenizers_be_serial()

    import uvloop  # noqa: PLC0415

    from deploy.router_process import run_router  # noqa: PLC0415

    uvloop.run(run_router(config, options))
    return 0


def _worker(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    _require_etcd(config, "worker")
    options, config = _worker_options(arguments, config)
    if arguments.parent_pid is None:  # else the launcher said it
        _warn(fabric_warning(config))
    if arguments.cpus is not None:
        _pin(arguments.cpus)
    without_proxies()

    # After the pinning: arithmetic libraries count their cores when they are loaded.
    from deploy.worker.process import run_worker  # noqa: PLC0415

    asyncio.run(run_worker(config, options))
    return 0


def _worker_options(arguments: argparse.Namespace, config: Config) -> tuple[WorkerOptions, Config]:
    host, port = parse_listen(arguments.listen)
    advertise = arguments.advertise or host
    if is_wildcard(advertise):
        msg = f"--listen {arguments.listen}: add --advertise HOST, the one that others reach it by"
        raise UsageError(msg)
    if not is_loopback(host):
        complain(
            f"warning: the worker binds to {host}; its channels have no authentication, "
            "keep them on a private network"
        )
    model = find_model(config.model.path, SystemClock())
    options = WorkerOptions(
        worker_id=WorkerId(arguments.id or f"{arguments.role}-{socket.gethostname()}"),
        role=Role(arguments.role),
        model_path=model.path,
        listen_host=host,
        listen_port=port,
        advertise_host=advertise,
        ready_fd=arguments.ready_fd,
    )
    return options, _named(config, model)


def _api(arguments: argparse.Namespace) -> ApiAddress:
    from_environment = openai_base_url() if arguments.url is None else ""
    return ApiAddress(
        url=arguments.url or from_environment or DEFAULT_URL,
        url_source="OPENAI_BASE_URL" if from_environment else "--url",
        api_key=openai_api_key() if arguments.api_key is None else arguments.api_key,
    )


def _status(arguments: argparse.Namespace) -> int:
    from deploy.cli.status import run_status  # noqa: PLC0415

    return run_status(_api(arguments), as_json=arguments.json)


def _drain(arguments: argparse.Namespace) -> int:
    from deploy.cli.orders import run_drain  # noqa: PLC0415

    return run_drain(
        _api(arguments),
        arguments.worker,
        deadline_s=arguments.deadline,
        is_forced=arguments.force,
        clock=SystemClock(),
    )


def _role(arguments: argparse.Namespace) -> int:
    from deploy.cli.orders import run_role  # noqa: PLC0415

    return run_role(
        _api(arguments),
        arguments.worker,
        arguments.role,
        is_forced=arguments.force,
        clock=SystemClock(),
    )


def _chat(arguments: argparse.Namespace) -> int:
    from deploy.cli.chat import ChatOptions, run_chat  # noqa: PLC0415

    options = ChatOptions(
        api=_api(arguments),
        model=arguments.model,
        system=arguments.system,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
    )
    return run_chat(options, stdin=sys.stdin)


def _version(_: argparse.Namespace) -> int:
    say(f"dovetail {importlib.metadata.version('dovetail')}")
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "router": _router,
    "worker": _worker,
    "status": _status,
    "drain": _drain,
    "role": _role,
    "chat": _chat,
    "version": _version,
}


def _config(arguments: argparse.Namespace, defaults: dict[str, str] | None = None) -> Config:
    given = vars(arguments)
    flags = {
        key: given[flag] for flag, key in _CONFIG_KEY_BY_FLAG.items() if given.get(flag) is not None
    }
    return load_config(arguments.config, arguments.set, flags, defaults)


def _require_etcd(config: Config, command: str) -> None:
    if not config.control_plane.etcd:
        msg = f"{command}: needs --etcd HOST:PORT (`dovetail up` starts an etcd of its own)"
        raise UsageError(msg)


def _warn(warning: str | None) -> None:
    if warning:
        complain(warning)


def _pin(text: str) -> None:
    try:
        os.sched_setaffinity(0, parse_cpus(text))
    except OSError:
        allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        msg = f"--cpus {text}: this process may use {allowed} only"
        raise UsageError(msg) from None
