"""Graph and plan of models that think and talk: three partitions that stream into one another.

    prepare            a chat and its media -> token ids, pixels, spectrograms          a CPU node
    prefill_...        the prompt, with what its media need -> the first new token      encoders, Thinker
    thinker_decode     a resident loop: token -> next token                             Thinker
    speak_...          the same, whose states are streamed                              encoders, Thinker
    talker_decode      a resident loop: states -> frames of codes                       Talker
    code2wav_chunk     a loop: a chunk of frames -> samples                             Code2Wav

An answer without speech runs the Thinker alone, which then takes prompts from its prefix cache. The names of
nodes, and those of walks where the walk is the same, are M*'s.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.decoder_lm.graph import Prompt, answer, new_token_budget
from models.omni.options import OmniOptions
from models.omni.prepared import (
    AUDIO,
    SAMPLE_RATE,
    OmniSequenceRequest,
    PreparedOmni,
    Speech,
    TalkRequest,
    talker_sampling,
)
from models.sequence_request import PrepareRequest, SamplingParams, SequenceFacts, SequenceRequest
from models.text import generation_config
from shared.errors import BugError
from shared.events import Usage
from shared.plans import Chain, Join, Plan, PlanRequest, Start, SubPlan, Walk
from shared.tensors import Handle
from shared.walks import (
    CLIENT,
    KEEP,
    CompiledWalk,
    Edge,
    Fixed,
    LeftContext,
    Loop,
    Node,
    Sequential,
    StreamingEdge,
    StreamInput,
    compile_walk,
)

THINKER: Final = "Thinker"
TALKER: Final = "Talker"
CODE2WAV: Final = "Code2Wav"
VISION: Final = "vision_encoder"
SOUND: Final = "audio_encoder"

MAX_FRAMES: Final = 4096
"""The default of transformers."""

STATES: Final = StreamingEdge("thinker_states", to=TALKER, chunks=Fixed(1), after_end="empty")
CODES: Final = "codec_tokens"
"""The stream of the talker's codes."""
FIRST: Final = "initial_codec_chunk_frames"
TEXT: Final = Edge("token", to=CLIENT("text"))

_ENCODERS: Final = {"text": (), "vision": (VISION,), "audio": (SOUND,), "media": (VISION, SOUND)}
"""By kind of prompt, its encoders. The second one puts its rows among those of the first."""
_ARRAYS: Final = {VISION: "pixels", SOUND: "audio_features"}


def _prepare(*arrays: str) -> CompiledWalk:
    kept = ("token_ids", "talker_ids", *arrays)
    name = "_".join(["prepare", *arrays])
    return compile_walk(name, Node("prepare", inputs=(), outputs=tuple(Edge(one, to=KEEP) for one in kept)))


def _start(name: str, kinds: str, *outputs: Edge | StreamingEdge) -> CompiledWalk:
    """A walk that starts a sequence with a prompt of these kinds."""
    encoders = _ENCODERS[kinds]
    after = (*encoders[1:], THINKER)
    sections = [
        Node(
            encoder,
            inputs=(_ARRAYS[encoder], *(("embeds",) if place else ())),
            outputs=(Edge("embeds", to=after[place]),),
        )
        for place, encoder in enumerate(encoders)
    ]
    inputs = ("token_ids", "embeds") if encoders else ("token_ids",)
    thinker = Node(THINKER, inputs=inputs, outputs=outputs)
    return compile_walk(name, Sequential(*sections, thinker) if sections else thinker)


def _decode(name: str, *outputs: Edge | StreamingEdge) -> CompiledWalk:
    """A walk that continues an answer."""
    thinker = Node(THINKER, inputs=("token",), outputs=(Edge("token", to=THINKER), *outputs))
    return compile_walk(name, Loop("decode", thinker, max_iters="max_tokens"))


