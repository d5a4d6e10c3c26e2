"""deploy.launcher: start, prove, restart, stop in order, and leave nothing, by whatever end."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.launched import Launched

FAKE = Path(__file__).with_name("fake_cluster.py")
Start = Callable[..., Launched]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a fake cluster; files named in `wishes` tell children how to behave."""
    directory = tmp_path / "model"
    directory.mkdir()

    def starter(
        *wishes: str,
        prefill: int = 1,
        decode: int = 1,
        port: int = 0,
        etcd: str = "127.0.0.1:1",
        routers: int = 1,
    ) -> Launched:
        for wish in wishes:
            (directory / wish).touch()
        arguments = [str(directory), str(prefill), str(decode), str(port), etcd, str(routers)]
        command = [sys.executable, str(FAKE), "up", *arguments]
        return stack.enter_context(Launched(command, tmp_path / "tmp"))

    with ExitStack() as stack:
        yield starter


def journal(tmp_path: Path) -> list[str]:
    return (tmp_path / "model" / "journal").read_text().splitlines()


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=5)
    return not alive


def test_says_each_component_the_answer_its_path_and_what_next(start: Start) -> None:
    launched = start()
    ready = launched.wait_for(r"^ready +(http://127\.0\.0\.1:\d+)/v1 +serves fake-model")
    said = "\n".join(launched.out)
    for name in ("prefill-0", "decode-0", "router"):
        assert re.search(rf"^{name} +ready  pid \d+ +\S+:\d+  over fake$", said, re.MULTILINE), said
    assert "answered    Paris." in said
    launched.wait_for(
        r"^path +prefill-0 -> 3 KV blocks \(1\.11 MB\) -> decode-0; first token after"
    )
    launched.wait_for(rf"curl {ready[1]}/v1/chat/completions")
    launched.wait_for(rf"^  /\S+/dovetail chat --url {ready[1]}$")
    assert launched.stop() == 0
    assert launched.err == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_router_before_workers_and_leaves_nothing(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    launched = start(prefill=2)
    launched.wait_for("^ready ")
    assert len(launched.descendants()) == 4
    assert launched.stop(number) == 0
    stopped = [line for line in journal(tmp_path) if line.startswith("stop")]
    assert stopped[0] == "stop router"
    assert sorted(stopped[1:]) == ["stop decode-0", "stop prefill-0", "stop prefill-1"]
    assert launched.out[-1] == "stopped"
    launched.assert_nothing_left()


def test_terminals_ctrl_c_reaches_the_launcher_alone(start: Start, tmp_path: Path) -> None:
    launched = start()
    launched.wait_for("^ready ")
    os.killpg(launched.process.pid, signal.SIGINT)  # as a terminal does: the whole group
    assert launched.wait() == 0
    assert launched.err == [], "a child was interrupted too"
    stopped = [line for line in journal(tmp_path) if line.startswith("stop")]
    assert stopped[0] == "stop router"
    launched.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_kills_what_does_not_stop(start: Start, number: signal.Signals) -> None:
    launched = start("stubborn-router")
    launched.wait_for("^ready ")
    launched.process.send_signal(signal.SIGINT)
    launched.wait_for("^stopping ")
    assert launched.stop(number, timeout_s=5) == 128 + number
    assert launched.out[-1] == "killed"
    launched.assert_nothing_left()


def test_children_die_with_a_killed_launcher_and_the_next_one_tidies_up(
    start: Start, tmp_path: Path
) -> None:
    launched = start()
    launched.wait_for("^ready ")
    children = launched.descendants()
    assert len(children) == 3
    launched.process.kill()
    assert gone(children)
    assert len(list((tmp_path / "tmp").iterdir())) == 1, "nobody was left to remove it"
    successor = start()
    successor.wait_for("^ready ")
    assert successor.stop() == 0
    successor.assert_nothing_left()


def test_several_routers_have_ports_of_their_own_and_keep_them(
    start: Start, tmp_path: Path
) -> None:
    launched = start(routers=2)
    launched.wait_for("^ready ")
    first = launched.wait_for(r"^router-0 +ready  pid (\d+) +(http://\S+)")
    other = launched.wait_for(r"^router-1 +ready  pid (\d+) +(http://\S+)")
    assert first[2] != other[2]
    launched.wait_for(rf"^also at +{other[2]}/v1$")
    launched.wait_for(rf"^ready +{first[2]}/v1 ")
    psutil.Process(int(other[1])).kill()
    launched.wait_for(rf"^router-1 +ready  pid (?!{other[1]}\b)\d+ +{other[2]}\b")
    assert launched.stop() == 0
    stopped = [line for line in journal(tmp_path) if line.startswith("stop")]
    assert sorted(stopped[:2]) == ["stop router-0", "stop router-1"]
    launched.assert_nothing_left()


def test_worker_that_dies_is_started_again_under_its_name(start: Start, tmp_path: Path) -> None:
    launched = start()
    launched.wait_for("^ready ")
    first = int(launched.wait_for(r"^decode-0 +ready  pid (\d+)")[1])
    psutil.Process(first).kill()
    launched.wait_for(r"^decode-0 +died \(SIGKILL\), starts again in 0\.[2-5] s$")
    launched.wait_for(rf"^decode-0 +ready  pid (?!{first}\b)\d+")
    assert journal(tmp_path).count("start decode-0") == 2
    assert launched.stop() == 0
    launched.assert_nothing_left()


def test_restart_that_fails_is_tried_again_later(start: Start, tmp_path: Path) -> None:
    launched = start()
    launched.wait_for("^ready ")
    crash = tmp_path / "model" / "crash-decode-0"
    crash.touch()
    first = int(launched.wait_for(r"^decode-0 +ready  pid (\d+)")[1])
    psutil.Process(first).kill()
    launched.wait_for(r"^decode-0 +died \(exit code 3\), starts again in (0\.[5-9]|1\.0) s$")
    complaint = "dovetail: decode-0 ended before it was ready (exit code 3)"
    launched.wait_until(lambda: complaint in launched.err)  # stdout and stderr have no order
    assert complaint in launched.err
    crash.unlink()
    launched.wait_for(rf"^decode-0 +ready  pid (?!{first}\b)\d+")
    assert launched.stop() == 0
    launched.assert_nothing_left()


def test_slip_of_the_user_in_a_child_is_one_line_and_exit_code_2(start: Start) -> None:
    launched = start("refuse-prefill-0")
    assert launched.wait() == 2
    assert launched.err == ["dovetail: model 'x': is no GGUF file"]
    launched.assert_nothing_left()


def test_child_that_crashes_before_it_is_ready_stops_everything(start: Start) -> None:
    launched = start("crash-decode-0")
    assert launched.wait() == 1
    assert launched.err == ["dovetail: decode-0 ended before it was ready (exit code 3)"]
    launched.assert_nothing_left()


def test_port_in_use_is_said_before_anything_starts(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launched = start(port=port)
        assert launched.wait() == 2
    assert launched.out == []
    (line,) = launched.err
    assert line.startswith(f"dovetail: cannot bind to 127.0.0.1:{port}: Address already in use")
    assert not (tmp_path / "model" / "journal").exists()


def test_embedded_etcd_comes_first_is_restarted_in_place_and_goes_last(start: Start) -> None:
    launched = start(etcd="")
    launched.wait_for("^ready ")
    first = launched.wait_for(r"^etcd +ready  pid (\d+) +(127\.0\.0\.1:\d+)$")
    assert launched.out[0] == first.string
    psutil.Process(int(first[1])).kill()
    launched.wait_for(r"^etcd +died \(SIGKILL\), starts again in 0\.[2-5] s$")
    launched.wait_for(rf"^etcd +ready  pid (?!{first[1]}\b)\d+ +{first[2]}$")
    assert len(launched.descendants()) == 4
    assert launched.stop() == 0
    launched.assert_nothing_left()


def test_embedded_etcd_dies_with_a_killed_launcher(start: Start) -> None:
    launched = start(etcd="")
    launched.wait_for("^ready ")
    children = launched.descendants()
    assert len(children) == 4
    launched.process.kill()
    assert gone(children)
