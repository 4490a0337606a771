"""The CPU nodes of pipelines: the arguments of a call, and files of what it has made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save as packed

from models.base import CpuResult, MediaReader, TextlessProcessing
from models.diffusion_pipelines.folder import PipelineFolder
from models.diffusion_pipelines.memory import check_memory, limit_of
from models.diffusion_pipelines.options import ImageOptions
from models.diffusion_pipelines.requests import check_pictures, pipeline_call
from models.media.encoders import Sound, encode_image, encode_video
from models.options import InvalidOptionError
from models.vision_language.processing import reader_of
from shared.errors import BugError, ClientError
from shared.events import Inputs
from shared.tensors import Handle

_VIDEO_QUALITY: Final = 18
"""H.264's constant rate factor: hardly to be told from the frames."""
_LENGTH: Final = np.dtype("<u8")
"""The length of a file, in front of it."""


class PipelineProcessing(TextlessProcessing):
    """The CPU nodes of one folder (`models.base.Processing`). Re-entrant.

    Args:
        options: the family's options.
        loras: the adapters that a request may ask for: folders or files, by name.
        memory: the most bytes that a request may take beside the weights; None: any.
        tiled: the VAE decodes in tiles.
    """

    def __init__(
        self,
        folder: PipelineFolder,
        options: type[ImageOptions],
        *,
        media: MediaReader | None,
        loras: Mapping[str, Path] = MappingProxyType({}),
        memory: int | None = None,
        tiled: bool = False,
    ) -> None:
        self._folder = folder
        self._options = options
        self._media = media
        self._loras = loras
        self._memory = memory
        self._tiled = tiled

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        match node:
            case "prepare":
                return self._prepared(args)
            case "encode_output":
                return _encoded(inputs, args)
            case "next_frame":
                return _next_frame(inputs["files"])
            case _:
                raise BugError(f"expected the node prepare, encode_output or next_frame, found {node!r}")

    def _prepared(self, args: Mapping[str, Any]) -> CpuResult:
        files = msgspec.convert(args["inputs"], Inputs).files
        options = msgspec.convert(args["options"], self._options)
        call = pipeline_call(self._folder, options, makes=args["makes"], pictures=len(files))
        check_memory(self._folder, call, self._memory, tiled=self._tiled)
        lora = self._adapter(options)
        reader = reader_of(self._media) if files else None
        pictures = {str(number): reader.image(one) for number, one in enumerate(files)} if reader else {}
        check_pictures(self._folder, [*pictures.values()])
        return CpuResult(
            facts={**msgspec.to_builtins(call), "lora": lora}, outputs={"pictures": _pack(pictures)}
        )

    def _adapter(self, options: ImageOptions) -> dict[str, Any] | None:
        """The adapter of a request, as the denoiser takes it. Clients know names, not paths.

        Raises:
            InvalidOptionError: the deployment has none of that name.
        """
        if options.lora is None:
            return None
        if (path := self._loras.get(options.lora)) is None:
            known = f"expected one of {', '.join(sorted(self._loras))}"
            if not self._loras:
                known = "this deployment has no adapters (model_kwargs.loras)"
            raise InvalidOptionError("lora", f"lora: {known}, found {options.lora!r}")
        return {"path": str(path), "scale": options.lora_scale}


def _encoded(inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
    """The result as one file; in `frames_gen`, the files of all frames, each after its length."""
    frames = _array(inputs["frames"])
    if not frames.size:
        raise ClientError(
            "this pipeline has made no picture: it is for sound, which is not served", code="not_supported"
        )
    if args["makes"] == "image":
        return CpuResult(outputs={"image": encode_image(frames[0], args["format"], quality=args["quality"])})
    if args.get("each_frame"):
        files = (encode_image(frame, args["format"], quality=args["quality"]) for frame in frames)
        parts = (part for file in files for part in (_length(file), file))
        return CpuResult(outputs={"files": np.concatenate([*parts])})
    sound = _array(inputs["sound"])
    heard = Sound(sound, args["sound_rate"]) if sound.size else None
    return CpuResult(
        outputs={"video": encode_video(frames, args["fps"], quality=_VIDEO_QUALITY, sound=heard)}
    )


def _next_frame(files: Handle) -> CpuResult:
    """The first of the files, each of which follows its length, and the rest of them."""
    found = _array(files)
    end = _LENGTH.itemsize + int(found[: _LENGTH.itemsize].view(_LENGTH)[0])
    return CpuResult(outputs={"image": found[_LENGTH.itemsize : end], "files": found[end:]})


def _length(file: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.array([file.size], _LENGTH).view(np.uint8)


def _pack(arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """Named arrays as the bytes of a safetensors file (`models.diffusion_pipelines.packing`)."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return np.frombuffer(packed(whole), np.uint8)


def _array(handle: Handle) -> npt.NDArray[Any]:
    if handle.data is None:
        raise BugError("expected an inline tensor")
    return np.frombuffer(handle.data, np.dtype(handle.dtype)).reshape(handle.shape)


@dataclass(frozen=True, slots=True)
class ProcessingLoader:
    """`processing.load` of a family with these options."""

    options: type[ImageOptions]

    def __call__(
        self,
        checkpoint: Path,
        *,
        max_seq_len: int,
        media: MediaReader | None = None,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        device_bytes: Callable[[], int] | None = None,
    ) -> PipelineProcessing:
        """Load the CPU nodes of a folder.

        Args:
            checkpoint: the folder.
            max_seq_len: not used: the classes cut their prompts.
            media: decodes input images; None: a request with one fails.
            kwargs: `loras`, `request_memory_gb`, `vae_tiling`.
            device_bytes: the memory of the device; None: unknown.

        Raises:
            CheckpointError: `model_index.json` is missing or damaged.
        """
        del max_seq_len
        folder = PipelineFolder.read(checkpoint)
        return PipelineProcessing(
            folder,
            self.options,
            media=media,
            loras={name: checkpoint / path for name, path in (kwargs.get("loras") or {}).items()},
            memory=limit_of(folder, kwargs, device_bytes() if device_bytes is not None else None),
            tiled=bool(kwargs.get("vae_tiling")),
        )
