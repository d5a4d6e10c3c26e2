"""Reports of load clients, as the clients wrote them; and how they are run, on a small script.

The clients themselves live in another environment: `make clients` runs them.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

import bench.clients
from bench.client_reports import Load, Measured, Row, page, read_aiperf, read_guidellm
from bench.clients import (
    CHAT,
    TEXT,
    ClientFailed,
    Target,
    answered,
    export_tokenizer,
    measure,
)
from tests.router_server import serving, smollm2_path, smollm2_text
from tests.scripted_dispatcher import ScriptedDispatcher, saying

# guidellm 0.8.1 and aiperf 0.13.0, 6 requests of 32 and of 48 tokens: the fields that are read,
# and a neighbour of each.
GUIDELLM: dict[str, Any] = {
    "metadata": {"version": 2, "guidellm_version": "0.8.1"},
    "benchmarks": [
        {
            "type_": "generative_benchmark",
            "start_time": 1795987359.1851912,
            "metrics": {
                "request_totals": {"successful": 6, "errored": 0, "incomplete": 0, "total": 6},
                "time_to_first_token_ms": {
                    "successful": {"mean": 854.7256787617999, "median": 822.7825164794922},
                    "errored": {"mean": 0.0, "median": 0.0},
                },
                "inter_token_latency_ms": {
                    "successful": {"mean": 110.35394155850975, "median": 103.62502067319808},
                    "errored": {"mean": 0.0, "median": 0.0},
                },
                "output_tokens_per_second": {
                    "successful": {"mean": 14.689914697199072, "median": 15.440842006059558},
                    "errored": {"mean": 0.0, "median": 0.0},
                },
            },
        }
    ],
}
AIPERF: dict[str, Any] = {
    "schema_version": "1.4",
    "aiperf_version": "0.13.0",
    "start_time": "2026-11-29T21:24:28.606220",
    "request_count": {"unit": "requests", "avg": 6.0},
    "completed_request_count": {"unit": "requests", "avg": 6.0},
    "time_to_first_token": {"unit": "ms", "avg": 1133.0652391666667, "p50": 1149.4416374999998},
    "inter_token_latency": {"unit": "ms", "avg": 221.4061970336879, "p50": 218.84514916489363},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 8.16315499755218},
}
MEASURED = Measured("0.8.1", "2026-11-29", 6, 0, 822.7825164794922, 103.62502067319808, 14.6899)


def test_guidellm_s_report_is_read() -> None:
    assert read_guidellm(json.dumps(GUIDELLM).encode()) == msgspec.structs.replace(
        MEASURED, output_tokens_per_s=14.689914697199072
    )


def test_aiperf_s_report_is_read() -> None:
    assert read_aiperf(json.dumps(AIPERF).encode()) == Measured(
        version="0.13.0",
        date="2026-11-29",
        num_requests=6,
        num_errors=0,
        ttft_p50_ms=1149.4416374999998,
        itl_p50_ms=218.84514916489363,
        output_tokens_per_s=8.16315499755218,
    )


def test_requests_that_failed_or_were_cut_off_are_errors() -> None:
    totals = {"successful": 3, "errored": 2, "incomplete": 1, "total": 6}
    document = json.loads(json.dumps(GUIDELLM))
    document["benchmarks"][0]["metrics"]["request_totals"] = totals
    read = read_guidellm(json.dumps(document).encode())
    assert (read.num_requests, read.num_errors) == (6, 3)
    read = read_aiperf(json.dumps({**AIPERF, "request_count": {"avg": 4.0}}).encode())
    assert (read.num_requests, read.num_errors) == (6, 2)


def test_another_format_is_told_by_its_field() -> None:
    without = {name: value for name, value in AIPERF.items() if name != "time_to_first_token"}
    with pytest.raises(msgspec.ValidationError, match="`time_to_first_token`"):
        read_aiperf(json.dumps(without).encode())
    with pytest.raises(msgspec.ValidationError, match="length 1"):
        read_guidellm(json.dumps({**GUIDELLM, "benchmarks": []}).encode())


def test_the_page_has_a_line_for_each_run() -> None:
    text = page(
        "What was run.",
        [
            Row(Load("guidellm", CHAT, 1), MEASURED, 7, "2 cores, no GPU, load average 0.1"),
            Row(Load("aiperf", TEXT, 8), MEASURED, 6, "2 cores, no GPU, load average 1.9"),
        ],
    )
    assert "\n\nWhat was run.\n\n| client |" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {13}
    assert table[2] == (
        "| guidellm | 0.8.1 | `/v1/chat/completions` | 1 | 7 | 6 | 0 | 823 | 103.6 | 14.7 "
        "| 2026-11-29 | 2 cores, no GPU, load average 0.1 |"
    )
    assert table[3].startswith("| aiperf | 0.8.1 | `/v1/completions` | 8 |")


def test_transformers_reads_the_exported_tokenizer_as_the_router_does(tmp_path: Path) -> None:
    export_tokenizer(smollm2_path(), tmp_path / "tokenizer")
    exported: Any = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    router = smollm2_text()
    for text in ("Grüße, 1234  <|im_end|> 😀 world", "def f(x):\n    return x"):
        assert exported.encode(text) == router.encode(text)
    messages = [{"role": "user", "content": "Hello!"}]
    prompt = router.render_chat(messages)
    assert (
        exported.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == prompt
    )
    assert exported.model_max_length == router.max_model_len


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target("http://127.0.0.1:9", "smol", tmp_path / "tokenizer", 6)


def program(directory: Path, script: str) -> Path:
    """Write aiperf's stand-in; returns the directory of programs."""
    file = directory / "aiperf"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o700)
    return directory


