from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from models.text.detokenizer import DetokenizerFactory
from tests.models import written_checkpoints

KINDS = {
    "byte_level": written_checkpoints.byte_level,
    "sentence_piece": written_checkpoints.sentence_piece,
    "word_piece": written_checkpoints.word_piece,
}
TEXTS = [
    "Hello, world! What does len do?",
    "👩‍👩‍👧‍👦👋🏽🇩🇪 e\u0301 ﷽ \u200d 你好",
    "  leading and   many spaces \n\t",
    "a\ufffdb \x00 \ufeff",
]


@cache
def tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()


@cache
def decoders_of(kind: str) -> DetokenizerFactory:
    return DetokenizerFactory(tokenizer(kind))


def pieces(kind: str, ids: list[int]) -> list[str]:
    decoder = decoders_of(kind).new()
    return [*(decoder.push(id) for id in ids), decoder.flush()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_put_together_are_the_decoded_text(kind: str, text: str) -> None:
    ids = tokenizer(kind).encode(text).ids

    assert "".join(pieces(kind, ids)) == tokenizer(kind).decode(ids, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300)
@given(data=st.data())
def test_any_sequence_of_tokens_decodes_as_the_tokenizer_decodes_it_at_once(
    kind: str, data: st.DataObject
) -> None:
    beyond = tokenizer(kind).get_vocab_size() + 3  # a model's vocabulary may be larger than its tokenizer's
    ids = data.draw(st.lists(st.integers(0, beyond), max_size=40))

    assert "".join(pieces(kind, ids)) == tokenizer(kind).decode(ids, skip_special_tokens=True)


@pytest.mark.slow
@settings(max_examples=300)
@given(text=st.text(max_size=30), extra=st.lists(st.integers(3, 258), max_size=6), at=st.integers(0, 30))
def test_broken_byte_runs_decode_as_the_tokenizer_decodes_them(text: str, extra: list[int], at: int) -> None:
    ids = tokenizer("sentence_piece").encode(text).ids
    ids[at:at] = extra

    expected = tokenizer("sentence_piece").decode(ids, skip_special_tokens=True)
    assert "".join(pieces("sentence_piece", ids)) == expected


@settings(max_examples=300)
@given(raw=st.binary(max_size=40))
def test_any_bytes_decode_as_the_tokenizer_decodes_them(raw: bytes) -> None:
    alphabet = {byte: token for token, byte in byte_tokens().items()}
    ids = [alphabet[byte] for byte in raw]

    assert "".join(pieces("byte_level", ids)) == raw.decode("utf-8", "replace")
    assert "".join(pieces("byte_level", ids)) == tokenizer("byte_level").decode(ids)


@cache
def byte_tokens() -> dict[int, int]:
    vocabulary = decoders_of("byte_level")._vocabulary
    single = {id: vocabulary.bytes_of(id) for id in range(tokenizer("byte_level").get_vocab_size())}
    return {id: raw[0] for id, raw in single.items() if len(raw) == 1}


def test_an_incomplete_character_is_held_back_until_it_is_complete() -> None:
    alphabet = {byte: token for token, byte in byte_tokens().items()}
    decoder = decoders_of("byte_level").new()

    assert [decoder.push(alphabet[byte]) for byte in "€x".encode()] == ["", "", "€", "x"]


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character() -> None:
    alphabet = {byte: token for token, byte in byte_tokens().items()}
    decoder = decoders_of("byte_level").new()

    assert [decoder.push(alphabet[0xE2]), decoder.push(alphabet[0x82]), decoder.flush()] == ["", "", "\ufffd"]


def test_a_run_of_byte_pieces_is_shown_as_soon_as_it_ends() -> None:
    ids = tokenizer("sentence_piece").encode("a 你 a", add_special_tokens=False).ids

    shown = pieces("sentence_piece", ids)

    assert "".join(shown) == "a 你 a"
    assert any("你" in piece for piece in shown[:-1])


def test_special_tokens_have_no_text() -> None:
    ids = [id_of(token) for token in ("<|im_start|>", "<|endoftext|>")]

    assert pieces("byte_level", ids) == ["", "", ""]


def test_an_added_token_outside_the_byte_alphabet_is_its_own_text() -> None:
    assert "".join(pieces("byte_level", [id_of("<tool→call>")])) == "<tool→call>"


def test_a_tokenizer_that_chains_byte_level_with_others_decodes_alike() -> None:
    chained = byte_level_with(decoders.Sequence([decoders.ByteLevel(), decoders.Replace("len", "LEN")]))
    decoder = DetokenizerFactory(chained).new()
    ids = chained.encode("what does len do? 你好").ids

    assert "".join([*map(decoder.push, ids), decoder.flush()]) == chained.decode(ids)


def test_a_tokenizer_without_a_decoder_joins_tokens_as_it_does() -> None:
    plain = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    decoder = DetokenizerFactory(plain).new()

    assert "".join([*map(decoder.push, [0, 1, 0]), decoder.flush()]) == plain.decode([0, 1, 0]) == "a b a"


def byte_level_with(decoder: decoders.Decoder) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer("byte_level").to_str())
    copy.decoder = decoder
    return copy


