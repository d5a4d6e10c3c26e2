"""deploy.cli.main: help for newcomers, and one line with exit code 2 for every slip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import main as cli
from deploy.cli.main import main


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("dovetail: ")
    return line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "COMMAND"),
        (["upp"], "'upp'"),
        (["up", "--prot", "1"], "--prot"),
        (["up", "--prefill", "-1"], "-1"),
        (["up", "--prefill", "two"], "'two' must be a whole number"),
        (["up", "--decode", "0"], "--decode or --colocated"),
        (["up", "--routers", "0"], "'0' must be a whole number, 1 or more"),
        (["up", "--routers", "2", "--port", "65535"], "--port must be at most 65534, not 65535"),
        (["up", "--port", "eight"], "http.port = 'eight': must be a whole number"),
        (["up", "--port", "70000"], "http.port = 70000"),
        (
            ["up", "--executor", "gpu"],
            "engine.executor = 'gpu': must be 'auto' or 'native' or 'torch' or 'mock'",
        ),
        (["up", "--log-level", "loud"], "log.level = 'loud'"),
        (["up", "--prefil", "2"], "arguments: --prefil 2 (see `dovetail up --help`)"),
        (["up", "--set", "engine.device=cuda"], "engine.device = 'cuda': must be 'cpu'"),
        (["up", "--set", "engine"], "section.key=value"),
        (["up", "--set", "engine.thread=1"], "did you mean 'threads'?"),
        (["up", "--config", "/nowhere.toml"], "/nowhere.toml: No such file"),
        (["up", "--model", "/nowhere"], "'/nowhere': No such file"),
        (["up", "--port", "0", "--log-dir", "/dev/null/x"], "--log-dir /dev/null/x: Not a dir"),
        (["router"], "needs --etcd"),
        (["worker"], "--role"),
        (["worker", "--role", "boss"], "'boss'"),
        (["worker", "--role", "decode"], "needs --etcd"),
        (["worker", "--role", "both", "--etcd", "h:1", "--listen", "h:x"], "'h:x': must be HOST"),
        (["worker", "--role", "both", "--etcd", "h:1", "--listen", "0.0.0.0:1"], "--advertise"),
        (["worker", "--role", "both", "--etcd", "h:1", "--cpus", "a"], "'a': must be numbers"),
        (["worker", "--role", "both", "--etcd", "h:1", "--cpus", "9999"], "may use"),
        (["drain"], "WORKER"),
        (["drain", "d", "--deadline", "-1"], "'-1' must be a number of seconds, 0 or more"),
        (["drain", "d", "--deadline", "soon"], "'soon' must be a number of seconds"),
        (["role", "d"], "role"),
        (["role", "d", "boss"], "'boss'"),
        (["chat", "--url", "ftp://x"], "'ftp://x': must be like http://"),
        (["status", "--url", "http://127.0.0.1:port"], "must be like http://"),
    ],
)
def test_slip_is_one_line_and_exit_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert said in complaint(capsys)


@pytest.mark.parametrize("command", ["chat", "status", "drain d", "role d both"])
def test_no_cluster_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--url", "127.0.0.1:1"]) == 1
    assert "no cluster answers at http://127.0.0.1:1 (connection refused); start one with" in (
        complaint(capsys)
    )


@pytest.mark.parametrize(
    "command", ["", "up", "router", "worker", "status", "drain", "role", "chat", "version"]
)
def test_help_exists_for_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: dovetail" in shown
    assert "--parent-pid" not in shown
    assert "--ready-fd" not in shown


def test_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == "dovetail 0.1.0\n"


def test_slip_in_a_child_goes_to_the_launcher_not_to_stderr(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    with pipe.open("wb") as file:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "deploy", "router", "--ready-fd", str(file.fileno())],
            pass_fds=[file.fileno()],
            capture_output=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (2, b"")
    assert b"needs --etcd" in pipe.read_bytes()


def test_help_needs_no_heavy_import() -> None:
    """What keeps `dovetail --help` quick, stated so that it does not depend on the machine."""
    probe = "import sys, deploy.cli.commands as c; c.parse(['version']); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", probe], capture_output=True, check=True, text=True
    ).stdout.split()
    assert not {"torch", "numpy", "grpc", "nixl", "httptools", "etcd3aio"} & set(loaded)


def test_wrong_python_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.sys, "version_info", (3, 9, 1))
    assert main(["version"]) == 2
    assert "needs Python 3.11, 3.12 or 3.13; this one is 3.9" in complaint(capsys)


def test_missing_wheel_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "deploy.cli.commands", None)  # as if an import in it failed
    with pytest.raises(ModuleNotFoundError):
        main(["version"])  # one of our own modules: a bug, to be seen as one

    def missing(argv: list[str]) -> int:
        raise ModuleNotFoundError(name="nixl_cu12._api")

    monkeypatch.setitem(sys.modules, "deploy.cli.commands", type("Fake", (), {"run": missing}))
    assert main(["version"]) == 2
    assert "brings 'nixl_cu12' is missing: run `make up`" in complaint(capsys)
