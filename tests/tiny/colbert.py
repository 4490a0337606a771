"""Tiny late-interaction folders: of ColBERT's authors, of PyLate, and of sentence-transformers."""

import atexit
import json
import string
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.tiny.encoders import ARCHITECTURES

WORDS: Final = ("a", "red", "cat", "dog", "on", "mat", "the", *(f"w{n}" for n in range(150)))
SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]", "[Q] ", "[D] ")
SIZE: Final = 8
METADATA: Final = {
    "query_maxlen": 12,
    "doc_maxlen": 40,
    "mask_punctuation": True,
    "attend_to_mask_tokens": False,
}
PYLATE: Final[dict[str, Any]] = {
    "model_type": "ColBERT",
    "query_prefix": "[Q] ",
    "document_prefix": "[D] ",
    "query_length": 10,
    "document_length": 30,
    "attend_to_expansion_tokens": False,
    "skiplist_words": [*string.punctuation],
    "similarity_fn_name": "MaxSim",
}
_SCALE: Final = 4.0


@cache
def _place() -> Path:
    temporary = TemporaryDirectory(prefix="colbert-")
    atexit.register(temporary.cleanup)
    return Path(temporary.name)


def _save_model(folder: Path, name: str, *, with_linear: bool = False) -> None:
    import torch  # noqa: PLC0415 - a second, for tests that build it
    import transformers  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    kind, shape = ARCHITECTURES[name]
    model_class = getattr(transformers, kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**shape))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "embed" not in parameter_name:
                    parameter.mul_(_SCALE)
        model.save_pretrained(folder)
        if with_linear:
            path = folder / "model.safetensors"
            tensors = {f"bert.{key}": tensor for key, tensor in load_file(path).items()}
            save_file({**tensors, "linear.weight": torch.randn(SIZE, 32)}, path, {"format": "pt"})
            config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
            (folder / "config.json").write_text(json.dumps(config))
    _save_tokenizer(folder)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *string.punctuation, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names).save_pretrained(folder)


@cache
def stanford_folder() -> Path:
    """A folder as `colbert-ir/colbertv2.0`."""
    folder = _place() / "stanford"
    _save_model(folder, "bert", with_linear=True)
    (folder / "artifact.metadata").write_text(json.dumps(METADATA))
    return folder


def pylate_folder(name: str = "modernbert", **settings: Any) -> Path:
    """A new folder as PyLate saves it; `settings` are keys of its configuration."""
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    folder = _place() / f"pylate-{len(list(_place().iterdir()))}"
    _save_model(folder, name)
    dense = folder / "1_Dense"
    dense.mkdir()
    shape = {"in_features": 32, "out_features": SIZE, "bias": False}
    (dense / "config.json").write_text(
        json.dumps(shape | {"activation_function": "torch.nn.modules.linear.Identity"})
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        save_file({"linear.weight": torch.randn(SIZE, 32)}, dense / "model.safetensors")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 50, "do_lower_case": False})
    )
    (folder / "config_sentence_transformers.json").write_text(json.dumps(PYLATE | settings))
    return folder


def multi_vector_folder(
    name: str = "bert", *, mask: Mapping[str, Any] | None = None, **settings: Any
) -> Path:
    """A new folder of a multi-vector encoder, by sentence-transformers; `settings` are of its model."""
    from sentence_transformers import MultiVectorEncoder  # noqa: PLC0415 - seconds
    from sentence_transformers.base.modules import Dense, Normalize, Transformer  # noqa: PLC0415
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask  # noqa: PLC0415

    model, folder = (_place() / f"{kind}-{len(list(_place().iterdir()))}" for kind in ("model", "native"))
    _save_model(model, name)
    prompts, similarity = settings.pop("prompts", {}), settings.pop("similarity_fn_name", None)
    tokens = {"module_input_name": "token_embeddings"}
    modules = [
        Transformer(str(model), **settings),
        Dense(32, SIZE, bias=True, **tokens),
        MultiVectorMask(**(mask or {})),
        Normalize(**tokens),
    ]
    built = MultiVectorEncoder(modules=modules, prompts=prompts, similarity_fn_name=similarity, device="cpu")
    built.save(str(folder))
    return folder
