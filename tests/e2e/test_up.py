"""`dovetail up` on the real model: it answers, shows the path, and stops clean."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster import Up

pytestmark = pytest.mark.e2e

DOVETAIL = str(Path(sys.executable).with_name("dovetail"))


def test_start_shows_components_answer_and_path(up: Up) -> None:
    cluster = up()
    said = "\n".join(cluster.launched.out)
    for name in ("etcd", "prefill-0", "decode-0", "router"):
        assert re.search(rf"^{name} +ready  pid \d+ +\S+", said, re.MULTILINE), said
    for worker in ("prefill-0", "decode-0"):
        assert re.search(rf"^{worker} .*  over .*nixl", said, re.MULTILINE), said
    assert re.search(r"^answered +.*Paris", said, re.MULTILINE), said
    assert re.search(
        r"^path +prefill-0 -> [1-9]\d* KV blocks? \([\d.]+ MB\) -> decode-0; first token after \d+",
        said,
        re.MULTILINE,
    ), said


def test_official_client_gets_an_answer(up: Up) -> None:
    cluster = up()
    answer = cluster.client().chat.completions.create(
        model=cluster.model,
        messages=[{"role": "user", "content": "Name the capital of France."}],
        temperature=0,
        max_tokens=24,
    )
    assert "Paris" in (answer.choices[0].message.content or "")


def test_chat_reads_a_pipe(up: Up) -> None:
    command = [DOVETAIL, "chat", "--url", up().url, "--temperature", "0", "--max-tokens", "24"]
    done = subprocess.run(
        command, input="Name the capital of France.", capture_output=True, text=True, check=True
    )
    assert "Paris" in done.stdout
    assert done.stderr == ""


def test_status_shows_both_workers(up: Up) -> None:
    command = [DOVETAIL, "status", "--url", up().url]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^prefill-0 +prefill ", table, re.MULTILINE), table
    assert re.search(r"^decode-0 +decode ", table, re.MULTILINE), table


def test_worker_that_was_killed_comes_back_and_serves(up: Up) -> None:
    cluster = up("--executor", "mock")
    first = cluster.pid("decode-0")
    psutil.Process(first).kill()
    cluster.launched.wait_for(r"^decode-0 +died \(SIGKILL\)")
    cluster.launched.wait_for(rf"^decode-0 +ready  pid (?!{first}\b)\d+", 60)
    answer = cluster.client().chat.completions.create(
        model=cluster.model, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
