"""Tiny rerankers in their published layouts: cross-encoders of several classes, and Qwen3-Reranker."""

import atexit
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.tiny.encoders import WORDS

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "num_labels": 1,
}
_GROUPED: Final = {**_SHAPE, "num_key_value_heads": 2, "head_dim": 8}
_MODERN: Final = {
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
_DISTIL: Final = {
    "vocab_size": 256,
    "dim": 32,
    "hidden_dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "num_labels": 1,
}
CROSS_ENCODERS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "bert": ("BertForSequenceClassification", _SHAPE),
    "xlm-roberta": (
        "XLMRobertaForSequenceClassification",
        {**_SHAPE, "pad_token_id": 1, "type_vocab_size": 1},
    ),
    "modernbert": (
        "ModernBertForSequenceClassification",
        {**_SHAPE, **_MODERN, "classifier_pooling": "mean"},
    ),
    "distilbert": ("DistilBertForSequenceClassification", {**_DISTIL, "max_position_embeddings": 66}),
    "albert": ("AlbertForSequenceClassification", {**_SHAPE, "embedding_size": 16}),
    "qwen3": ("Qwen3ForSequenceClassification", {**_GROUPED, "pad_token_id": 0}),
}
"""The class and the configuration of each model."""
MAX_TOKENS: Final = 64
"""The longest pair, as the tokenizers say."""
_TOKENIZERS: Final = {
    "bert": "BertTokenizerFast",
    "distilbert": "DistilBertTokenizerFast",
}
"""The classes of tokenizers that decide on token types."""
_SCALE: Final = 8.0
"""Weights of the usual deviation barely differ from zero: scores would not depend on the texts."""


@cache
def _place() -> Path:
    temporary = TemporaryDirectory(prefix="rerankers-")
    atexit.register(temporary.cleanup)
    return Path(temporary.name)


@cache
def tiny_cross_encoder(name: str) -> Path:
    """The folder of a model of `CROSS_ENCODERS`; made once in a process, never to be written to."""
    kind, shape = CROSS_ENCODERS[name]
    folder = _place() / name
    _save_model(folder, kind, shape)
    _save_words(folder, name)
    return folder


@cache
def tiny_judge() -> Path:
    """A folder as those of Qwen3-Reranker: a Qwen3 whose vocabulary has `yes` and `no`."""
    folder = _place() / "tiny-Qwen3-Reranker"
    shape = {**_GROUPED, "vocab_size": 300, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    shape.pop("num_labels")
    _save_model(folder, "Qwen3ForCausalLM", shape)
    _save_bytes(folder)
    return folder


def _save_model(folder: Path, kind: str, shape: Mapping[str, Any]) -> None:
    import torch  # noqa: PLC0415 - a second, for tests that build it
    import transformers  # noqa: PLC0415

    model_class = getattr(transformers, kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**shape))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "embed" not in name:
                    parameter.mul_(_SCALE)
    model.save_pretrained(folder)


def _save_words(folder: Path, name: str) -> None:
    """A tokenizer of words, with the special tokens of a pair as the model's kind has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: PLC0415

    specials = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    tokenizer = Tokenizer(
        models.WordLevel({word: id for id, word in enumerate((*specials, *WORDS))}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if name == "xlm-roberta":
        tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
    elif name != "qwen3":
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens([*specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    kind = {"tokenizer_class": _TOKENIZERS.get(name, "PreTrainedTokenizerFast")}
    _write_config(folder, named | kind | {"model_max_length": MAX_TOKENS} | _inputs(name))


def _inputs(name: str) -> dict[str, Any]:
    """The inputs that a tokenizer without a class of its own names."""
    return {} if name in _TOKENIZERS else {"model_input_names": ["input_ids", "attention_mask"]}


def _save_bytes(folder: Path) -> None:
    """A byte-level tokenizer with Qwen3's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ye", "yes", "no"]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("y", "e"), ("ye", "s"), ("n", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(folder, {"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<|endoftext|>"})


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
