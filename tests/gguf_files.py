"""GGUF files with a vocabulary and no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gguf import GGUFWriter

Write = Callable[[GGUFWriter], None]


def write_vocabulary(
    path: Path,
    *,
    model: str,
    tokens: Sequence[str],
    kinds: Sequence[int],
    scores: Sequence[float] | None = None,
    merges: Sequence[str] | None = None,
    more: Write | None = None,
) -> Path:
    """Write `tokenizer.ggml.*`.

    Args:
        model: `tokenizer.ggml.model`.
        kinds: `token_type` by id.
        more: adds other keys.
    """
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    if scores is not None:
        writer.add_token_scores(list(scores))
    if merges is not None:
        writer.add_token_merges(list(merges))
    if more is not None:
        more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
