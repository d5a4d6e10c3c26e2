"""Downloads from a hub that runs here: what is asked for, kept, resumed, refused."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
from huggingface_hub import (
    HfFileMetadata,
    close_session,
    constants,
    get_hf_file_metadata,
    snapshot_download,
)

from core.clock import SystemClock
from core.environment import child_environment
from core.errors import ModelError
from deploy.hub import blob, download
from deploy.hub.cache import CachedRepository, partial_of
from deploy.hub.download import fetch_model
from deploy.hub.model_id import ModelId
from deploy.hub.progress import LineProgress
from deploy.hub.wanted_files import INDEX
from deploy.model_path import FoundModel, find_model
from tests.fake_hub import FakeHub, Seen, running_hub

TINY = ModelId("org/tiny")
WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "README.md": b"read me",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": WEIGHTS[::-1],
}
NEEDED = {"config.json", "tokenizer.json", "model.safetensors"}
QUANTIZED = {"tiny-Q4_K_M.gguf": b"GGUF" + WEIGHTS, "tiny-Q8_0.gguf": b"GGUF"}
INVISIBLE = ("/api/agent-harnesses",)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(blob, "PAUSE_S", 0.0)
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", _template(hub.url))
        monkeypatch.setattr(constants, "HF_URL_HOSTS", frozenset({"127.0.0.1"}))
        close_session()  # a client of another test keeps that one's environment
        yield hub
        close_session()


def _template(url: str) -> str:
    return url + "/{repo_id}/resolve/{revision}/{filename}"


def _fetch(model: ModelId = TINY, *, only_text: bool = False) -> Path:
    return fetch_model(model, only_text=only_text, clock=SystemClock())


def _refused(model: ModelId = TINY) -> str:
    with pytest.raises(ModelError) as caught:
        _fetch(model)
    message = str(caught.value)
    assert message.startswith(f"model {str(model)!r}: ")
    assert "\n" not in message
    return message


def _names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def _visible(hub: FakeHub) -> list[Seen]:
    return [seen for seen in hub.seen if seen.path not in INVISIBLE]


def _partials(tmp_path: Path) -> list[int]:
    return [path.stat().st_size for path in tmp_path.rglob("*.incomplete")]


# --- what comes, and where it goes


def test_brings_what_is_read_and_nothing_else(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.add("org/tiny", FILES)
    path = _fetch()
    assert path == tmp_path / "hub" / "models--org--tiny" / "snapshots" / commit
    assert _names(path) == NEEDED
    for name in NEEDED:
        assert (path / name).read_bytes() == FILES[name]
    assert not hub.gets("pytorch_model")
    assert _partials(tmp_path) == []


def test_the_cache_is_the_one_that_other_programs_use(hub: FakeHub) -> None:
    hub.add("org/tiny", FILES)
    path = _fetch()
    num_seen = len(hub.gets("resolve"))
    theirs = snapshot_download("org/tiny", allow_patterns=sorted(NEEDED), local_files_only=True)
    assert Path(theirs) == path
    assert len(hub.gets("resolve")) == num_seen


def test_a_second_start_asks_for_the_list_alone(hub: FakeHub) -> None:
    hub.add("org/tiny", FILES)
    path = _fetch()
    hub.seen.clear()
    assert _fetch() == path
    assert [seen.path for seen in _visible(hub)] == ["/api/models/org/tiny/revision/main"]


def test_a_new_commit_brings_only_what_changed(hub: FakeHub) -> None:
    hub.add("org/tiny", FILES)
    first = _fetch()
    hub.add("org/tiny", {**FILES, "config.json": b'{"new": 1}'})
    hub.seen.clear()
    second = _fetch()
    assert second != first
    assert (second / "config.json").read_bytes() == b'{"new": 1}'
    assert (second / "model.safetensors").read_bytes() == WEIGHTS
    assert [seen.path.rpartition("/")[2] for seen in hub.gets("resolve")] == ["config.json"]
    assert not hub.gets("cdn")


def test_a_revision_is_another_commit(hub: FakeHub) -> None:
    hub.add("org/tiny", FILES)
    commit = hub.add("org/tiny", {**FILES, "config.json": b'{"v": 1}'}, revision="refs/pr/1")
    path = _fetch(ModelId("org/tiny", "refs/pr/1"))
    assert path.name == commit
    assert _fetch(ModelId("org/tiny", commit)) == path


def test_shards_are_those_of_the_index(hub: FakeHub) -> None:
    shards = {f"part-{at}.safetensors": bytes([at]) * 100 for at in range(3)}
    index = {"weight_map": {"a": "part-0.safetensors", "b": "part-1.safetensors"}}
    texts = {name: FILES[name] for name in ("config.json", "tokenizer.json")}
    files = {**texts, INDEX: json.dumps(index).encode(), **shards}
    hub.add("org/tiny", files)
    path = _fetch()
    assert _names(path) == {*texts, INDEX, "part-0.safetensors", "part-1.safetensors"}
    hub.add("org/tiny", {**files, INDEX: b'{"weight_map": {"a": "missing.safetensors"}}'})
    assert "names missing.safetensors, which it does not have" in _refused()
    hub.add("org/tiny", {**files, INDEX: b"{"})
    with pytest.raises(ModelError, match="not an index of safetensors shards"):
        _fetch()


def test_a_router_needs_no_weights(hub: FakeHub) -> None:
    hub.add("org/tiny", FILES)
    assert _names(_fetch(only_text=True)) == {"config.json", "tokenizer.json"}
    assert not hub.gets("cdn")
    assert _names(_fetch()) == NEEDED


@pytest.mark.parametrize("asked", ["Q4_K_M", "tiny-Q4_K_M.gguf"])
def test_a_gguf_file_comes_alone(hub: FakeHub, asked: str) -> None:
    hub.add("org/tiny", {"config.json": b"{}", **QUANTIZED})
    path = _fetch(ModelId("org/tiny", gguf=asked), only_text=True)
    assert path.name == "tiny-Q4_K_M.gguf"
    assert path.read_bytes() == QUANTIZED["tiny-Q4_K_M.gguf"]
    assert _names(path.parent) == {path.name}
    assert "several GGUF files; give org/tiny:FILE" in _refused()


def test_a_file_system_without_links_holds_the_files(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    hub.add("org/tiny", FILES)
    path = _fetch()
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert not (path / "model.safetensors").is_symlink()


def test_names_that_lead_out_of_the_cache_are_left(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/tiny", {**FILES, "../../evil.gguf": b"GGUF", "/evil.gguf": b"GGUF"})
    assert _names(_fetch()) == NEEDED
    assert "no such GGUF file" in _refused(ModelId("org/tiny", gguf="evil.gguf"))
    assert not list(tmp_path.rglob("evil*"))


def test_a_mirror_may_know_neither_sizes_nor_hashes(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bare(url: str, **given: Any) -> HfFileMetadata:
        return dataclasses.replace(get_hf_file_metadata(url, **given), size=None, etag=etag)

    hub.add("org/tiny", {"tiny.gguf": WEIGHTS})
    monkeypatch.setattr(download, "get_hf_file_metadata", bare)
    etag = "../../outside"
    assert "does not answer as a hub does" in _refused()
    etag = "5f-1a"
    assert _fetch().read_bytes() == WEIGHTS


def test_a_commit_that_is_no_name_is_refused(hub: FakeHub) -> None:
    hub.add("org/tiny", FILES)
    hub.rename_commit("org/tiny", "../../outside")
    assert "does not answer as a hub does" in _refused()


# --- cuts, damage, neighbours


def test_a_broken_download_goes_on_where_it_ended(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/tiny", FILES)
    hub.cuts["model.safetensors"] = [100_000]
    hub.statuses_after_cut["/org/tiny/resolve"] = 503
    assert "answered 503; try again later" in _refused()
    assert _partials(tmp_path) == [100_000]
    hub.statuses.clear()
    hub.seen.clear()
    path = _fetch()
    assert [seen.byte_range for seen in hub.gets("cdn")] == ["bytes=100000-"]
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert _partials(tmp_path) == []


def test_a_cut_is_mended_while_it_runs(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/tiny", FILES)
    hub.cuts["model.safetensors"] = [100_000]
    path = _fetch()
    assert [seen.byte_range for seen in hub.gets("cdn")] == ["", "bytes=100000-"]
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    said = capsys.readouterr()
    assert said.out.count("\n") == 1
    assert said.out.startswith("download    org/tiny: 3 files, 300 kB, to ")
    assert said.err.count("\n") == 1
    assert said.err.startswith("dovetail: warning: http://127.0.0.1")
    assert "the connection broke (peer closed connection" in said.err


def _leave_partial(tmp_path: Path, data: bytes) -> None:
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    repository = CachedRepository(tmp_path / "hub", "org/tiny")
    partial_of(repository.blob(digest)).write_bytes(data)


@pytest.mark.parametrize("kept", [WEIGHTS[:1000], WEIGHTS, WEIGHTS + b"too much"])
@pytest.mark.parametrize("ignores_range", [False, True])
def test_whatever_was_kept_ends_with_the_right_bytes(
    hub: FakeHub, tmp_path: Path, kept: bytes, ignores_range: bool
) -> None:
    hub.add("org/tiny", FILES)
    hub.ignores_range = ignores_range
    _leave_partial(tmp_path, kept)
    assert (_fetch() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damaged_bytes_are_not_kept(hub: FakeHub, tmp_path: Path, name: str) -> None:
    hub.add("org/tiny", FILES)
    hub.damaged.add(name)
    with pytest.raises(ModelError, match=f"{name}: its checksum is wrong.*start again"):
        _fetch()
    assert _partials(tmp_path) == []
    hub.damaged.clear()
    assert (_fetch() / name).read_bytes() == FILES[name]


def test_a_file_that_ends_early_is_not_kept(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/tiny", FILES)
    hub.shortened.add("model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: its size is wrong"):
        _fetch()
    assert _partials(tmp_path) == []


def test_a_file_that_does_not_end_does_not_fill_the_disk(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/tiny", FILES)
    hub.lengthened.add("model.safetensors")
    progress = LineProgress("org/tiny", 0, SystemClock())
    monkeypatch.setattr(download, "progress_of", lambda *_: progress)
    with pytest.raises(ModelError, match=r"model\.safetensors: its size is wrong"):
        _fetch()
    assert progress._done < len(WEIGHTS) + (1 << 20)
    assert _partials(tmp_path) == []


def test_of_a_file_of_unknown_size_nothing_is_kept(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it may have come, and a hub has no answer to who asks for more than all."""

    def bare(url: str, **given: Any) -> HfFileMetadata:
        return dataclasses.replace(get_hf_file_metadata(url, **given), size=None)

    hub.add("org/tiny", FILES)
    monkeypatch.setattr(download, "get_hf_file_metadata", bare)
    _leave_partial(tmp_path, WEIGHTS)
    assert (_fetch() / "model.safetensors").read_bytes() == WEIGHTS
    assert {seen.byte_range for seen in hub.gets("cdn")} == {""}