def test_a_client_runs_and_its_report_is_read(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # aiperf would take the tokenizer's directory for a hub's name.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "report.json").write_text(json.dumps(AIPERF))
    script = f"""
        [ -z "${{HF_HUB_OFFLINE+set}}" ] || exit 7
        [ "$TMPDIR" = "{tmp_path}/run" ] || exit 8
        echo "$@"
        cp {tmp_path}/report.json {tmp_path}/run/profile_export_aiperf.json"""
    load = Load("aiperf", TEXT, 8)
    measured = measure(load, target, 3, program(tmp_path, script), tmp_path / "run")
    assert measured == read_aiperf(json.dumps(AIPERF).encode())
    arguments = (tmp_path / "run" / "output.txt").read_text()
    assert "--endpoint-type completions --use-server-token-count" in arguments
    assert "--concurrency 8" in arguments
    assert "--request-count 6" in arguments
    assert "--random-seed 3" in arguments


def test_a_client_that_fails_shows_its_last_words(target: Target, tmp_path: Path) -> None:
    programs = program(tmp_path, "echo no such option >&2; exit 3")
    with pytest.raises(ClientFailed, match=r"exit code 3\nno such option$"):
        measure(Load("aiperf", CHAT, 1), target, 1, programs, tmp_path / "run")


def test_a_client_that_writes_no_report_is_told(target: Target, tmp_path: Path) -> None:
    programs = program(tmp_path, "exit 0")
    with pytest.raises(ClientFailed, match=r"^aiperf: profile_export_aiperf\.json: .*No such file"):
        measure(Load("aiperf", CHAT, 1), target, 1, programs, tmp_path / "run")


def test_a_client_that_hangs_is_ended_with_its_children(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.clients, "RUN_S", 0.2)
    # Both, the script and its child, hold the fifo open for as long as they live.
    os.mkfifo(tmp_path / "alive")
    programs = program(tmp_path, f"exec 3<>{tmp_path}/alive\nsleep 600 &\nwait")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(ClientFailed, match=r"took longer than 0\.2 s"):
            measure(Load("aiperf", CHAT, 1), target, 1, programs, tmp_path / "run")
        assert select.select([reader], [], [], 30)[0], "somebody is left"
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


@pytest.mark.anyio
async def test_the_router_s_own_count_is_of_requests_that_it_answered_to_their_end() -> None:
    model = smollm2_text()
    async with serving(ScriptedDispatcher(saying(model, "Hello"))) as http:
        port = http.base_url.port
        assert port is not None
        before = await asyncio.to_thread(answered, port)
        body = {"model": "smol", "prompt": "hi", "max_tokens": 1}
        assert (await http.post(TEXT, json=body)).status_code == 200
        assert (await http.post(TEXT, json={**body, "model": "nosuch"})).status_code == 404
        assert await asyncio.to_thread(answered, port) - before == 1


def test_each_run_has_prompts_of_its_own(target: Target, tmp_path: Path) -> None:
    # With the same prompts again the prefix cache would answer.
    for arguments in (client.arguments for client in bench.clients.CLIENTS.values()):
        one, two = (arguments(Load("x", CHAT, 4), target, seed, tmp_path) for seed in (1, 2))
        assert one != two


def test_clients_that_are_not_installed_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["clients", "--programs", str(tmp_path)])
    assert bench.clients.main() == 2
    said = capsys.readouterr().err
    assert said == f"dovetail: {tmp_path}/guidellm: not there; `make clients` installs it\n"
