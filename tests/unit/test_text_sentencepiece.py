"""SentencePiece vocabularies in GGUF files against the sentencepiece library itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, pre_tokenizers
from transformers import LlamaTokenizer

from core.errors import ModelError
from core.ids import RequestId
from core.request import EngineRequest, TokenUpdate
from router.api.generation_params import Vocabulary
from router.api.requests import read_completion
from router.text.detokenizer import ByteDetokenizer, WindowDetokenizer
from router.text.text_model import TextModel
from router.text.tokenizer_source import TokenizerSource
from router.web.sample import Sample
from tests.gguf_files import write_vocabulary
from tests.nasty_texts import NASTY_TEXTS
from tests.sentencepiece_model import trained, write_gguf


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(write_gguf(tmp_path_factory.mktemp("spm") / "tiny.gguf"))


@pytest.mark.parametrize("sample", NASTY_TEXTS)
def test_encodes_and_decodes_as_sentencepiece(text: TextModel, sample: str) -> None:
    if "<unk>" in sample:
        # A special token's text is that token, as in transformers; the library knows none.
        sample = sample.replace("<unk>", "")
    expected = trained().encode(sample)
    assert text.encode(sample, add_special_tokens=False) == expected
    assert text.encode(sample) == [trained().bos_id(), *expected]
    assert text.decode(expected) == trained().decode(expected)


def test_a_long_text_is_one_word_and_still_fast(text: TextModel) -> None:
    sample = "again and again 日本 " * 3000
    assert text.encode(sample, add_special_tokens=False) == trained().encode(sample)


def test_without_byte_pieces_a_run_of_unknown_characters_is_one_token(tmp_path: Path) -> None:
    model = trained(has_bytes=False)
    text = TextModel.load(write_gguf(tmp_path / "bare.gguf", has_bytes=False))
    for sample in (*NASTY_TEXTS, "the \U0001f9ff\U00020000 fox"):
        bare = sample.replace("<unk>", "")
        assert text.encode(bare, add_special_tokens=False) == model.encode(bare)
    assert model.encode("\U0001f9ff\U00020000").count(model.unk_id()) == 1


def test_special_tokens_split_a_text_and_a_space_follows(text: TextModel) -> None:
    """llama.cpp's rule for GGUF files: each fragment after a special token has its own prefix."""
    model = trained()
    inst, end = model.piece_to_id("[INST]"), model.piece_to_id("[/INST]")
    words = [model.encode(word) for word in ("the", "dog")]
    assert text.encode("<s>[INST]the[/INST]dog</s>", add_special_tokens=False) == [
        model.bos_id(),
        inst,
        *words[0],
        end,
        *words[1],
        model.eos_id(),
    ]
    assert text.eos_token_ids == (model.eos_id(),)


def test_flags_of_the_file(tmp_path: Path) -> None:
    def flags(writer: GGUFWriter) -> None:
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)
        writer.add_add_space_prefix(False)

    text = TextModel.load(write_gguf(tmp_path / "flags.gguf", flags))
    pieces = [text.token_string(index) for index in text.encode("the dog")]
    assert pieces[-1] == "</s>"
    assert "".join(pieces[:-1]) == "the▁dog"
    assert text.decode(text.encode(" the")) == " the"
    assert "".join([text.detokenizer().feed(text.encode(" the"))]) == " the"


@pytest.mark.parametrize("sample", NASTY_TEXTS)
@pytest.mark.parametrize("size", [1, 3])
def test_streams_what_the_reference_decodes(text: TextModel, sample: str, size: int) -> None:
    ids = text.encode(sample)
    for skip in (True, False):
        detokenizer = text.detokenizer(skip_special_tokens=skip)
        assert isinstance(detokenizer, ByteDetokenizer)
        pieces = [detokenizer.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
        streamed = "".join([*pieces, detokenizer.flush()])
        assert streamed == text.decode(ids, skip_special_tokens=skip)
        assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in sample)