def test_a_connection_that_always_breaks_is_left(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/tiny", FILES)
    hub.cuts["model.safetensors"] = [1000, 1000, *[0] * blob.TRIES]
    assert "cannot be reached (peer closed connection" in _refused()
    assert _partials(tmp_path) == [2000]
    assert len(hub.gets("cdn")) == 1 + blob.TRIES


def test_what_was_kept_of_another_file_is_not_served(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/tiny", FILES)
    _leave_partial(tmp_path, b"x" * 1000)
    with pytest.raises(ModelError, match="its checksum is wrong"):
        _fetch()
    assert (_fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_two_processes_download_once(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()

    def say(line: str) -> None:
        if line == "waiting     another process downloads org/tiny":
            waits.set()

    monkeypatch.setattr(download, "say", say)
    hub.add("org/tiny", FILES)
    hub.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(_fetch) for _ in range(2)]
        assert waits.wait(60)
        hub.gate.set()
        assert starts[0].result() == starts[1].result()
    assert len(hub.gets("cdn")) == 1


# --- refusals


def test_a_missing_model_may_be_a_mistyped_path(hub: FakeHub) -> None:
    said = _refused(ModelId("models/llama"))
    assert f"is no path here, and {hub.url} has no such model, or a private one" in said
    hub.add("org/tiny", FILES)
    assert "org/tiny has no revision 'v9'" in _refused(ModelId("org/tiny", "v9"))


def test_pickles_are_refused_before_anything_comes(hub: FakeHub) -> None:
    hub.add("org/tiny", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    assert "pickles only (pytorch_model.bin), which run code" in _refused()
    assert not hub.gets("resolve")


def test_a_gated_model_needs_a_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", FILES)
    hub.gated.add("org/tiny")
    hub.token = "hf_good"
    assert f"is gated; accept its terms at {hub.url}/org/tiny and set HF_TOKEN" in _refused()
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "is gated, and HF_TOKEN's account has no access" in _refused()
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    hub.seen.clear()
    assert _names(_fetch()) == NEEDED
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
    assert f"{hub.url} {said}" in _refused()


def test_an_unknown_token_is_said(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", FILES)
    hub.statuses["/org/tiny/resolve"] = 401
    assert "does not know the token; set HF_TOKEN to a valid one" in _refused()


def test_nothing_answers(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "http://127.0.0.1:1 cannot be reached (" in _refused()


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
    assert f"{hub.url} cannot be reached (" in _refused()


def test_no_space_is_said_before_or_when_it_happens(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add("org/tiny", FILES)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(download.shutil, "disk_usage", lambda _: usage)
        assert "needs 300 kB, and 1 kB are free in" in _refused()
    assert not hub.gets("resolve")

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(blob, "http_stream_backoff", full)
    assert "no space is left for it in" in _refused()


def test_a_cache_that_cannot_be_written(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/tiny", FILES)
    (tmp_path / "hub").write_text("a file where the cache should be")
    assert "(Not a directory); set HF_HOME" in _refused()


def test_a_file_too_large_for_one_request(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", FILES)
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 100_000)
    assert "bring it by `hf download org/tiny model.safetensors`" in _refused()


def test_the_library_s_warnings_are_lines_too(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/tiny", FILES)
    _fetch()
    capsys.readouterr()
    logging.getLogger("huggingface_hub.any").warning("of two\nlines")
    assert capsys.readouterr().err == "dovetail: warning: of two lines\n"


# --- without a hub


def test_offline_takes_the_cache_and_asks_nobody(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/tiny", {**FILES, **QUANTIZED})
    path = _fetch()
    gguf = _fetch(ModelId("org/tiny", gguf="Q8_0"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.seen.clear()
    assert _fetch() == path
    assert _fetch(only_text=True) == path
    assert _fetch(ModelId("org/tiny", gguf="Q8_0")) == gguf
    assert hub.seen == []
    said = _refused(ModelId("org/tiny", gguf="Q4_K_M"))
    assert "nor whole in" in said
    assert "HF_HUB_OFFLINE is set; unset that once" in said
    assert "HF_HUB_OFFLINE" in _refused(ModelId("org/other"))


def test_offline_a_half_model_is_none(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", FILES)
    _fetch(only_text=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "nor whole in" in _refused()
    index = {"weight_map": {"a": "part-0.safetensors"}}
    snapshot = _fetch(only_text=True)
    (snapshot / INDEX).write_text(json.dumps(index))
    assert "nor whole in" in _refused()
    (snapshot / "part-0.safetensors").touch()
    assert _fetch() == snapshot


def test_a_hub_away_is_a_warning_where_the_cache_has_it(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/tiny", FILES)
    path = _fetch()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    capsys.readouterr()
    assert _fetch() == path
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
    assert found == FoundModel(_fetch(), "org/tiny")
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
