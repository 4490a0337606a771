"""Tokenizers of the two kinds that are published, trained on a few lines, and chat templates.

*Byte-level* (GPT-2, Llama 3, Qwen): every byte is a character of the alphabet. *Sentence pieces* (Gemma,
Mistral, Phi-3): spaces become U+2581, and what is not in the vocabulary falls back to `<0x..>` tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_CORPUS: Final = """
the quick brown fox jumps over the lazy dog while seven wizards quietly mix bright purple liquids.
what does len do? return the number of items in a container. sorted returns a new list in ascending order.
hello there, how are you today? please explain the difference between a tuple and a dictionary, briefly.
Fünf größere Übungen; naïve café; once upon a time a small machine learned to speak about strings.
example: print every third element, skip zero, convert unicode, join pieces.
"""
VOCAB_SIZE: Final = 512
_FEWEST: Final = 300
"""The tokens of a vocabulary of bytes, however many special tokens it has."""
_MAX_LENGTH: Final = 512
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer to be.

    Attributes:
        specials: the special tokens, in order of their ids.
        ends: those that end an answer, as `generation_config.json` lists them; the last ends a turn.
        bos: the one put in front of every text, if any.
        template: the chat template; empty: none.
        pieces: sentence pieces instead of bytes.
        leads_with_space: a space is put in front of every text (Llama's pieces, not Gemma's).
    """

    specials: Sequence[str]
    ends: Sequence[str]
    template: str
    bos: str | None = None
    pieces: bool = False
    leads_with_space: bool = False


def write_tokenizer(folder: Path, vocabulary: Vocabulary) -> dict[str, int]:
    """Train and write it; the ids of the special tokens."""
    tokenizer = _pieces(vocabulary) if vocabulary.pieces else _bytes(vocabulary)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in vocabulary.specials]
    )
    bos = vocabulary.bos
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    found = ((text, tokenizer.token_to_id(text)) for text in vocabulary.specials)
    ids = {text: id for text, id in found if id is not None}
    settings = {
        "added_tokens_decoder": {
            str(id): {"content": text, "special": True, "normalized": False} for text, id in ids.items()
        },
        "bos_token": bos,
        "chat_template": vocabulary.template or None,
        "clean_up_tokenization_spaces": False,
        "eos_token": vocabulary.ends[-1],
        "model_max_length": _MAX_LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n")
    return ids


def _bytes(vocabulary: Vocabulary) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(_FEWEST, VOCAB_SIZE - len(vocabulary.specials)),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    return tokenizer


def _pieces(vocabulary: Vocabulary) -> Tokenizer:
    """Specials first, then the bytes, then the pieces, as the converted files have them."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", _SPACE)
    trained.pre_tokenizer = pre_tokenizers.Split(_SPACE, "merged_with_next")
    first = [*vocabulary.specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - len(first), show_progress=False)
    trained.train_from_iterator(_CORPUS.strip().splitlines(), trainer)
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = {text: id for id, text in enumerate([*first, *learned])}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=tokens, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    to_spaces = normalizers.Replace(" ", _SPACE)
    restore = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.leads_with_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_spaces])
        tokenizer.decoder = decoders.Sequence([*restore, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = to_spaces
        tokenizer.decoder = decoders.Sequence(restore)
    return tokenizer
