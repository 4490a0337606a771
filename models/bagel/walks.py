"""The walks of BAGEL. The names of nodes and walks are those of published placements.

    prepare         messages -> token ids; pixels for the ViT, and for the VAE     a CPU node
    prefill_text    token ids -> the first new token                               LLM
    prefill_vit     the same behind images                                         vit_encoder, LLM
    prefill_vae     the same behind images that are to be changed                  both encoders, LLM
    decode          a resident loop: token -> next token, until the answer ends    LLM
    recall          the prompt and the tokens of a thought -> a prompt             a CPU node
    image_gen       prompt -> rows -> latents -> pixels -> a file                  encoders, LLM, vae_decoder
    image_gen_cfg   the same, in a loop over three language models                 and combine_cfg

An image is one run of a program behind its whole prompt. Over three ranks it is a loop of calls, one of each
run in every step. The loop has checkpoints: a later attempt begins near the step that was reached.
"""

from collections.abc import Mapping
from typing import Any, Final

from models.bagel.drawing import CHECKPOINT_STEPS, LOOP, ROOM
from models.bagel.spans import BRANCHES
from shared.walks import CLIENT, KEEP, CompiledWalk, Edge, Loop, Node, Parallel, Sequential, compile_walk

LLM: Final = "LLM"
CFG_NODES: Final = ("LLM_cfg_text", "LLM_cfg_img", "combine_cfg")
"""The nodes of a flow over three ranks. Most placements leave them out."""
PIXELS: Final = ("pixels", "vae_pixels")

PREPARE: Final = Node(
    "prepare",
    inputs=(),
    outputs=tuple(Edge(name, to=KEEP) for name in ("token_ids", *PIXELS, "latents", "time_index")),
)
RECALL: Final = Node("prepare", inputs=("token_ids",), outputs=(Edge("token_ids", to=KEEP),))
TOKEN: Final = Edge("token", to=CLIENT("text"))


def _encoders(*readers: str) -> Sequential:
    """Both encoders: the rows of all images of a prompt, in its order."""
    return Sequential(
        Node("vae_encoder", inputs=("vae_pixels",), outputs=(Edge("latent_rows", to="vit_encoder"),)),
        Node(
            "vit_encoder",
            inputs=("pixels", "latent_rows"),
            outputs=tuple(Edge("embeds", to=reader) for reader in readers),
        ),
    )


PREFILL_TEXT: Final = Node(LLM, inputs=("token_ids",), outputs=(TOKEN,))
PREFILL_VIT: Final = Sequential(
    Node("vit_encoder", inputs=("pixels",), outputs=(Edge("embeds", to=LLM),)),
    Node(LLM, inputs=("token_ids", "embeds"), outputs=(TOKEN,)),
)
PREFILL_VAE: Final = Sequential(_encoders(LLM), Node(LLM, inputs=("token_ids", "embeds"), outputs=(TOKEN,)))
DECODE: Final = Loop(
    "decode",
    Node(LLM, inputs=("token",), outputs=(Edge("token", to=LLM), TOKEN)),
    max_iters="max_tokens",
)
SHOW: Final = Sequential(
    Node("vae_decoder", inputs=("latents",), outputs=(Edge("image", to="encode_image"),)),
    Node("encode_image", inputs=("image",), outputs=(Edge("image", to=CLIENT("image"), on_resume="keep"),)),
)
IMAGE_GEN: Final = Sequential(
    _encoders(LLM),
    Node(LLM, inputs=("token_ids", "embeds"), outputs=(Edge("latents", to="vae_decoder"),)),
    SHOW,
)
FED_BACK: Final = ("latents", "time_index")


def _is_first(iteration: int, _: Mapping[str, Any]) -> bool:
    """The first iteration computes nothing: the branches take their room, one after the other."""
    return iteration == 0


def _branch(node: str, *, first: bool = False, then: str = "") -> Node:
    """A language model of a step, and the one that takes its room after it."""
    room = () if first else (ROOM,)
    following = [Edge(ROOM, to=then, when=_is_first)] if then else []
    return Node(
        node,
        inputs=("token_ids", "embeds", *FED_BACK, *room),
        outputs=(Edge(BRANCHES[node][1], to="combine_cfg"), *following),
        optional=room,
    )


# All requests take room in this order. So no two of them can each wait for what the other one holds.
_BRANCHES: Final = Parallel(
    _branch(LLM, first=True, then="LLM_cfg_text"),
    _branch("LLM_cfg_text", then="LLM_cfg_img"),
    _branch("LLM_cfg_img"),
)
IMAGE_GEN_CFG: Final = Sequential(
    _encoders(*BRANCHES),
    Loop(
        LOOP,
        Sequential(
            _BRANCHES,
            Node(
                "combine_cfg",
                inputs=(*FED_BACK, *(edge for _, edge in BRANCHES.values())),
                outputs=(
                    *(Edge(name, to=node) for name in FED_BACK for node in (*BRANCHES, "combine_cfg")),
                    Edge("latents", to="vae_decoder"),
                ),
            ),
        ),
        max_iters="iterations",
        outputs=["latents"],
        checkpoint=CHECKPOINT_STEPS,
    ),
    SHOW,
)

WALKS: Final[Mapping[str, CompiledWalk]] = {
    name: compile_walk(name, section)
    for name, section in (
        ("prepare", PREPARE),
        ("prefill_text", PREFILL_TEXT),
        ("prefill_vit", PREFILL_VIT),
        ("prefill_vae", PREFILL_VAE),
        ("decode", DECODE),
        ("recall", RECALL),
        ("image_gen", IMAGE_GEN),
        ("image_gen_cfg", IMAGE_GEN_CFG),
    )
}
