"""How byte-level BPE splits a text into words, by the names that GGUF files give it.

The names (`tokenizer.ggml.pre`) and what they mean are llama.cpp's (`src/llama-vocab.cpp`); the
patterns are those of the models' own `tokenizer.json`. A name has one or several patterns, each
applied to the pieces that the ones before it left; what a pattern does not match stays a piece.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = f"{_CONTRACTION}|{_WORD}|\\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = f"{_CONTRACTION}|{_WORD}|\\p{{N}}|{_SYMBOLS}|{_SPACES}"


def _cased(*, digits: str, contraction: str) -> str:
    """Words end where lower case turns to upper (tekken, GPT-4o)."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = (
        f"{start}{_UPPER}*{_LOWER}+{contraction}",
        f"{start}{_UPPER}+{_LOWER}*{contraction}",
    )
    return "|".join([*words, digits, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES])


_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


class Splitting(NamedTuple):
    """What a name means.

    Attributes:
        patterns: applied in this order.
        ignore_merges: a word that is in the vocabulary is that token, whatever the merges give.
        add_bos: a text begins with BOS where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_BY_NAMES = {
    # What llama.cpp does where a file says nothing.
    ("default", ""): Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat"): Splitting((_GPT2,)),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): Splitting(
        (r"\p{N}", _GPT2)
    ),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"): Splitting(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): Splitting((_LLAMA3,)),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"): Splitting((_QWEN2,)),
    ("tekken",): Splitting(
        (_cased(digits=r"\p{N}", contraction=""),), ignore_merges=True, add_bos=True
    ),
    ("gpt-4o", "llama4"): Splitting(
        (_cased(digits=r"\p{N}{1,3}", contraction=f"{_CONTRACTION}?"),)
    ),
    ("deepseek-coder",): Splitting(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"),
    ),
    ("deepseek-v3", "hunyuan-dense"): Splitting((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    ("falcon",): Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
}

SPLITTING_BY_NAME = {name: meaning for names, meaning in _BY_NAMES.items() for name in names}
"""By `tokenizer.ggml.pre`; empty: the file has none."""


def pre_tokenizer(splitting: Splitting) -> pre_tokenizers.PreTokenizer:
    """Return the splitter, with bytes turned to byte-level BPE's alphabet at its end."""
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns
    ]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, alphabet])
