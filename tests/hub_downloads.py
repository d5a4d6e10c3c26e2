"""Downloads from a hub that runs here: the fixture, its files, and what tests ask of a cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import (
    close_session,
    constants,
)

from core.clock import SystemClock
from core.errors import ModelError
from deploy.hub import blob
from deploy.hub.download import fetch_model
from deploy.hub.model_id import ModelId
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


def fetch(model: ModelId = TINY, *, only_text: bool = False) -> Path:
    return fetch_model(model, only_text=only_text, clock=SystemClock())


def refused(model: ModelId = TINY) -> str:
    with pytest.raises(ModelError) as caught:
        fetch(model)
    message = str(caught.value)
    assert message.startswith(f"model {str(model)!r}: ")
    assert "\n" not in message
    return message


def names_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def visible(hub: FakeHub) -> list[Seen]:
    return [seen for seen in hub.seen if seen.path not in INVISIBLE]


def partials(tmp_path: Path) -> list[int]:
    return [path.stat().st_size for path in tmp_path.rglob("*.incomplete")]
