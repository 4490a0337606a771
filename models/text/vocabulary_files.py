"""Tokenizers of checkpoints without a `tokenizer.json`.

`vocab.json` and `merges.txt`, as Dream has them: only Qwen2's tokenizer is read so. Dream's is the same under
a name of its own, whose code is not run.
`tekken.json`, as Mistral's own checkpoints have it.
"""

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from models.checkpoints.files import read_json_if_present

_VOCABULARY: Final = ("vocab.json", "merges.txt")
_TEKKEN: Final = "tekken.json"
_CLASSES: Final = frozenset({"DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"})
"""The `tokenizer_class` of `tokenizer_config.json`."""


def from_vocabulary(checkpoint: Path) -> Tokenizer | None:
    """Return the tokenizer with its added tokens, or None if the folder has no files of this kind.

    Raises:
        Exception: a file is malformed.
    """
    if (checkpoint / _TEKKEN).is_file():
        # transformers takes most of a second to import, and other checkpoints do not need it here.
        from transformers.integrations.mistral.tokenizer import MistralConverter  # noqa: PLC0415

        converted: Tokenizer = MistralConverter(str(checkpoint / _TEKKEN)).converted()
        return converted
    named = read_json_if_present(checkpoint / "tokenizer_config.json").get("tokenizer_class")
    if named not in _CLASSES or not all((checkpoint / name).is_file() for name in _VOCABULARY):
        return None
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer  # noqa: PLC0415

    found: Tokenizer = Qwen2Tokenizer.from_pretrained(checkpoint, local_files_only=True).backend_tokenizer
    return found
