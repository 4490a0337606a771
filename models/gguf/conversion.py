"""Conversion of a GGUF file to a checkpoint folder: `python -m models.gguf.conversion FILE FOLDER`.

The folder has the weights in safetensors, with config, tokenizer and chat template of the file. It appears
whole or not at all. Quantised matrices stay integers in groups (`models.gguf.groups`), and MXFP4 experts of
gpt-oss what they are. Embeddings and routers become bfloat16, whose rounding is small beside theirs, and
floats stay what they are. A tensor at a time is in memory, and a file of weights of at most `_SHARD_BYTES`.

The file is read with `gguf`, llama.cpp's own package; the tokenizer is built by transformers.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.checkpoints.weights import INDEX
from models.gguf.architectures import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, Model, Place, model_of
from models.gguf.groups import grouped
from models.gguf.parts import parts_of
from models.grouped_weights import GroupedWeight
from models.transformers_lm import grouped_files, mxfp4

_SHARD_BYTES: Final = 2 << 30
_UNQUANTISED: Final = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}
_MXFP4: Final = gguf.GGMLQuantizationType.MXFP4
_MXFP4_BYTES: Final = 17
"""Of a group: the scale, then sixteen bytes, each of a number of the first half and one of the second."""
_EMBEDDINGS: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_ROUTERS: Final = (".gate.weight", ".router.weight", _SHARED_GATE := ".shared_expert_gate.weight")
"""Their scores decide between experts, so they are multiplied as floats."""
_ENDS: Final = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>",
        "<end_of_turn>", "</s>",
    }
)  # fmt: skip
"""Tokens that end an answer wherever a vocabulary has them as control tokens, as in llama.cpp."""
_HARMONY_ENDS: Final = frozenset({"<|return|>", "<|call|>"})
_END_OF_MESSAGE: Final = "<|end|>"
"""In gpt-oss, which has the former, it also ends the thoughts before an answer."""
_KEEP_SPACE: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""The special tokens of Phi 3 that do not take the white space behind them."""
_LLAMA3: Final = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
"""Ways to split a text whose vocabularies prefer whole tokens to merges, and begin texts with a token unless
the file says otherwise, as llama.cpp has them."""
_LIKE_GPT2: Final = frozenset({"gpt-2", "mpt", "olmo", "phi-2"})
_DIGITS_FIRST: Final = frozenset({"refact", "smollm", "starcoder", "command-r"})
"""Those that split as GPT-2 does, after each digit was split off."""
_SPLITS: Final = (
    _LLAMA3 | _LIKE_GPT2 | _DIGITS_FIRST | {"qwen2", "deepseek-r1-qwen", "gpt-4o", "dbrx", "smaug-bpe"}
)
_CONTROL: Final = 3
"""The type of a control token."""


def convert(file: Path, folder: Path) -> None:
    """Write the checkpoint folder of a GGUF file, or of the first of several parts.

    Raises:
        CheckpointError: a file is damaged or incomplete, or holds something else than a served model.
    """
    readers = [_opened(path) for path in parts_of(file)]
    try:
        _convert(file, readers, folder)
    except CheckpointError as error:
        raise type(error)(f"{file}: {error.message}") from error


def _convert(file: Path, readers: Sequence[Any], folder: Path) -> None:
    metadata = _metadata(readers[0])
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    count = metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise CheckpointError(f"expected {count} tensors in all its parts, found {len(tensors)}")
    shapes = {name: tuple(int(n) for n in tensor.shape[::-1]) for name, tensor in tensors.items()}
    factors = {
        name: _floats(tensors[name]).tolist()
        for name in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
        if name in tensors
    }
    model = _as_stored(model_of(metadata, shapes, factors), tensors)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as partial:
        written = Path(partial) / folder.name
        written.mkdir()
        alone = Path(partial) / "source"  # transformers also reads what lies beside the file
        alone.mkdir()
        (alone / file.name).symlink_to(file.resolve())
        _write_texts(alone / file.name, metadata, model, written)
        _write_weights(tensors, model, written)
        try:
            written.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster
                raise


def _as_stored(model: Model, tensors: Mapping[str, Any]) -> Model:
    """The model with quantised matrices as they are stored.

    Embeddings are looked up as floats. A head that shares them gets a matrix of its own.
    """
    in_experts = [part for parts in model.merged.values() for part in parts]
    kinds = {name: tensors[name].tensor_type for name in (*model.places, *in_experts)}
    if all(kind in _UNQUANTISED for kind in kinds.values()):
        return model
    places = dict(model.places)
    config = model.config | {"quantization_config": dict(grouped_files.CONFIG)}
    for name, place in model.places.items():
        if (
            kinds[name] not in _UNQUANTISED
            and place.names == (_EMBEDDINGS,)
            and config.get("tie_word_embeddings")
        ):
            places[name] = replace(place, names=(_EMBEDDINGS, _HEAD))
            config["tie_word_embeddings"] = False
    return replace(model, config=config, places=places)


