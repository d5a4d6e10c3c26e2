"""A hub that refuses, breaks or is away, and what the cache and the command line do then."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from huggingface_hub import (
    constants,
)

from core.clock import SystemClock
from core.environment import child_environment
from deploy.hub import blob, download
from deploy.hub.model_id import ModelId
from deploy.hub.wanted_files import INDEX
from deploy.model_path import FoundModel, find_model
from tests.fake_hub import FakeHub
from tests.hub_downloads import (
    FILES,
    NEEDED,
    QUANTIZED,
    fetch,
    names_in,
    refused,
)

# --- refusals


def test_a_missing_model_may_be_a_mistyped_path(hub: FakeHub) -> None:
    said = refused(ModelId("models/llama"))
    assert f"is no path here, and {hub.url} has no such model, or a private one" in said
    hub.add("org/tiny", FILES)
    assert "org/tiny has no revision 'v9'" in refused(ModelId("org/tiny", "v9"))


def test_pickles_are_refused_before_anything_comes(hub: FakeHub) -> None:
    hub.add("org/tiny", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    assert "pickles only (pytorch_model.bin), which run code" in refused()
    assert not hub.gets("resolve")


def test_a_gated_model_needs_a_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", FILES)
    hub.gated.add("org/tiny")
    hub.token = "hf_good"
    assert f"is gated; accept its terms at {hub.url}/org/tiny and set HF_TOKEN" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "is gated, and HF_TOKEN's account has no access" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    hub.seen.clear()
    assert names_in(fetch()) == NEEDED
    assert {seen.token for seen in hub.gets("cdn")} == {""}, "the token left the hub"
    assert {seen.token for seen in hub.gets("resolve")} == {"hf_good"}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, "lets this token not read it; set HF_TOKEN"),
        (429, "had too many requests; try again later, or set HF_TOKEN"),
        (500, "answered 500; try again later"),
        (200, "does not answer as a hub does; check HF_ENDPOINT"),
    ],
)
def test_each_answer_has_its_line(hub: FakeHub, status: int, said: str) -> None:
    hub.add("org/tiny", FILES)
    hub.statuses["/api/models"] = status
    assert f"{hub.url} {said}" in refused()


def test_an_unknown_token_is_said(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", FILES)
    hub.statuses["/org/tiny/resolve"] = 401
    assert "does not know the token; set HF_TOKEN to a valid one" in refused()


def test_nothing_answers(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "http://127.0.0.1:1 cannot be reached (" in refused()


@pytest.mark.parametrize("frozen", ["/api", "/org/tiny/resolve", "/cdn"])
def test_a_hub_that_froze_is_left(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, frozen: str
) -> None:
    hub.add("org/tiny", FILES)
    hub.frozen = {frozen}
    hub.gate.clear()
    monkeypatch.setattr(download, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    monkeypatch.setattr(blob, "TRIES", 2)
    assert f"{hub.url} cannot be reached (" in refused()


def test_no_space_is_said_before_or_when_it_happens(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add("org/tiny", FILES)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(download.shutil, "disk_usage", lambda _: usage)
        assert "needs 300 kB, and 1 kB are free in" in refused()
    assert not hub.gets("resolve")

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(blob, "http_stream_backoff", full)
    assert "no space is left for it in" in refused()


def test_a_cache_that_cannot_be_written(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/tiny", FILES)
    (tmp_path / "hub").write_text("a file where the cache should be")
    assert "(Not a directory); set HF_HOME" in refused()


def test_a_file_too_large_for_one_request(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", FILES)
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 100_000)
    assert "bring it by `hf download org/tiny model.safetensors`" in refused()


def test_the_library_s_warnings_are_lines_too(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/tiny", FILES)
    fetch()
    capsys.readouterr()
    logging.getLogger("huggingface_hub.any").warning("of two\nlines")
    assert capsys.readouterr().err == "dovetail: warning: of two lines\n"


# --- without a hub


def test_offline_takes_the_cache_and_asks_nobody(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/tiny", {**FILES, **QUANTIZED})
    path = fetch()
    gguf = fetch(ModelId("org/tiny", gguf="Q8_0"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.seen.clear()
    assert fetch() == path
    assert fetch(only_text=True) == path
    assert fetch(ModelId("org/tiny", gguf="Q8_0")) == gguf
    assert hub.seen == []
    said = refused(ModelId("org/tiny", gguf="Q4_K_M"))
    assert "nor whole in" in said
    assert "HF_HUB_OFFLINE is set; unset that once" in said
    assert "HF_HUB_OFFLINE" in refused(ModelId("org/other"))


def test_offline_a_half_model_is_none(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", FILES)
    fetch(only_text=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "nor whole in" in refused()
    index = {"weight_map": {"a": "part-0.safetensors"}}
    snapshot = fetch(only_text=True)
    (snapshot / INDEX).write_text(json.dumps(index))
    assert "nor whole in" in refused()
    (snapshot / "part-0.safetensors").touch()
    assert fetch() == snapshot


def test_a_hub_away_is_a_warning_where_the_cache_has_it(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/tiny", FILES)
    path = fetch()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    capsys.readouterr()
    assert fetch() == path
    said = capsys.readouterr().err
    assert said.startswith("dovetail: warning: model 'org/tiny': is no path here, and http://127")
    assert said.endswith("(the copy in the cache is used)\n")
    assert said.count("\n") == 1


# --- the command line


def test_a_path_of_that_name_wins(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/tiny", FILES)
    monkeypatch.chdir(tmp_path)
    found = find_model("org/tiny", SystemClock())
    assert found == FoundModel(fetch(), "org/tiny")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    (tmp_path / "org" / "tiny" / "config.json").touch()
    hub.seen.clear()
    assert find_model("org/tiny", SystemClock()) == FoundModel(tmp_path / "org" / "tiny")
    assert hub.seen == []


def test_the_command_line_reads_the_environment(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/gated", FILES)
    hub.gated.add("org/gated")
    hub.token = "hf_good"
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_other"}
    command = [sys.executable, "-m", "deploy", "up", "--model", "org/gated"]
    done = subprocess.run(
        command,
        env=child_environment(variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("dovetail: model 'org/gated': is gated, and HF_TOKEN's account")
    assert done.stderr.count("\n") == 1


def test_local_models_import_no_hub() -> None:
    code = (
        "import sys\n"
        "from core.clock import SystemClock\n"
        "from deploy.cli.commands import find_model\n"
        "find_model('', SystemClock())\n"
        "sys.exit('huggingface_hub' in sys.modules or 'tqdm' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
