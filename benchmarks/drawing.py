"""BAGEL in process, without a server: by a bare loop, and by the engine.

Both compute what a served request does: the prompt, the flow, the pixels, the file. The bare loop has the
same driver and nodes, but keys and values in plain tensors, and one pass after the other.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.turns import Parts
from models.bagel import processing
from models.bagel.drawing import FlowRequest
from models.bagel.flow import start_flow
from models.bagel.graph import BagelPrompt
from models.bagel.llm import BagelLM
from models.bagel.nodes import load
from models.bagel.options import BagelOptions, flow_settings
from models.base import Item
from models.media.encoders import encode_image
from shared.events import Inputs, Params
from shared.tensors import read_ids
from tests.models.plain_cells import PlainCells
from workers.data_plane.arrays import to_array, to_tensor
from workers.kv_engine.attention.kernels import choose_attention
from workers.kv_engine.attention.paged import ATTENTION
from workers.kv_engine.config import KVEngineConfig
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.gpu.fusion import use_gpu_kernels
from workers.kv_engine.outputs import ProgramOutput
from workers.kv_engine.programs.spec import ProgramSpec
from workers.machine.cpu_threads import threads_for, use_cpu_threads

PROMPT: Final = "a red circle on a table"
_BLOCK: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image to be drawn: its side in pixels, the points in time of its flow, with guidance or without."""

    side: int
    timesteps: int
    is_guided: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Its options in a request."""
        scale = {} if self.is_guided else {"cfg_text_scale": 1.0}
        return {"width": self.side, "height": self.side, "num_timesteps": self.timesteps, **scale}

    @property
    def plain(self) -> "Picture":
        """The same without guidance."""
        return replace(self, is_guided=False)

    @property
    def short(self) -> "Picture":
        """The same in two steps, to warm up."""
        return replace(self, timesteps=3)


@dataclass(slots=True)
class Drawn:
    """An image: the passes of its steps, and its pixels, (height, width, 3) uint8."""

    passes: int = 0
    pixels: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 0, 3), np.uint8))


class Drawing:
    """The nodes of a checkpoint in process.

    Attributes:
        parts: the seconds of `image`, and within it of `flow` and `autoencoder`.
    """

    def __init__(self, checkpoint: Path, device: torch.device) -> None:
        self._processing = processing.load(checkpoint, max_seq_len=32_768)
        node = load(checkpoint, "LLM", device=device)
        assert isinstance(node, BagelLM)
        self._node: Final = node
        self._decoder: Final[Any] = load(checkpoint, "vae_decoder", device=device)
        if device.type == "cpu":
            use_cpu_threads(threads_for(node.parameters, os.cpu_count() or 1))  # as a worker
        self._engine: KVEngine | None = None
        self.parts: Final = Parts(device)

    @torch.inference_mode()
    def bare(self, picture: Picture, seed: int) -> Drawn:
        """Draw an image by the bare loop."""

        def flow(args: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
            driver: Any = start_flow(self._node, inputs, args, seed=seed)
            return PlainCells(self._node).run(driver)["latents"], driver.counts["forwards"]

        return self._drawn(picture, flow)

    @torch.inference_mode()
    def by_engine(self, picture: Picture, seed: int) -> Drawn:
        """Draw an image by the engine."""
        engine = self._engine = self._engine or self._new_engine()
        self._node.use_attention(ATTENTION)

        def flow(args: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
            arrays = {name: to_array(one.cpu()) for name, one in inputs.items()}
            engine.add_program(
                ProgramSpec(key="image", node="LLM", program="flow", inputs=arrays, args=args, seed=seed)
            )
            output = self._last_output(engine)
            return to_tensor(output.values["latents"], self._node.device), output.counts["forwards"]

        return self._drawn(picture, flow)

    @staticmethod
    def _last_output(engine: KVEngine) -> ProgramOutput:
        while engine.has_work:
            for output in engine.step():
                if isinstance(output, ProgramOutput):
                    return output
        raise RuntimeError("expected an output of the program, found no more work")

    def _drawn(self, picture: Picture, flow: Callable[..., tuple[torch.Tensor, int]]) -> Drawn:
        """Draw an image; `flow` gives the latents and the passes by the arguments and inputs of its walk."""
        with self.parts.timed("image"):
            args, inputs = self._prepared(picture)
            with self.parts.timed("flow"):
                latents, passes = flow(args, inputs)
            with self.parts.timed("autoencoder"):
                [found] = self._decoder.run([Item(inputs={"latents": latents}, args=args)])
                pixels = found.outputs["image"].cpu().numpy()
            encode_image(pixels, "png", quality=90)
        return Drawn(passes, pixels)

    def _prepared(self, picture: Picture) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The prompt of a request, as the node `prepare` makes it, and the arguments of its walk."""
        inputs = Inputs(messages=[{"role": "user", "content": PROMPT}], output_modalities=["image"])
        given = {"inputs": inputs, "params": Params(options=picture.options)}
        prepared = self._processing.run("prepare", "image", {}, msgspec.to_builtins(given))
        facts = msgspec.convert(prepared.facts, BagelPrompt)
        settings = flow_settings(msgspec.convert(picture.options, BagelOptions), is_edit=False)
        request = FlowRequest(spans=list(facts.spans), flow=settings, width=picture.side, height=picture.side)
        ids = torch.tensor(read_ids(prepared.handle("token_ids")), dtype=torch.int32)
        device, hidden = self._node.device, self._node.text_model.embed_tokens.weight
        return msgspec.to_builtins(request), {"token_ids": ids.to(device), "embeds": hidden[:0]}

    def _new_engine(self) -> KVEngine:
        """An engine as a worker makes it, with room for the two contexts of the largest image."""
        config = KVEngineConfig(
            num_blocks=16_384 // _BLOCK, block_size=_BLOCK, max_step_tokens=2048, max_sequences=16
        )
        kernel = choose_attention(self._node, "auto")
        return KVEngine(use_gpu_kernels(self._node), config, kernel=kernel)