def _opened(path: Path) -> Any:
    try:
        size = path.stat().st_size
        reader: Any = gguf.GGUFReader(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # the reader has no errors of its own: what it raises depends on the damage
        raise CheckpointError(
            f"{path} is no whole GGUF file: {type(error).__name__}: {error!s:.200}; download it again"
        ) from error
    end = max((int(one.data_offset + one.n_bytes) for one in reader.tensors), default=0)
    if size < end:
        raise CheckpointError(f"{path} is not whole: expected {end} bytes, found {size}; download it again")
    return reader


def _metadata(reader: Any) -> dict[str, Any]:
    """The metadata without its arrays, but for the tokens and their types."""
    arrays = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    found: dict[str, Any] = {}
    for name, field in reader.fields.items():
        if field.types and (field.types[0] is not gguf.GGUFValueType.ARRAY or name in arrays):
            found[name] = field.contents()
    return found


def _write_texts(file: Path, metadata: Mapping[str, Any], model: Model, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(model.config, indent=2))
    try:
        # Not by its config, which transformers does not know of all.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(file.parent), gguf_file=file.name, local_files_only=True
        )
    except Exception as error:  # transformers raises whatever a missing or malformed list of tokens leads to
        raise CheckpointError(
            f"the tokenizer cannot be read: {type(error).__name__}: {error!s:.200}"
        ) from error
    tokenizer.save_pretrained(folder)
    _finish_tokenizer(metadata, folder / "tokenizer.json")
    if (metadata["general.architecture"], metadata.get("tokenizer.ggml.model")) == ("phi3", "llama"):
        _strip_after_marks(folder / "tokenizer.json")
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": _ends_in(metadata)}))


