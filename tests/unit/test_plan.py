"""deploy.launcher.plan: names, roles and command lines of a cluster's processes."""

from __future__ import annotations

from pathlib import Path

from deploy.cli.arguments import build_parser
from deploy.launcher.cpu_shares import CpuShare
from deploy.launcher.plan import plan_routers, plan_workers
from deploy.options import UpOptions

BASE = ("python", "-m", "deploy", "--parent-pid", "42")
OPTIONS = UpOptions(2, 1, 1, Path("/models/m.gguf"))


def test_command_lines_are_ones_that_the_parser_reads() -> None:
    pinned, free = CpuShare(2, (4, 5)), CpuShare(1, ())
    specs = plan_workers(OPTIONS, BASE, Path("/run/c.toml"), [pinned, free, free, free])
    read = [build_parser().parse_args(spec.command[3:]) for spec in specs]
    assert [(a.id, a.role) for a in read] == [
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
        ("decode-0", "decode"),
        ("colocated-0", "both"),
    ]
    assert [a.cpus for a in read] == ["4,5", None, None, None]
    assert read[0].set == ["engine.threads=2"]
    assert {(str(a.config), a.model, a.parent_pid) for a in read} == {
        ("/run/c.toml", "/models/m.gguf", 42)
    }


def test_routers_read_the_same_file_and_model_and_have_a_port_each() -> None:
    specs = plan_routers(OPTIONS, BASE, Path("/run/c.toml"), [8000, 8001])
    read = [build_parser().parse_args(spec.command[3:]) for spec in specs]
    assert [spec.name for spec in specs] == ["router-0", "router-1"]
    assert [(a.command, a.id, a.port) for a in read] == [
        ("router", "router-0", "8000"),
        ("router", "router-1", "8001"),
    ]
    assert {(str(a.config), a.model) for a in read} == {("/run/c.toml", "/models/m.gguf")}


def test_one_router_has_no_number() -> None:
    (spec,) = plan_routers(OPTIONS, BASE, Path("/run/c.toml"), [8000])
    assert spec.name == "router"
