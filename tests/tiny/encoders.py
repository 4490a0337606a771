"""Tiny encoders of texts in their published layouts, and sentence-transformers folders around them."""

import atexit
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

WORDS: Final = ("a", "red", "cat", "dog", "on", "mat", "the", "query", ":", *(f"w{n}" for n in range(200)))
_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
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
_GEMMA: Final = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_bidirectional_attention": True,
}
_DEBERTA: Final = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
ARCHITECTURES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "bert": ("BertModel", _SHAPE),
    "bert-mlm": ("BertForMaskedLM", _SHAPE),
    "roberta": ("RobertaModel", {**_SHAPE, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaModel", {**_SHAPE, "pad_token_id": 1}),
    "modernbert": ("ModernBertModel", {**_SHAPE, **_MODERN}),
    "nomic": ("NomicBertModel", _SHAPE),
    "mpnet": ("MPNetModel", _SHAPE),
    "deberta": ("DebertaV2Model", {**_SHAPE, **_DEBERTA}),
    "embedding-gemma": ("Gemma3TextModel", {**_GROUPED, **_GEMMA}),
    "qwen3": ("Qwen3Model", _GROUPED),
    "qwen3-lm": ("Qwen3ForCausalLM", _GROUPED),
    "mistral": ("MistralModel", {**_GROUPED, "sliding_window": 6}),
}
"""The class and the configuration of each model."""
PACKED: Final = frozenset(ARCHITECTURES) - {"deberta"}
_SCALE: Final = 4.0
"""Weights of the usual deviation barely differ from zero: states would not depend on other tokens."""


@cache
def _place() -> Path:
    temporary = TemporaryDirectory(prefix="encoders-")
    atexit.register(temporary.cleanup)
    return Path(temporary.name)


@cache
def tiny_encoder(name: str) -> Path:
    """The folder of a checkpoint of `ARCHITECTURES`, with a tokenizer; made once in a process."""
    import torch  # noqa: PLC0415 - a second, for tests that build it
    import transformers  # noqa: PLC0415

    kind, shape = ARCHITECTURES[name]
    model_class = getattr(transformers, kind)
    folder = _place() / name
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**shape))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "embed" not in parameter_name:
                    parameter.mul_(_SCALE)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    vocabulary = {word: index for index, word in enumerate((*special, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names).save_pretrained(folder)


def sentence_folder(
    name: str,
    *,
    pooling: str | tuple[str, ...] = "mean",
    include_prompt: bool = True,
    further: Callable[[int], list[Any]] = lambda _: [],
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    max_seq_length: int | None = None,
    do_lower_case: bool = False,
) -> Path:
    """A new folder, saved by sentence-transformers, of a tiny encoder, a pooling and `further` modules.

    `further` makes the modules behind the pooling, whose vectors have as many numbers as its argument.
    """
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - seconds
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: PLC0415

    length = {} if max_seq_length is None else {"max_seq_length": max_seq_length}
    model = Transformer(str(tiny_encoder(name)), do_lower_case=do_lower_case, **length)
    pooled = Pooling(32, pooling_mode=pooling, include_prompt=include_prompt)
    modules = [model, pooled, *further(pooled.get_embedding_dimension())]
    folder = _place() / f"folder-{len(list(_place().iterdir()))}"
    built = SentenceTransformer(
        modules=modules, prompts=dict(prompts or {}), default_prompt_name=default_prompt, device="cpu"
    )
    built.save(str(folder))
    return folder


def copy_of(folder: Path, to: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(folder, to)