def id_of(token: str, kind: str = "byte_level") -> int:
    found = tokenizer(kind).token_to_id(token)
    assert found is not None
    return found


# ---- the bytes of single tokens --------------------------------------------------------------------


@settings(max_examples=200)
@given(text=st.text(max_size=30))
def test_the_bytes_of_byte_level_tokens_put_together_are_the_text(text: str) -> None:
    decoder = decoders_of("byte_level").new()
    ids = tokenizer("byte_level").encode(text, add_special_tokens=False).ids

    assert b"".join(map(decoder.bytes_of, ids)) == text.encode()


@settings(max_examples=200)
@given(text=st.text(max_size=30).filter(lambda text: "<" not in text))
def test_the_bytes_of_pieces_put_together_are_the_text_with_the_space_before_it(text: str) -> None:
    """SentencePiece adds a leading space; a marked space in the text is one, too."""
    decoder = decoders_of("sentence_piece").new()
    ids = tokenizer("sentence_piece").encode(text, add_special_tokens=False).ids
    spelt = b"".join(decoder.bytes_of(id) for id in ids)

    assert spelt == f" {text}".replace("▁", " ").encode() * bool(text)


def test_a_part_of_a_character_has_its_bytes() -> None:
    alphabet = {byte: token for token, byte in byte_tokens().items()}
    piece = id_of("<0xE2>", "sentence_piece")

    assert decoders_of("byte_level").new().bytes_of(alphabet[0xE2]) == b"\xe2"
    assert decoders_of("sentence_piece").new().bytes_of(piece) == b"\xe2"


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_beyond_the_vocabulary_has_no_bytes(kind: str) -> None:
    assert decoders_of(kind).new().bytes_of(tokenizer(kind).get_vocab_size() + 3) == b""


@pytest.mark.parametrize(
    ("kind", "token"),
    [("byte_level", "<|im_start|>"), ("byte_level", "<tool→call>"), ("sentence_piece", "<s>")],
)
def test_a_special_or_added_tokens_bytes_are_its_text(kind: str, token: str) -> None:
    assert decoders_of(kind).new().bytes_of(id_of(token, kind)) == token.encode()


def test_marked_spaces_and_byte_tokens_count_only_if_the_decoder_replaces_them() -> None:
    plain = Tokenizer(models.WordLevel({"▁a": 0, "<0x41>": 1, "[UNK]": 2}, unk_token="[UNK]"))
    marked = Tokenizer.from_str(plain.to_str())
    marked.decoder = decoders.Metaspace()

    assert [DetokenizerFactory(plain).new().bytes_of(id) for id in (0, 1)] == ["▁a".encode(), b"<0x41>"]
    assert [DetokenizerFactory(marked).new().bytes_of(id) for id in (0, 1)] == [b" a", b"<0x41>"]


def test_a_tokenizer_that_chains_byte_level_with_others_has_bytes_too() -> None:
    chained = byte_level_with(decoders.Sequence([decoders.ByteLevel(), decoders.Replace("len", "LEN")]))
    decoder = DetokenizerFactory(chained).new()

    assert b"".join(decoder.bytes_of(id) for id in chained.encode("len 你好").ids) == "len 你好".encode()
