"""`dovetail up --model org/tiny`: downloaded from a hub, served, and served again without it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from router.text.text_model import TextModel
from tests.cluster import Cluster
from tests.fake_hub import running_hub
from tests.launched import Launched
from tests.sentencepiece_model import VOCAB_SIZE, write_gguf
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.e2e

PROGRAM = str(Path(sys.executable).with_name("dovetail"))
UP = (PROGRAM, "up", "--model", "org/tiny", "--port", "0", "--colocated", "1")
SMALL = ("--set", "engine.kv_memory=16777216", "--set", "engine.threads=1")
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


def _tiny(directory: Path) -> dict[str, bytes]:
    """Return the files of a random llama with a SentencePiece tokenizer."""
    directory.mkdir()
    save_tiny(directory, vocab_size=VOCAB_SIZE, max_position_embeddings=256)
    text = TextModel.load(write_gguf(directory / "tiny.gguf"))
    (directory / "tiny.gguf").unlink()
    text._tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    files = [path for path in directory.iterdir() if path.is_file()]
    return {path.name: path.read_bytes() for path in files}


def _answers(cluster: Cluster) -> None:
    assert cluster.model == "org/tiny"
    answer = cluster.client().chat.completions.create(
        model="org/tiny", messages=[{"role": "user", "content": "the fox"}], max_tokens=8
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    cluster.close()


def test_serves_a_hub_s_model_and_then_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with running_hub() as hub:
        hub.add("org/tiny", {**_tiny(tmp_path / "tiny"), "pytorch_model.bin": b"pickle"})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with Launched([*UP, *SMALL], tmp_path / "first") as launched:
            _answers(Cluster(launched))
            assert launched.stop() == 0
            launched.assert_nothing_left()
        (download,) = [line for line in launched.out if line.startswith("download ")]
        assert "org/tiny: 5 files" in download
        weights = [seen for seen in hub.gets("cdn") if not seen.byte_range]
        assert len(weights) == 1, "each process downloaded"
        assert not hub.gets("pytorch_model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with Launched([*UP, *SMALL, "--executor", "mock"], tmp_path / "second") as launched:
        _answers(Cluster(launched))
        assert launched.stop() == 0
        launched.assert_nothing_left()
    assert launched.err == []
