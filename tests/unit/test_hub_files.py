"""Names of models on a hub, and which files of a repository are taken."""

from __future__ import annotations

import pytest

from core.clock import ManualClock
from core.errors import ModelError
from deploy.hub.model_id import ModelId, parse_model_id
from deploy.hub.progress import LINE_EVERY_S, LineProgress, progress_of, size
from deploy.hub.wanted_files import INDEX, check_safetensors, text_files, wanted_gguf, weight_files

QUANTIZED = ["README.md", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "tiny-IQ4_K_M.gguf"]


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("org/tiny", ModelId("org/tiny")),
        ("meta-llama/Llama-3.2-1B", ModelId("meta-llama/Llama-3.2-1B")),
        ("org/tiny@v1.0", ModelId("org/tiny", "v1.0")),
        ("org/tiny@refs/pr/3", ModelId("org/tiny", "refs/pr/3")),
        ("org/tiny:Q4_K_M", ModelId("org/tiny", "main", "Q4_K_M")),
        ("org/tiny@v1:sub/a.gguf", ModelId("org/tiny", "v1", "sub/a.gguf")),
    ],
)
def test_reads_a_name_and_says_it_again(text: str, model: ModelId) -> None:
    assert parse_model_id(text) == model
    assert str(model) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tiny",
        "/models/tiny",
        "./models/tiny",
        "../tiny",
        "~/tiny",
        "a/b/c",
        "models/tiny.gguf",
        "org/tiny@",
        "org/tiny@../../outside",
        "org/tiny@/outside",
        "org/tiny:",
        "org/tiny:a:b",
        "org/ti ny",
    ],
)
def test_everything_else_is_a_path(text: str) -> None:
    assert parse_model_id(text) is None


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("tiny-Q8_0.gguf", "tiny-Q8_0.gguf"),
        ("Q8_0", "tiny-Q8_0.gguf"),
        ("q4_k_m", "tiny-Q4_K_M.gguf"),
        ("IQ4_K_M", "tiny-IQ4_K_M.gguf"),
    ],
)
def test_finds_a_gguf_file_by_name_or_quantization(asked: str, found: str) -> None:
    assert wanted_gguf(ModelId("o/t", gguf=asked), QUANTIZED) == found


def test_finds_gguf_files_in_folders() -> None:
    names = ["Q8_0/tiny.gguf", "Q4_0/tiny.gguf", "sub/one-Q5_0.gguf"]
    assert wanted_gguf(ModelId("o/t", gguf="one-Q5_0.gguf"), names) == "sub/one-Q5_0.gguf"
    assert wanted_gguf(ModelId("o/t", gguf="Q8_0/tiny.gguf"), names) == "Q8_0/tiny.gguf"


def test_the_only_gguf_file_needs_no_name() -> None:
    assert wanted_gguf(ModelId("o/t"), ["a.gguf", "mmproj-a.gguf"]) == "a.gguf"
    assert wanted_gguf(ModelId("o/t"), ["a.gguf", "model.safetensors"]) is None
    assert wanted_gguf(ModelId("o/t"), ["config.json"]) is None


@pytest.mark.parametrize(
    ("asked", "names", "said"),
    [
        ("", QUANTIZED, "several GGUF files; give o/t:FILE; it has tiny-IQ4_K_M.gguf, tiny-Q4"),
        ("Q2_K", QUANTIZED, "no such GGUF file; .* it has tiny-IQ4_K_M.gguf, tiny-Q4"),
        ("Q2_K", ["model.safetensors"], "no such GGUF file; .* it has none"),
        ("Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "several .* it has a-Q8_0.gguf, b-Q8_0.gguf$"),
        ("Q8_0", ["a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"], "cut into parts"),
    ],
)
def test_refuses_gguf_files_that_are_not_one(asked: str, names: list[str], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        wanted_gguf(ModelId("o/t", gguf=asked), names)


def test_takes_only_what_is_read() -> None:
    names = ["config.json", "tokenizer.json", "README.md", "consolidated.safetensors", "x.py"]
    assert text_files(names) == ["config.json", "tokenizer.json"]
    assert weight_files(None) == ["model.safetensors"]
    assert weight_files(["b", "a", "b"]) == ["a", "b"]


def test_refuses_pickles_and_nothing() -> None:
    check_safetensors(ModelId("o/t"), ["config.json", "tokenizer.json", "model.safetensors"])
    check_safetensors(ModelId("o/t"), ["config.json", "tokenizer.json", INDEX])
    with pytest.raises(ModelError, match=r"has no tokenizer\.json, without which it cannot"):
        check_safetensors(ModelId("o/t"), ["config.json", "model.safetensors"])
    with pytest.raises(ModelError, match=r"'o/t': .* pickles only \(pytorch_model\.bin\)"):
        check_safetensors(ModelId("o/t"), ["config.json", "pytorch_model.bin"])
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        check_safetensors(ModelId("o/t"), ["config.json", "adapter_model.safetensors"])


def test_lines_come_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    with LineProgress("org/tiny", 98_100_000, clock) as progress:
        progress.update(1_000_000)
        clock.advance(LINE_EVERY_S)
        progress.update(11_300_000)
        progress.update(1)
    assert capsys.readouterr().out == "download    org/tiny: 12.3 MB of 98.1 MB\n"


def test_a_terminal_gets_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(progress_of("org/tiny", 1000, ManualClock()), LineProgress)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_of("org/tiny", 1000, ManualClock()) as progress:
        progress.update(1000)
    said = capsys.readouterr()
    assert said.err.startswith("\rorg/tiny:   0%")
    assert said.out == ""


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (98_100_000, "98.1 MB"),
        (16_060_000_000, "16.1 GB"),
    ],
)
def test_sizes_are_for_people(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