def _walks(codes: StreamingEdge) -> dict[str, CompiledWalk]:
    talker = Node(TALKER, inputs=("token_ids", StreamInput(STATES.name)), outputs=(codes,))
    codec = Node(
        CODE2WAV,
        inputs=(StreamInput(codes.name),),
        outputs=(Edge("audio", to=CLIENT(AUDIO), on_resume="keep"),),
    )
    found = [
        _prepare(),
        _prepare("pixels"),
        _prepare("audio_features"),
        _prepare("pixels", "audio_features"),
        _decode("thinker_decode", TEXT),
        _decode("speak_decode", TEXT, STATES),
        compile_walk("talker_decode", Loop("talk", talker, max_iters="max_tokens")),
        compile_walk("code2wav_chunk", Loop("chunks", codec, max_iters=None)),
    ]
    for kinds in _ENCODERS:
        found.append(_start(f"prefill_{kinds}", kinds, TEXT))
        found.append(_start(f"score_{kinds}", kinds))
        found.append(_start(f"speak_{kinds}", kinds, TEXT, STATES))
    return {walk.name: walk for walk in found}


# ---- the plan --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaking:
    """How a family speaks.

    Attributes:
        chunks: of the frames that are sounded at once.
        first_frames: the frames of the first chunk while up to so many requests run; beyond, it is a whole
            chunk. A small chunk is heard early, and costs as much as a larger one.
        options: the family's request parameters.
        inner_sampling: of the choices after the first code of a frame; None where a frame is one code.
        codec_args: the arguments of the codec.
    """

    chunks: LeftContext
    first_frames: Sequence[tuple[int, int]]
    options: type[OmniOptions]
    inner_sampling: Callable[[Any], SamplingParams | None]
    codec_args: Callable[[Any, Speech], Mapping[str, Any]]

    def plan(self, request: PlanRequest) -> Plan:
        """Prepare the prompt, then write the answer, and speak it if that is asked for."""
        arrays = _arrays_of(request, hears_videos=request.options_as(self.options).use_audio_in_video)
        args = PrepareRequest(inputs=request.inputs, params=request.params)
        step = yield Walk("_".join(["prepare", *arrays]), args=args)
        prepared = step.facts_as(PreparedOmni)
        inputs = {name: step.handle(name) for name in ("token_ids", *arrays)}
        if AUDIO in request.inputs.output_modalities:
            return (yield from self._spoken(request, prepared, inputs, step.handle("talker_ids")))
        kinds = _kinds_of(arrays)
        prompt = Prompt(
            prepared=prepared,
            inputs=inputs,
            start=partial(_with_media, prepared),
            prefill=f"prefill_{kinds}",
            score=f"score_{kinds}",
            decode="thinker_decode",
        )
        return (yield from answer(request, prompt))

    def first(self, request: PlanRequest) -> int:
        """The frames of the first chunk of sound: the request's own, or by the load at its admission."""
        asked = request.options_as(self.options).initial_codec_chunk_frames
        if asked is not None:
            return asked
        running = request.limits.concurrent
        return next((frames for most, frames in self.first_frames if running <= most), self.chunks.count)

    def _spoken(
        self, request: PlanRequest, prepared: PreparedOmni, inputs: dict[str, Handle], talker_ids: Handle
    ) -> Plan:
        """Think, talk and sound at the same time."""
        if prepared.speech is None:
            raise BugError("expected prepare to report the facts of speech, found none")
        think = _thinker_args(request, prepared)
        codec_args = self.codec_args(request.options_as(self.options), prepared.speech)
        yield Start("talk", _talk(talker_ids, self._talker_args(request, prepared, prepared.speech)))
        yield Start("sound", _sound({FIRST: self.first(request), **codec_args}))
        kinds = _kinds_of([name for name in _ARRAYS.values() if name in inputs])
        answered = yield Chain(
            Walk(f"speak_{kinds}", inputs=inputs, args=_with_media(prepared, think)),
            Walk("speak_decode", args=think),
            ends=(STATES.name,),
        )
        yield Join("talk")
        yield Join("sound")
        facts: SequenceFacts = answered.facts_as(SequenceFacts)
        usage = Usage(prompt_tokens=prepared.prompt_tokens, completion_tokens=facts.completion_tokens)
        return facts.finish(usage)

    def _talker_args(self, request: PlanRequest, prepared: PreparedOmni, speech: Speech) -> TalkRequest:
        """The arguments of the walk that speaks.

        Raises:
            ClientError: the frames that are asked for do not fit the KV cache.
        """
        options, limits = request.options_as(self.options), request.limits
        wanted = options.talker_max_output_tokens
        if wanted is None:
            room = min(limits.max_seq_len, limits.kv_tokens) - speech.prompt_tokens
            wanted = max(1, min(MAX_FRAMES, room))
        return TalkRequest(
            max_tokens=new_token_budget(speech.prompt_tokens, wanted, limits),
            sampling=talker_sampling(options),
            inner_sampling=self.inner_sampling(options),
            ignore_eos=True,
            stop_token_ids=[*speech.end_codes],
            choice=request.params.choice,
            prompt_items=prepared.prompt_tokens + 1,
            parts=[*speech.parts],
            penalized_ids=[*speech.penalized_ids],
            speaker=speech.speaker,
            spans=speech.spans,
        )


