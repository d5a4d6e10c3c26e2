"""Which processes make up a cluster on one machine, and their command lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from core.worker_record import Role
from deploy.launcher.cpu_shares import CpuShare
from deploy.options import UpOptions


class ComponentSpec(msgspec.Struct, frozen=True):
    """One child process; its pipe's `--ready-fd N` is appended when it starts."""

    name: str
    command: tuple[str, ...]


def plan_workers(
    options: UpOptions, base: Sequence[str], config_file: Path, shares: Sequence[CpuShare]
) -> list[ComponentSpec]:
    """Return the workers, each pinned to its share of the cores.

    Args:
        base: how this program is started, up to the subcommand, with `--parent-pid` last.
        config_file: the resolved configuration of the whole cluster.
        shares: one a worker.
    """
    counts = (
        ("prefill", Role.PREFILL, options.num_prefill),
        ("decode", Role.DECODE, options.num_decode),
        ("colocated", Role.BOTH, options.num_colocated),
    )
    named = [(f"{word}-{i}", role) for word, role, count in counts for i in range(count)]
    return [
        ComponentSpec(
            name=name,
            command=(
                *base,
                "worker",
                *("--config", str(config_file)),
                *("--id", name),
                *("--role", role.value),
                *("--model", str(options.model_path)),
                *("--set", f"engine.threads={share.threads}"),
                *(("--cpus", ",".join(map(str, share.cpus))) if share.cpus else ()),
            ),
        )
        for (name, role), share in zip(named, shares, strict=True)
    ]


def plan_routers(
    options: UpOptions, base: Sequence[str], config_file: Path, ports: Sequence[int]
) -> list[ComponentSpec]:
    """Return the routers, one at each port; one alone needs no number in its name."""
    names = ["router"] if len(ports) == 1 else [f"router-{i}" for i in range(len(ports))]
    return [
        ComponentSpec(
            name=name,
            command=(
                *base,
                "router",
                *("--config", str(config_file)),
                *("--id", name),
                *("--port", str(port)),
                *("--model", str(options.model_path)),
            ),
        )
        for name, port in zip(names, ports, strict=True)
    ]