def test_an_answer_keeps_the_space_that_joins_it_to_its_prompt(text: TextModel) -> None:
    prompt, answer = text.encode("the quick"), trained().encode("brown fox")
    whole = text.decode([*prompt, *answer])
    assert text.decode(prompt) + text.detokenizer(after=prompt).feed(answer) == whole
    assert whole == "the quick brown fox"
    only_bos = prompt[:1]
    assert text.detokenizer(after=only_bos).feed(answer) == "brown fox"
    shown = text.detokenizer(after=only_bos, skip_special_tokens=False)
    assert shown.feed(answer) == " brown fox"


def test_the_api_s_answers_go_on_with_their_prompt(text: TextModel) -> None:
    answer = tuple(trained().encode("brown fox"))
    body = {"prompt": "the quick"}
    params = read_completion(body, Vocabulary(text.vocab_size, text.eos_token_ids)).params
    prompt = tuple(text.encode("the quick"))
    request = EngineRequest(RequestId("r"), prompt, params.sampling)
    update = TokenUpdate(RequestId("r"), 0, 1, 0, answer)
    delta = Sample(text, params, request).feed(update)
    assert delta is not None
    assert delta.text == " brown fox"


def test_bytes_that_are_no_character_spoil_nothing_else(text: TextModel) -> None:
    pieces = [f"<0x{byte:02X}>" for byte in (0xE2, 0x98, 0x83, 0xFF, 0x41, 0xE2)]
    ids = [trained().piece_to_id(piece) for piece in pieces]
    detokenizer = text.detokenizer()
    assert [detokenizer.feed([index]) for index in ids] == ["", "", "☃", "\ufffd", "A", ""]
    assert detokenizer.flush() == "\ufffd"


def test_tokens_have_their_space_and_their_bytes(text: TextModel) -> None:
    model = trained()
    assert text.token(model.piece_to_id("▁the")) == (" the", b" the")
    assert text.token(model.piece_to_id("<0xFF>")) == ("\ufffd", b"\xff")
    assert text.token(model.piece_to_id("[INST]")) == ("[INST]", b"[INST]")


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_directories_with_a_metaspace_equal_transformers(
    text: TextModel, scheme: str, tmp_path: Path
) -> None:
    """Llama 2's and Mistral's later form: the prefix comes from the splitter."""
    model = json.loads(text._tokenizer.to_str())["model"]
    reference = LlamaTokenizer(
        vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]]
    )
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme=scheme, split=False
    )
    reference.save_pretrained(tmp_path)
    ours = TextModel.load(tmp_path)
    for sample in NASTY_TEXTS:
        ids = reference.encode(f"{sample}<s>{sample}", add_special_tokens=False)
        assert ours.encode(f"{sample}<s>{sample}", add_special_tokens=False) == ids
        for skip in (True, False):
            detokenizer = ours.detokenizer(skip_special_tokens=skip)
            streamed = [detokenizer.feed([index]) for index in ids]
            expected = reference.decode(ids, skip_special_tokens=skip)
            assert "".join([*streamed, detokenizer.flush()]) == expected


def test_a_decoder_that_looks_at_neighbours_goes_through_a_window(text: TextModel) -> None:
    """Metaspace's own decoder drops every ▁ of the first token, so no token has its bytes."""
    tokenizer = Tokenizer.from_str(text._tokenizer.to_str())
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    windowed = TextModel(TokenizerSource("tiny", tokenizer, (), {}, None, 0))
    prompt, answer = text.encode("the quick"), trained().encode("brown fox")
    detokenizer = windowed.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    assert "".join(detokenizer.feed([index]) for index in answer) == "brown fox"
    going_on = windowed.detokenizer(after=prompt)
    assert "".join(going_on.feed([index]) for index in answer) == " brown fox"


def test_refuses_a_vocabulary_without_scores(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    write_vocabulary(path, model="llama", tokens=["a", "b"], kinds=[1, 1])
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.scores is missing"):
        TextModel.load(path)
    write_vocabulary(path, model="llama", tokens=["a", "b"], kinds=[1, 1], scores=[0.0])
    with pytest.raises(ModelError, match=r"1 tokenizer\.ggml\.scores for 2 tokens"):
        TextModel.load(path)
