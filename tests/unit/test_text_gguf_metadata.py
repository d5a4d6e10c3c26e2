"""The GGUF header: every value type, and every way in which a file can be wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from core.errors import ModelError
from router.text.gguf_metadata import read_metadata
from router.text.gguf_tokenizer import load_gguf


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _file(path: Path, entries: list[bytes], *, version: int = 3) -> Path:
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", version, 0, len(entries)) + b"".join(entries) + bytes(64)
    )
    return path


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _texts(key: str, values: list[str]) -> bytes:
    return _entry(key, 9, struct.pack("<IQ", 8, len(values)) + b"".join(map(_text, values)))


def test_reads_every_type(tmp_path: Path) -> None:
    entries = [
        _entry("u8", 0, b"\xff"),
        _entry("i8", 1, b"\xff"),
        _entry("u16", 2, struct.pack("<H", 65535)),
        _entry("i16", 3, struct.pack("<h", -2)),
        _entry("u32", 4, struct.pack("<I", 1 << 31)),
        _entry("i32", 5, struct.pack("<i", -3)),
        _entry("f32", 6, struct.pack("<f", 0.5)),
        _entry("bool", 7, b"\x01"),
        _entry("text", 8, _text("héllo")),
        _entry("ints", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        _texts("texts", ["a", ""]),
        _entry("u64", 10, struct.pack("<Q", 1 << 63)),
        _entry("i64", 11, struct.pack("<q", -4)),
        _entry("f64", 12, struct.pack("<d", 0.1)),
    ]
    assert read_metadata(_file(tmp_path / "a.gguf", entries)) == {
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -2,
        "u32": 1 << 31,
        "i32": -3,
        "f32": 0.5,
        "bool": True,
        "text": "héllo",
        "ints": [1, -2, 3],
        "texts": ["a", ""],
        "u64": 1 << 63,
        "i64": -4,
        "f64": 0.1,
    }


def test_reads_headers_longer_than_one_read(tmp_path: Path) -> None:
    long = "x" * (5 << 20)
    assert read_metadata(_file(tmp_path / "a.gguf", [_entry("k", 8, _text(long))])) == {"k": long}


def test_refuses_other_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="version 1"):
        read_metadata(_file(tmp_path / "old.gguf", [], version=1))
    with pytest.raises(ModelError, match="value type 99"):
        read_metadata(_file(tmp_path / "odd.gguf", [_entry("k", 99, b"")]))
    whole = _file(tmp_path / "cut.gguf", [_entry("k", 8, _text("hello" * 100))])
    whole.write_bytes(whole.read_bytes()[:100])
    with pytest.raises(ModelError, match="cut short"):
        read_metadata(whole)
    with pytest.raises(ModelError, match="No such file"):
        read_metadata(tmp_path / "missing.gguf")


def test_refuses_other_tokenizers(tmp_path: Path) -> None:
    kind = _entry("tokenizer.ggml.model", 8, _text("gpt2"))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens is missing"):
        load_gguf(_file(tmp_path / "none.gguf", [kind]))
    parts = [kind, _texts("tokenizer.ggml.tokens", ["a"]), _texts("tokenizer.ggml.merges", [])]
    pre = _entry("tokenizer.ggml.pre", 8, _text("odd"))
    with pytest.raises(ModelError, match="'odd': must be one of"):
        load_gguf(_file(tmp_path / "pre.gguf", [*parts, pre]))


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_adds_bos_where_the_file_says_so(tmp_path: Path, pre: str) -> None:
    tokens = ["<s>", "a", "b", "ab", "</s>", "<eot>", "Ġ"]
    entries = [
        _entry("tokenizer.ggml.model", 8, _text("gpt2")),
        _entry("tokenizer.ggml.pre", 8, _text(pre)),
        _texts("tokenizer.ggml.tokens", tokens),
        _texts("tokenizer.ggml.merges", ["a b"]),
        _entry("tokenizer.ggml.token_type", 9, struct.pack("<IQ7i", 5, 7, 3, 1, 1, 1, 3, 3, 1)),
        _entry("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", 0)),
        _entry("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 4)),
        _entry("tokenizer.ggml.eot_token_id", 4, struct.pack("<I", 5)),
        _entry("tokenizer.ggml.add_bos_token", 7, b"\x01"),
    ]
    source = load_gguf(_file(tmp_path / "tiny.gguf", entries))
    assert source.name == "tiny"
    assert source.tokenizer.encode("ab a</s>").ids == [0, 3, 6, 1, 4]
    assert source.tokenizer.encode("ab", add_special_tokens=False).ids == [3]
    assert source.eos_token_ids == (4, 5)
    assert source.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert source.chat_template is None
