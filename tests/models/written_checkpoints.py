"""Tiny tokenizers, trained and saved in Hugging Face format like those of checkpoints."""

import json
from pathlib import Path
from typing import Any

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

CORPUS = [
    "What does len do? It returns the number of items of a container.",
    "Grüße aus München, naïve café, 你好世界, привет 👋🏽 👩‍👩‍👧‍👦 🇩🇪 e\u0301",
    "def f(x):\n\treturn x ** 2  # two  spaces",
]
CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content | trim }}{% endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role in ['user', 'system'] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {{- raise_exception('Unexpected role: ' + message.role) }}
    {%- endif %}
    {%- if message.name is defined %}{{ message.name | tojson }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def byte_level() -> Tokenizer:
    """Like Qwen's: byte-level BPE, ChatML tokens, no added special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool→call>", normalized=False)])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Like Llama 2's: pieces with a marked space, byte fallback, and a leading `<s>`."""
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)],
    )
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator([CORPUS[0], CORPUS[2]], trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    state = json.loads(tokenizer.to_str())  # the bytes are pieces, not special tokens
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    return Tokenizer.from_str(json.dumps(state))


def word_piece() -> Tokenizer:
    """Like BERT's: words and `##` continuations."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=120, show_progress=False, special_tokens=["[UNK]"])
    )
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def save(
    folder: Path,
    tokenizer: Tokenizer,
    tokenizer_config: dict[str, Any] | None = None,
    **files: dict[str, Any],
) -> Path:
    """Write `tokenizer.json`, `tokenizer_config.json` and other JSON files (by name, without `.json`)."""
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in ({"tokenizer_config": tokenizer_config or {}} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
