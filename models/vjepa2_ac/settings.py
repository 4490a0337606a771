"""The sizes of a checkpoint. No torch.

The published checkpoint is one file without a config: its sizes are the defaults. A `config.json` beside it
states others, by the names of transformers' `VJEPA2Config`.
"""

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from models.checkpoints.files import CONFIG, CheckpointError, read_json_if_present

NAME: Final = "vjepa2-ac"
"""A part of the name of published files."""
_ORIGINAL: Final = Path("original/model.pth")
"""The file in a mirror on the Hugging Face hub."""

Size = Annotated[int, Meta(ge=1)]


class AcSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of encoder and predictor (`pred_...`), ViT-g by default.

    Attributes:
        crop_size: the sides of a frame, in pixels.
        patch_size: the sides of a patch.
        tubelet_size: the frames of a latent of the encoder.
        frames_per_clip: frames of a video, unless a request says how many.
        use_extrinsics: the predictor takes the pose of the camera as well.
    """

    crop_size: Size = 256
    patch_size: Size = 16
    tubelet_size: Size = 2
    frames_per_clip: Size = 64
    hidden_size: Size = 1408
    num_hidden_layers: Size = 40
    num_attention_heads: Size = 22
    pred_hidden_size: Size = 1024
    pred_num_hidden_layers: Size = 24
    pred_num_attention_heads: Size = 16
    use_extrinsics: bool = False

    @property
    def grid(self) -> int:
        """The patches in a row of a frame, and the rows."""
        return self.crop_size // self.patch_size

    @property
    def patches(self) -> int:
        """The latents of a frame."""
        return self.grid**2

    @property
    def conditions(self) -> int:
        """The tokens before those of a frame: action, state, and extrinsics if it has them."""
        return 3 if self.use_extrinsics else 2

    @property
    def frame_tokens(self) -> int:
        """The tokens of a frame in the predictor."""
        return self.conditions + self.patches

    @classmethod
    def read(cls, checkpoint: Path) -> "AcSettings":
        """Read the settings of a checkpoint folder.

        Raises:
            CheckpointError: `config.json` states impossible sizes.
        """
        config: dict[str, Any] = read_json_if_present(checkpoint / CONFIG)
        try:
            found = msgspec.convert(config, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{checkpoint / CONFIG}: {error}") from error
        for width, heads, what in (
            (found.hidden_size, found.num_attention_heads, "num_attention_heads"),
            (found.pred_hidden_size, found.pred_num_attention_heads, "pred_num_attention_heads"),
            (found.crop_size, found.patch_size, "patch_size"),
        ):
            if width % heads:
                raise CheckpointError(
                    f"{checkpoint / CONFIG}: {what}: expected a divisor of {width}, found {heads}"
                )
        return found


def weights_of(checkpoint: Path) -> Path:
    """Return the file with the weights: the folder's only `.pt`, or `original/model.pth`.

    Raises:
        CheckpointError: there is none, or there are several.
    """
    found = sorted(checkpoint.glob("*.pt"))
    found += [checkpoint / _ORIGINAL] if not found and (checkpoint / _ORIGINAL).is_file() else []
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise CheckpointError(
            f"{checkpoint}: expected one file of weights, such as {NAME}-vitg.pt, found {names}; the "
            "published one is https://dl.fbaipublicfiles.com/vjepa2/vjepa2-ac-vitg.pt"
        )
    return found[0]
