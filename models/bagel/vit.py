"""The stateless node `vit_encoder`: SigLIP over images of any size, and the rows of all images of a prompt.

Its positions count the rows and columns of the largest image, as in the published code
(`modeling/bagel/siglip_navit.py`), and its patches are a matrix in place of a convolution. All else is
transformers' `SiglipVisionModel`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import nn
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.modeling_utils import PreTrainedModel

from models.bagel.folder import LLM_CONFIG, SIZED, VIT_CONFIG, Sizes, read_ema
from models.bagel.parts import Connector, PositionTable, bracket_rows, bracketed
from models.base import Item, StatelessResult
from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.progress import Progress
from models.transformers_lm.architecture import choose_dtype, config_of
from models.transformers_lm.tensors import load_weights
from models.vision_language.tower import VisionEncoder
from models.vision_language.visuals import Visual
from shared.errors import BugError, ClientError

MEMBERS: Final = frozenset({"vit_model", "connector", "vit_pos_embed"})
"""The members of the whole model that the node has."""


class BagelVision(PreTrainedModel):  # type: ignore[misc] # transformers has no types
    """The vision tower, its connector, and the rows of the tokens around an image."""

    config_class = SiglipVisionConfig
    base_model_prefix = "vit_model"
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        tower = SiglipVisionModel(config)
        # Some versions of transformers have the tower within a member of that name, as the checkpoint does.
        self.vit_model = nn.ModuleDict({"vision_model": getattr(tower, "vision_model", tower)})
        self.patch: Final[int] = config.patch_size
        numbers = config.num_channels * config.patch_size**2
        self._tower.embeddings.patch_embedding = nn.Linear(numbers, config.hidden_size)
        self.connector = Connector(config.hidden_size, config.rows_width)
        self.vit_pos_embed = PositionTable(config.vit_side, config.rows_width)
        self.post_init()

    @property
    def _tower(self) -> Any:
        """The tower: its embeddings, encoder and last norm."""
        return self.vit_model["vision_model"]

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """The rows of N images of one size, (N, 3, height, width) to (N, patches, hidden).

        Raises:
            ClientError: the images have more patches along a side than the model has positions for.
        """
        side, size = self.vit_pos_embed.side, self.patch
        height, width = pixels.shape[2] // size, pixels.shape[3] // size
        if max(height, width) > side:
            raise ClientError(
                f"expected an image of at most {side} x {side} patches, found {height} x {width}",
                code="invalid_value",
            )
        patches = pixels.reshape(len(pixels), -1, height, size, width, size)
        patches = patches.permute(0, 2, 4, 3, 5, 1).reshape(len(pixels), height * width, -1)
        tower = self._tower
        rows, columns = (torch.arange(count, device=pixels.device) for count in (height, width))
        places = (rows[:, None] * side + columns).flatten()
        embeddings = tower.embeddings.patch_embedding(patches) + tower.embeddings.position_embedding(places)
        features = tower.post_layernorm(tower.encoder(inputs_embeds=embeddings).last_hidden_state)
        found: torch.Tensor = self.connector(features) + self.vit_pos_embed(height, width)
        return found


class VitEncoder(VisionEncoder):
    """Pixels of images -> rows of a prompt, those of the latents included; see `run`.

    Args:
        brackets: (2, hidden), the rows of the tokens around an image.
    """

    def __init__(self, model: BagelVision, brackets: torch.Tensor) -> None:
        super().__init__(model)
        self._brackets = brackets

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        return [bracketed(rows, self._brackets) for rows in self.model(pixels)]

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Encode each item's `pixels`, of its `visuals`, and merge them with its `latent_rows`.

        The argument `order` lists the images of the prompt: `vit` for one of `visuals`, `vae` for one of
        `vae_visuals`. Without it, all are of `visuals`. A prompt without images has no rows.
        """
        seen = [item for item in items if item.args["visuals"]]
        results = iter(super().run(seen)) if seen else iter(())
        return [
            self._merged(item, next(results)) if item.args["visuals"] else self._empty() for item in items
        ]

    def _empty(self) -> StatelessResult:
        """The rows of a prompt without images."""
        return StatelessResult(outputs={"embeds": self._brackets[:0]})

    def _merged(self, item: Item, result: StatelessResult | Exception) -> StatelessResult | Exception:
        """The rows of all images of an item, in the order of its prompt."""
        order = item.args.get("order")
        if isinstance(result, Exception) or not order or "vae" not in order:
            return result
        of_kind = {
            "vit": _cut(result.outputs["embeds"], item.args["visuals"]),
            "vae": _cut(item.inputs["latent_rows"], item.args["vae_visuals"]),
        }
        if [order.count(kind) for kind in of_kind] != [len(rows) for rows in of_kind.values()]:
            raise BugError(f"expected the images {order}, found { {k: len(r) for k, r in of_kind.items()} }")
        iterators = {kind: iter(rows) for kind, rows in of_kind.items()}
        embeds = torch.cat([next(iterators[kind]).to(self.model.dtype) for kind in order])
        return StatelessResult(outputs={"embeds": embeds})


def load_vit(folder: Path, *, device: str | torch.device, dtype: str, progress: Progress) -> VitEncoder:
    """Load the vision tower of a checkpoint.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    on = torch.device(device)
    brackets, config, shard = bracket_rows(folder), examine_vit(folder), read_ema(folder, MEMBERS)
    sizes = Sizes.of(read_ema(folder, SIZED))
    config.vit_side = sizes.vit_side
    chosen = choose_dtype(dtype, on, [shard])
    model = load_weights(BagelVision, config, [shard], on, chosen, progress)
    return VitEncoder(model, brackets.to(on, chosen))


def examine_vit(folder: Path) -> Any:
    """Read the config of the vision tower, with what the published code sets in it.

    Raises:
        CheckpointError: it is missing, malformed or unsupported.
    """
    raw = read_json(folder / VIT_CONFIG)
    layers = raw.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 2:
        raise CheckpointError(
            f"{folder / VIT_CONFIG}: expected num_hidden_layers of at least 2, the last of which is not "
            f"used, found {layers!r}"
        )
    config = config_of(BagelVision, raw | {"num_hidden_layers": layers - 1, "vision_use_head": False}, folder)
    config.rows_width = read_json(folder / LLM_CONFIG).get("hidden_size")
    return config


def _cut(rows: torch.Tensor, visuals: Sequence[Any]) -> list[torch.Tensor]:
    """The rows of each visual."""
    counts = [msgspec.convert(visual, Visual).rows for visual in visuals]
    return [*torch.split(rows, counts)]