def _talk(talker_ids: Handle, args: TalkRequest) -> SubPlan:
    """Speak from the first new token on, which is a part of the talker's prompt."""
    yield Chain(Walk("talker_decode", inputs={"token_ids": talker_ids}, args=args), ends=(CODES,))


def _sound(args: Mapping[str, Any]) -> SubPlan:
    """Make sound of the codes, until their stream ends."""
    yield Walk("code2wav_chunk", args=args)


def _thinker_args(request: PlanRequest, prepared: PreparedOmni) -> SequenceRequest:
    params = request.params
    return SequenceRequest(
        max_tokens=new_token_budget(prepared.prompt_tokens, params.max_tokens, request.limits),
        sampling=prepared.sampling,
        stop=params.stop or prepared.stop,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        choice=params.choice,
        logprobs=params.logprobs,
        reasoning=prepared.reasoning,
    )


def _with_media(prepared: PreparedOmni, request: SequenceRequest) -> SequenceRequest:
    """The arguments of the walk that starts a sequence, with the media of its prompt."""
    if not prepared.parts:
        return request
    given: dict[str, Any] = {name: getattr(request, name) for name in request.__struct_fields__}
    return OmniSequenceRequest(
        **{**given, "parts": [*prepared.parts]}, visuals=prepared.visuals, sounds=prepared.sounds
    )


def _arrays_of(request: PlanRequest, *, hears_videos: bool) -> list[str]:
    """The arrays that the media of a request become, in the order of their encoders."""
    kinds = {one.modality for one in request.inputs.files}
    found = {VISION if kind in ("image", "video") else SOUND for kind in kinds}
    if hears_videos and "video" in kinds:
        found.add(SOUND)
    return [array for encoder, array in _ARRAYS.items() if encoder in found]


def _kinds_of(arrays: Sequence[str]) -> str:
    """The name of a prompt with these arrays."""
    return next(kinds for kinds, of in _ENCODERS.items() if [_ARRAYS[one] for one in of] == [*arrays])


# ---- the family ------------------------------------------------------------------------------------


def omni_graph(
    family: str,
    architectures: Sequence[str],
    *,
    name: str,
    speaking: Speaking,
    voices: tuple[str, ...],
    repository: str,
) -> ModelGraph:
    """The graph of a family.

    Args:
        family: its name in configurations.
        architectures: the model classes that it claims, as `config.json` names them.
        name: the published name of the models.
        speaking: how it speaks.
        voices: of the published checkpoint, the default first.
        repository: a usual checkpoint on the Hugging Face hub.
    """

    def claims(checkpoint: CheckpointInfo) -> Claim | None:
        return Claim.ARCHITECTURE if checkpoint.architecture in architectures else None

    return ModelGraph(
        family=family,
        nodes={
            "prepare": EngineKind.CPU,
            VISION: EngineKind.STATELESS,
            SOUND: EngineKind.STATELESS,
            THINKER: EngineKind.KV,
            TALKER: EngineKind.KV,
            CODE2WAV: EngineKind.STATELESS,
        },
        walks=_walks(StreamingEdge(CODES, to=CODE2WAV, chunks=speaking.chunks, after_end="stop")),
        plan=speaking.plan,
        modalities=("text", "image", "audio", "video"),
        media={AUDIO: {"sample_rate": SAMPLE_RATE, "num_channels": 1, "format": "pcm_s16le"}},
        options=speaking.options,
        voices=voices,
        repository=repository,
        embeds=True,
        claims=claims,
        serves=f"{name}: the architecture {' or '.join(architectures)}",
        remarks=lambda checkpoint, _: generation_config.remarks_of(checkpoint),
    )
