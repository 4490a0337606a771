"""Graph and plan of pipelines of diffusers, served in parts or whole.

    prepare         options and input images -> the arguments of the pipeline's call     a CPU node
    text_encoder    prompts -> `condition`                                               stateless
    denoiser        condition, pictures -> `latents`, in steps                           stateless
    vae_decoder     latents -> `frames`, and `sound`                                     stateless
    encode_output   frames, sound -> an image file, a video, or a PNG file of each frame  a CPU node

A class that is not known is served whole: one node `pipeline` in the place of the three. The names of the
nodes are arguments, because M*'s placements have others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.diffusion_pipelines.components import MODEL_INDEX
from models.diffusion_pipelines.options import ImageOptions
from models.diffusion_pipelines.remarks import remarks_of
from models.diffusion_pipelines.requests import PipelineCall
from shared.errors import ClientError
from shared.events import Inputs, Usage
from shared.plans import Finish, Plan, PlanRequest, StepResult, Walk
from shared.walks import CLIENT, KEEP, CompiledWalk, Edge, Loop, Node, Sequential, compile_walk

IMAGE: Final = "image"
VIDEO: Final = "video"
KWARGS: Final = frozenset(
    {"loras", "max_batch", "max_runs", "request_memory_gb", "safety_checker", "vae_slicing", "vae_tiling"}
)
"""The families' own keys of `model_kwargs`."""
_SEEDS: Final = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNames:
    """The names of the nodes of one family.

    Attributes:
        text_encoder: empty: the denoiser reads the text itself.
        former: nodes that published placements name, and whose work others do here.
    """

    text_encoder: str = "text_encoder"
    denoiser: str = "denoiser"
    vae_decoder: str = "vae_decoder"
    former: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The plan of a family; `outputs` are the modalities that it makes.

    A family of videos that is asked for images gives frames: a single one if no number is asked for.
    """

    outputs: tuple[str, ...]
    options: type[ImageOptions]

    def __call__(self, request: PlanRequest) -> Plan:
        """Prepare the call, and make what was asked for."""
        options = request.options_as(self.options)
        prompt, wanted = _prompt(request.inputs), _wanted(request, self.outputs)
        _refuse_others(request)
        makes = wanted if wanted in self.outputs else VIDEO
        given = dict(request.params.options)
        if makes != wanted and not given.keys() & {"num_frames", "seconds"}:
            given["num_frames"] = 1
        args = {"inputs": request.inputs, "options": given, "makes": makes}
        step = yield Walk("prepare", args=args)
        prepared = step.facts_as(PipelineCall)
        each_frame = makes == VIDEO and (wanted == IMAGE or bool(getattr(options, "frames", False)))
        if each_frame and not prepared.frames:
            raise ClientError(
                "num_frames: expected a number beside `frames`, because this class states no default",
                code="missing_required_parameter",
            )
        walk = "frames_gen" if each_frame else f"{makes}_gen"
        done = yield Walk(
            walk,
            inputs={"pictures": step.handle("pictures")},
            args=_arguments(request, options, prepared, prompt, each_frame=each_frame),
        )
        return _finished(prepared, done)


def _prompt(inputs: Inputs) -> str:
    """The prompt: a text, or the texts of a chat's last message of a user.

    Raises:
        ClientError: there is none, or it is to be continued.
    """
    if inputs.continue_final_message or not inputs.add_generation_prompt:
        name = "continue_final_message" if inputs.continue_final_message else "add_generation_prompt"
        raise ClientError(f"{name}: this model has no chat template", code="not_supported")
    if inputs.text is not None:
        return inputs.text
    users = [one for one in inputs.messages or () if one.get("role") == "user"]
    content = users[-1].get("content") if users else None
    if isinstance(content, str):
        return content
    parts = [one["text"] for one in content or () if isinstance(one, dict) and one.get("type") == "text"]
    if not parts:
        raise ClientError("expected a prompt as text, found none", code="missing_required_parameter")
    return "\n".join(parts)


def _wanted(request: PlanRequest, outputs: tuple[str, ...]) -> str:
    """The modality that a request asks for.

    Raises:
        ClientError: it asks for another one, or for several.
    """
    wanted = set(request.inputs.output_modalities)
    if wanted == {VIDEO, "audio"} and VIDEO in outputs:  # a video has its sound in it
        wanted = {VIDEO}
    known = {*outputs, IMAGE} if VIDEO in outputs else {*outputs}
    if len(wanted) != 1 or not wanted <= known:
        raise ClientError(
            f"output_modalities: expected one of {', '.join(outputs)}, found {sorted(wanted)}",
            code="unsupported_modality",
        )
    return wanted.pop()


def _refuse_others(request: PlanRequest) -> None:
    params = request.params
    given = {
        "response_format": params.guide is not None,
        "thinking_budget": params.thinking_budget is not None,
        "logprobs": params.logprobs is not None,
        "echo": params.echo,
        "warm": params.warm,
        "max_tokens": params.max_tokens is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise ClientError(f"{name}: this model writes no text; leave it out", code="not_supported")


def _arguments(
    request: PlanRequest, options: ImageOptions, prepared: PipelineCall, prompt: str, *, each_frame: bool
) -> dict[str, Any]:
    """The arguments of all nodes of the walk."""
    return {
        "call": prepared.call,
        "prompt": prompt,
        "negative_prompt": options.negative_prompt,
        "seed": (request.seed + request.params.choice) % _SEEDS,
        "step_cache": options.step_cache,
        "lora": prepared.lora,
        "partial_images": options.partial_images,
        "format": options.output_format,
        "quality": options.output_quality,
        "makes": prepared.makes,
        "fps": prepared.fps,
        "frames": prepared.frames,
        "each_frame": each_frame,
        "sound_rate": prepared.sound_rate,
    }


def _finished(prepared: PipelineCall, done: StepResult) -> Finish:
    facts = {name: value for walk in done.walks for name, value in walk.facts.items()}
    counts = {
        "images" if prepared.makes == IMAGE else "frames": int(facts.get("frames", prepared.frames)),
    }
    if steps := int(facts.get("steps", prepared.steps)):  # else the class decided, and does not tell
        counts["steps"] = steps
    if facts.get("cached_calls"):
        counts["cached_calls"] = int(facts["cached_calls"])
        counts["cache_error_ppm"] = round(1e6 * float(facts.get("cache_error") or 0))
    if facts.get("flagged"):
        counts["flagged"] = 1
    usage = Usage(prompt_tokens=0, completion_tokens=0, counts=counts)
    return Finish(usage=usage, finish_reasons=("content_filter" if facts.get("flagged") else "stop",))


def _walks(nodes: Sequence[Node], decoder: str) -> dict[str, CompiledWalk]:
    """The walks of a family, by name: up to `decoder`, and three ways to show what it has made."""
    made = (Edge("frames", to="encode_output"), Edge("sound", to="encode_output"))
    decoding = Node(decoder, nodes[-1].inputs, made)

    def shown(name: str, *last: Node | Loop) -> CompiledWalk:
        return compile_walk(name, Sequential(*nodes[:-1], decoding, *last))

    def encoded(edge: Edge) -> Node:
        return Node("encode_output", ("frames", "sound"), (edge,))

    each = Loop(
        "each_frame",
        Node(
            "next_frame",
            ("files",),
            (Edge("image", to=CLIENT(IMAGE), on_resume="keep"), Edge("files", to="next_frame")),
        ),
        max_iters="frames",
    )
    return {
        "prepare": compile_walk("prepare", Node("prepare", (), (Edge("pictures", to=KEEP),))),
        "image_gen": shown("image_gen", encoded(Edge("image", to=CLIENT(IMAGE), on_resume="keep"))),
        "video_gen": shown("video_gen", encoded(Edge("video", to=CLIENT(VIDEO), on_resume="keep"))),
        "frames_gen": shown("frames_gen", encoded(Edge("files", to="next_frame")), each),
    }


def parts_graph(
    family: str,
    claims: Callable[[CheckpointInfo], Claim | None] | None,
    *,
    outputs: tuple[str, ...],
    options: type[ImageOptions],
    names: NodeNames | None = None,
    **more: Any,
) -> ModelGraph:
    """The graph of a family whose pipelines are served in parts; they make `outputs`, the usual one first."""
    by = names or NodeNames()
    encoding: list[Node] = []
    read: tuple[str, ...] = ("pictures",)
    if by.text_encoder:
        encoding = [Node(by.text_encoder, ("pictures",), (Edge("condition", to=by.denoiser),))]
        read = ("condition", "pictures")
    nodes = (
        *encoding,
        Node(by.denoiser, read, (Edge("latents", to=by.vae_decoder),)),
        Node(by.vae_decoder, ("latents",), ()),
    )
    stateless = tuple(filter(None, (by.text_encoder, by.denoiser, by.vae_decoder)))
    return _graph(
        family, claims, outputs, options, stateless, _walks(nodes, by.vae_decoder),
        former_nodes=frozenset(by.former), **more,
    )  # fmt: skip


def whole_graph(
    family: str,
    claims: Callable[[CheckpointInfo], Claim | None],
    *,
    outputs: tuple[str, ...],
    options: type[ImageOptions],
    **more: Any,
) -> ModelGraph:
    """The graph of a family whose pipelines run as one node."""
    nodes = (Node("pipeline", ("pictures",), ()),)
    return _graph(family, claims, outputs, options, ("pipeline",), _walks(nodes, "pipeline"), **more)


def _graph(
    family: str,
    claims: Callable[[CheckpointInfo], Claim | None] | None,
    outputs: tuple[str, ...],
    options: type[ImageOptions],
    stateless: Sequence[str],
    walks: Mapping[str, CompiledWalk],
    **more: Any,
) -> ModelGraph:
    videos = () if VIDEO in outputs else ("video_gen", "frames_gen")
    images = () if IMAGE in outputs else ("image_gen",)
    kept = {name: walk for name, walk in walks.items() if name not in (*videos, *images)}
    cpu = ("prepare", "encode_output", *(("next_frame",) if VIDEO in outputs else ()))
    return ModelGraph(
        family=family,
        nodes={**dict.fromkeys(cpu, EngineKind.CPU), **dict.fromkeys(stateless, EngineKind.STATELESS)},
        walks=kept,
        plan=PipelinePlan(outputs=outputs, options=options),
        modalities=("text", "image"),
        options=options,
        kwargs=KWARGS,
        max_positions=4096,
        claims=claims,
        remarks=remarks_of(options),
        **more,
    )


def class_name(checkpoint: CheckpointInfo) -> str:
    """The class of a folder's pipeline; empty for a folder that is none."""
    return str(checkpoint.read_json(MODEL_INDEX).get("_class_name") or "")
