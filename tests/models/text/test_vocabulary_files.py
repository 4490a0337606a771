"""A tokenizer of `vocab.json` and `merges.txt`, or `tekken.json`, is that of a `tokenizer.json`."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from models.checkpoints.files import CheckpointError
from models.text.tokenizer import load_tokenizer
from tests.tiny.voxtral import tiny_voxtral

ADDED: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>")
TEXTS: Final = (
    "Tell me of dreams, 2025 and 1 more!",
    "<|im_start|>user\nWe\u0301'll see<|im_end|>\n<|mask|><|mask|>",
    "  two  spaces\t and a \N{OWL}\r\n\r\nend",
)
# Qwen2's: digits stand alone, contractions in any case, line breaks end a word.
PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """A small tokenizer of Qwen2's kind."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([text for text in TEXTS for _ in range(3)], trainer)
    return tokenizer


@pytest.fixture
def folder(trained: Tokenizer, tmp_path: Path) -> Path:
    """A folder as Dream's are."""
    trained.model.save(str(tmp_path))
    first = trained.get_vocab_size(with_added_tokens=False)
    added = {str(first + number): _added(text) for number, text in enumerate(ADDED)}
    _write(tmp_path, tokenizer_class="DreamTokenizer", added_tokens_decoder=added)
    return tmp_path


def _added(text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": text, "special": True, **flags}


def _write(folder: Path, **config: Any) -> None:
    named = {
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": "<|beginoftext|>",
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))


def test_texts_have_the_same_tokens(folder: Path, trained: Tokenizer) -> None:
    oracle = Tokenizer.from_str(trained.to_str())
    oracle.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ADDED])

    tokenizer, names = load_tokenizer(folder)

    found = [tokenizer.encode(text).ids for text in TEXTS]
    assert found == [oracle.encode(text).ids for text in TEXTS]
    assert all(len(ids) < len(text.encode()) for ids, text in zip(found, TEXTS, strict=True)), "merges count"
    assert tokenizer.decode(found[0]) == TEXTS[0]
    assert names["mask_token"] == "<|mask|>"
    assert tokenizer.token_to_id("<|mask|>") == oracle.token_to_id("<|mask|>")


def test_a_tokenizer_of_another_kind_is_refused(folder: Path) -> None:
    _write(folder, tokenizer_class="GPT2Tokenizer")

    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(folder)


def test_damaged_files_are_errors_that_name_the_file(folder: Path) -> None:
    (folder / "vocab.json").write_text("{")

    with pytest.raises(CheckpointError, match=r"vocab\.json cannot be read"):
        load_tokenizer(folder)


def test_a_tekken_file_is_a_tokenizer() -> None:
    tokenizer, _ = load_tokenizer(tiny_voxtral())
    ids = tokenizer.encode("[INST]the lang: \N{OWL}[/INST]").ids
    assert (ids[0], ids[-1]) == (3, 4)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the lang: \N{OWL}"
