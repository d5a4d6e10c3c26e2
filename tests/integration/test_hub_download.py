"""Downloads from a hub that runs here: what is asked for, kept and resumed."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
from huggingface_hub import (
    HfFileMetadata,
    get_hf_file_metadata,
    snapshot_download,
)

from core.clock import SystemClock
from core.errors import ModelError
from deploy.hub import blob, download
from deploy.hub.cache import CachedRepository, partial_of
from deploy.hub.model_id import ModelId
from deploy.hub.progress import LineProgress
from deploy.hub.wanted_files import INDEX
from tests.fake_hub import FakeHub
from tests.hub_downloads import (
    FILES,
    NEEDED,
    QUANTIZED,
    WEIGHTS,
    fetch,
    names_in,
    partials,
    refused,
    visible,
)

# --- what comes, and where it goes


def test_brings_what_is_read_and_nothing_else(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.add("org/tiny", FILES)
    path = fetch()
    assert path == tmp_path / "hub" / "models--org--tiny" / "snapshots" / commit
    assert names_in(path) == NEEDED
    for name in NEEDED:
        assert (path / name).read_bytes() == FILES[name]
    assert not hub.gets("pytorch_model")
    assert partials(tmp_path) == []


def test_the_cache_is_the_one_that_other_programs_use(hub: FakeHub) -> None:
    hub.add("org/tiny", FILES)
    path = fetch()
    num_seen = len(hub.gets("resolve"))
    theirs = snapshot_download("org/tiny", allow_patterns=sorted(NEEDED), local_files_only=True)
    assert Path(theirs) == path
    assert len(hub.gets("resolve")) == num_seen


def test_a_second_start_asks_for_the_list_alone(hub: FakeHub) -> None:
    hub.add("org/tiny", FILES)
    path = fetch()
    hub.seen.clear()
    assert fetch() == path
    assert [seen.path for seen in visible(hub)] == ["/api/models/org/tiny/revision/main"]


def test_a_new_commit_brings_only_what_changed(hub: FakeHub) -> None:
    hub.add("org/tiny", FILES)
    first = fetch()
    hub.add("org/tiny", {**FILES, "config.json": b'{"new": 1}'})
    hub.seen.clear()
    second = fetch()
    assert second != first
    assert (second / "config.json").read_bytes() == b'{"new": 1}'
    assert (second / "model.safetensors").read_bytes() == WEIGHTS
    assert [seen.path.rpartition("/")[2] for seen in hub.gets("resolve")] == ["config.json"]
    assert not hub.gets("cdn")


def test_a_revision_is_another_commit(hub: FakeHub) -> None:
    hub.add("org/tiny", FILES)
    commit = hub.add("org/tiny", {**FILES, "config.json": b'{"v": 1}'}, revision="refs/pr/1")
    path = fetch(ModelId("org/tiny", "refs/pr/1"))
    assert path.name == commit
    assert fetch(ModelId("org/tiny", commit)) == path


def test_shards_are_those_of_the_index(hub: FakeHub) -> None:
    shards = {f"part-{at}.safetensors": bytes([at]) * 100 for at in range(3)}
    index = {"weight_map": {"a": "part-0.safetensors", "b": "part-1.safetensors"}}
    texts = {name: FILES[name] for name in ("config.json", "tokenizer.json")}
    files = {**texts, INDEX: json.dumps(index).encode(), **shards}
    hub.add("org/tiny", files)
    path = fetch()
    assert names_in(path) == {*texts, INDEX, "part-0.safetensors", "part-1.safetensors"}
    hub.add("org/tiny", {**files, INDEX: b'{"weight_map": {"a": "missing.safetensors"}}'})
    assert "names missing.safetensors, which it does not have" in refused()
    hub.add("org/tiny", {**files, INDEX: b"{"})
    with pytest.raises(ModelError, match="not an index of safetensors shards"):
        fetch()


def test_a_router_needs_no_weights(hub: FakeHub) -> None:
    hub.add("org/tiny", FILES)
    assert names_in(fetch(only_text=True)) == {"config.json", "tokenizer.json"}
    assert not hub.gets("cdn")
    assert names_in(fetch()) == NEEDED


@pytest.mark.parametrize("asked", ["Q4_K_M", "tiny-Q4_K_M.gguf"])
def test_a_gguf_file_comes_alone(hub: FakeHub, asked: str) -> None:
    hub.add("org/tiny", {"config.json": b"{}", **QUANTIZED})
    path = fetch(ModelId("org/tiny", gguf=asked), only_text=True)
    assert path.name == "tiny-Q4_K_M.gguf"
    assert path.read_bytes() == QUANTIZED["tiny-Q4_K_M.gguf"]
    assert names_in(path.parent) == {path.name}
    assert "several GGUF files; give org/tiny:FILE" in refused()


def test_a_file_system_without_links_holds_the_files(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    hub.add("org/tiny", FILES)
    path = fetch()
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert not (path / "model.safetensors").is_symlink()


def test_names_that_lead_out_of_the_cache_are_left(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/tiny", {**FILES, "../../evil.gguf": b"GGUF", "/evil.gguf": b"GGUF"})
    assert names_in(fetch()) == NEEDED
    assert "no such GGUF file" in refused(ModelId("org/tiny", gguf="evil.gguf"))
    assert not list(tmp_path.rglob("evil*"))


def test_a_mirror_may_know_neither_sizes_nor_hashes(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bare(url: str, **given: Any) -> HfFileMetadata:
        return dataclasses.replace(get_hf_file_metadata(url, **given), size=None, etag=etag)

    hub.add("org/tiny", {"tiny.gguf": WEIGHTS})
    monkeypatch.setattr(download, "get_hf_file_metadata", bare)
    etag = "../../outside"
    assert "does not answer as a hub does" in refused()
    etag = "5f-1a"
    assert fetch().read_bytes() == WEIGHTS


def test_a_commit_that_is_no_name_is_refused(hub: FakeHub) -> None:
    hub.add("org/tiny", FILES)
    hub.rename_commit("org/tiny", "../../outside")
    assert "does not answer as a hub does" in refused()


# --- cuts, damage, neighbours


def test_a_broken_download_goes_on_where_it_ended(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/tiny", FILES)
    hub.cuts["model.safetensors"] = [100_000]
    hub.statuses_after_cut["/org/tiny/resolve"] = 503
    assert "answered 503; try again later" in refused()
    assert partials(tmp_path) == [100_000]
    hub.statuses.clear()
    hub.seen.clear()
    path = fetch()
    assert [seen.byte_range for seen in hub.gets("cdn")] == ["bytes=100000-"]
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert partials(tmp_path) == []


def test_a_cut_is_mended_while_it_runs(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/tiny", FILES)
    hub.cuts["model.safetensors"] = [100_000]
    path = fetch()
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
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damaged_bytes_are_not_kept(hub: FakeHub, tmp_path: Path, name: str) -> None:
    hub.add("org/tiny", FILES)
    hub.damaged.add(name)
    with pytest.raises(ModelError, match=f"{name}: its checksum is wrong.*start again"):
        fetch()
    assert partials(tmp_path) == []
    hub.damaged.clear()
    assert (fetch() / name).read_bytes() == FILES[name]


def test_a_file_that_ends_early_is_not_kept(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/tiny", FILES)
    hub.shortened.add("model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: its size is wrong"):
        fetch()
    assert partials(tmp_path) == []


def test_a_file_that_does_not_end_does_not_fill_the_disk(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/tiny", FILES)
    hub.lengthened.add("model.safetensors")
    progress = LineProgress("org/tiny", 0, SystemClock())
    monkeypatch.setattr(download, "progress_of", lambda *_: progress)
    with pytest.raises(ModelError, match=r"model\.safetensors: its size is wrong"):
        fetch()
    assert progress._done < len(WEIGHTS) + (1 << 20)
    assert partials(tmp_path) == []


def test_of_a_file_of_unknown_size_nothing_is_kept(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it may have come, and a hub has no answer to who asks for more than all."""

    def bare(url: str, **given: Any) -> HfFileMetadata:
        return dataclasses.replace(get_hf_file_metadata(url, **given), size=None)

    hub.add("org/tiny", FILES)
    monkeypatch.setattr(download, "get_hf_file_metadata", bare)
    _leave_partial(tmp_path, WEIGHTS)
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS
    assert {seen.byte_range for seen in hub.gets("cdn")} == {""}


def test_a_connection_that_always_breaks_is_left(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/tiny", FILES)
    hub.cuts["model.safetensors"] = [1000, 1000, *[0] * blob.TRIES]
    assert "cannot be reached (peer closed connection" in refused()
    assert partials(tmp_path) == [2000]
    assert len(hub.gets("cdn")) == 1 + blob.TRIES


def test_what_was_kept_of_another_file_is_not_served(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/tiny", FILES)
    _leave_partial(tmp_path, b"x" * 1000)
    with pytest.raises(ModelError, match="its checksum is wrong"):
        fetch()
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_two_processes_download_once(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()

    def say(line: str) -> None:
        if line == "waiting     another process downloads org/tiny":
            waits.set()

    monkeypatch.setattr(download, "say", say)
    hub.add("org/tiny", FILES)
    hub.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(fetch) for _ in range(2)]
        assert waits.wait(60)
        hub.gate.set()
        assert starts[0].result() == starts[1].result()
    assert len(hub.gets("cdn")) == 1