def _ends_in(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer."""
    told = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    tokens, types = (metadata.get(f"tokenizer.ggml.{name}") or [] for name in ("tokens", "token_type"))
    control = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL
    }
    ends = {end for end in told if isinstance(end, int)}
    ends |= {number for token, number in control.items() if token in _ENDS | _HARMONY_ENDS}
    if control.keys() >= _HARMONY_ENDS:
        ends.discard(control.get(_END_OF_MESSAGE, -1))
    return sorted(ends)


def _finish_tokenizer(metadata: Mapping[str, Any], path: Path) -> None:
    """Add what transformers does not read of a vocabulary of bytes.

    Raises:
        CheckpointError: texts would be split in another way than the model learned.
    """
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    split = metadata.get("tokenizer.ggml.pre")
    told = json.loads(path.read_text())
    is_plain = told["pre_tokenizer"]["type"] == "ByteLevel"
    if split not in _SPLITS or is_plain != (split in _LIKE_GPT2 | _DIGITS_FIRST):
        raise UnsupportedArchitectureError(
            f"tokenizer.ggml.pre is {split!r}: expected one of {', '.join(sorted(_SPLITS))}, in a "
            "version of transformers that knows it; others split texts in ways that are not known here"
        )
    if split in _DIGITS_FIRST:
        digits = {"type": "Digits", "individual_digits": True}
        told["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, told["pre_tokenizer"]]}
        path.write_text(json.dumps(told, ensure_ascii=False))
    if split not in _LLAMA3:
        return
    told["model"]["ignore_merges"] = True
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") is None and isinstance(bos, int):
        token = metadata["tokenizer.ggml.tokens"][bos]
        begin, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        second = {"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}
        told["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, *second],
            "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
        }
    path.write_text(json.dumps(told, ensure_ascii=False))


def _strip_after_marks(path: Path) -> None:
    """Let the special tokens of Phi 3 take the white space behind them: files do not say it."""
    told = json.loads(path.read_text())
    for token in told["added_tokens"]:
        token["rstrip"] = token["special"] and token["content"] not in _KEEP_SPACE
    path.write_text(json.dumps(told, ensure_ascii=False))


def _write_weights(tensors: Mapping[str, Any], model: Model, folder: Path) -> None:
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def write() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    has_groups = "quantization_config" in model.config
    weights = chain(
        *(_weights(tensors[name], place, has_groups=has_groups) for name, place in model.places.items()),
        *(_merged(name, [tensors[part] for part in parts]) for name, parts in model.merged.items()),
    )
    for written, weight in weights:
        if shard and size + weight.nbytes > _SHARD_BYTES:
            write()
            size = 0
        shard[written] = weight
        size += weight.nbytes
        total += weight.nbytes
    write()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))


def _weights(tensor: Any, place: Place, *, has_groups: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that a tensor of the file holds, by name."""
    is_quantised = tensor.tensor_type not in _UNQUANTISED
    as_groups = [
        name
        for name in place.names
        if has_groups and is_quantised and name != _EMBEDDINGS and not name.endswith(_ROUTERS)
    ]
    if as_groups:
        matrices = _matrices(tensor)
        for name, matrix in zip(as_groups, matrices, strict=True):
            yield from grouped_files.tensors_of(name, _with_rows(grouped(matrix), place.heads)).items()
    if names := [name for name in place.names if name not in as_groups]:
        yield from _float_weights(tensor, place, names)


def _matrices(tensor: Any) -> Iterator[Any]:
    """The matrices of a tensor: one, or one of each expert."""
    if tensor.data.ndim == 2:
        yield tensor
        return
    for data in tensor.data:
        yield tensor._replace(data=data, shape=tensor.shape[:2])


def _merged(name: str, parts: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts of a layer in the form of gpt-oss, in which the outputs of the parts alternate.

    Raises:
        CheckpointError: a part is stored in another kind of few bits than MXFP4.
    """
    if any(part.tensor_type not in (*_UNQUANTISED, _MXFP4) for part in parts):
        kinds = " and ".join(sorted({part.tensor_type.name for part in parts}))
        raise UnsupportedArchitectureError(
            f"{name} is stored as {kinds}: expected MXFP4, as gpt-oss was published, or floats"
        )
    if all(part.tensor_type == _MXFP4 for part in parts):
        blocks, scales = (_alternating(tables) for tables in zip(*map(_mxfp4, parts), strict=True))
        yield f"{name}{mxfp4.BLOCKS}", blocks
        yield f"{name}{mxfp4.SCALES}", scales
        return
    floats = _alternating([_writable(_floats(part)) for part in parts]).to(_dtype_of(parts[0]))
    yield name, floats if floats.ndim == 2 else floats.transpose(1, 2).contiguous()


def _alternating(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """(experts, parts * outputs, ...) from several (experts, outputs, ...)."""
    return torch.stack([*parts], 2).flatten(1, 2)


def _mxfp4(tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks (experts, outputs, groups, 16) and scales of a tensor, as `mxfp4` has them."""
    stored = torch.from_numpy(np.array(tensor.data)).view(*tensor.data.shape[:-1], -1, _MXFP4_BYTES)
    numbers = torch.cat([stored[..., 1:] & 15, stored[..., 1:] >> 4], -1)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4, stored[..., 0]


def _with_rows(weight: GroupedWeight, heads: int) -> GroupedWeight:
    """The weight with its rows in the order of Hugging Face."""
    if not heads:
        return weight
    return replace(
        weight,
        numbers=_unpermuted(weight.numbers, heads),
        scales=_unpermuted(weight.scales, heads),
        minimums=_unpermuted(weight.minimums, heads) if weight.minimums is not None else None,
    )


def _float_weights(tensor: Any, place: Place, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    dtype = _dtype_of(tensor)
    floats = _writable(_floats(tensor))
    floats -= place.added
    if place.heads:
        floats = _unpermuted(floats, place.heads)
    several = floats.unbind(0) if len(names) > 1 else (floats,)
    for name, weight in zip(names, several, strict=True):
        shaped = weight.reshape(1, -1) if name.endswith(_SHARED_GATE) else weight  # a vector in the file
        yield name, shaped.to(dtype, copy=True).contiguous()  # files hold no tensor that shares storage


def _dtype_of(tensor: Any) -> torch.dtype:
    """The dtype in which the floats of a tensor are kept."""
    return _UNQUANTISED.get(tensor.tensor_type, torch.bfloat16)


def _writable(found: Any) -> torch.Tensor:
    return torch.from_numpy(found if found.flags.writeable else found.copy())


def _floats(tensor: Any) -> Any:
    """A tensor as an array of float32, outputs first."""
    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{tensor.name} is stored as {tensor.tensor_type.name}, which cannot be read"
        ) from error


def _unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of Hugging Face: of each head first all even rows of the file, then the odd ones."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def main() -> None:
    """Convert; the errors of the file are told on the standard error stream."""
    file, folder = map(Path, sys.argv[1:])
    try:
        convert(file, folder)
    except CheckpointError as error:
        raise SystemExit(error.message) from error
    except OSError as error:
        raise SystemExit(f"{folder} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    main()
