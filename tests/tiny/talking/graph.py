"""The graph and the plan."""

from typing import Annotated

import msgspec

from models.base import EngineKind, ModelGraph
from models.decoder_lm.graph import new_token_budget
from models.sequence_request import PreparedPrompt, PrepareRequest, SequenceFacts, SequenceRequest
from shared.events import Usage
from shared.plans import Chain, Finish, Join, Plan, PlanRequest, Start, SubPlan, Walk
from shared.tensors import Handle
from shared.walks import (
    CLIENT,
    KEEP,
    Edge,
    Fixed,
    LeftContext,
    Loop,
    Node,
    StreamingEdge,
    StreamInput,
    compile_walk,
)

CODEC_END = 290
FRAMES, CONTEXT = 4, 4
"""The frames of a chunk of sound, and those before it that it is made with."""
SPOKEN_PROMPT = 9
"""The tokens of the talker's prompt after those of the user."""
ASSISTANT_PROMPT = 3
"""The last tokens of the thinker's prompt."""

STATES = StreamingEdge("states", to="talker", chunks=Fixed(1), after_end="empty")
CODES = StreamingEdge("codes", to="codec", chunks=LeftContext(FRAMES, CONTEXT), after_end="stop")

PREPARE = Node("prepare", inputs=(), outputs=(Edge("token_ids", to=KEEP), Edge("spoken_ids", to=KEEP)))
PREFILL = Node("thinker", inputs=("token_ids",), outputs=(Edge("token", to=CLIENT("text")), STATES))
DECODE = Loop(
    "decode",
    Node(
        "thinker",
        inputs=("token",),
        outputs=(Edge("token", to="thinker"), Edge("token", to=CLIENT("text")), STATES),
    ),
    max_iters="max_tokens",
)
TALK = Loop(
    "talk",
    Node("talker", inputs=("token_ids", StreamInput("states")), outputs=(CODES,)),
    max_iters="max_tokens",
)
SOUND = Loop(
    "sound",
    Node(
        "codec",
        inputs=(StreamInput("codes"),),
        outputs=(
            Edge("audio", to=CLIENT("audio"), on_resume="keep"),
            Edge("frames", to=CLIENT("codes"), on_resume="keep"),
        ),
    ),
    max_iters=None,
)


class TalkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of speech.

    Attributes:
        frames: the most frames of sound.
    """

    frames: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 16


def plan(request: PlanRequest) -> Plan:
    """Think, talk and sound at the same time."""
    options = request.options_as(TalkOptions)
    step = yield Walk("prepare", args=PrepareRequest(inputs=request.inputs, params=request.params))
    prepared = step.facts_as(PreparedPrompt)
    max_tokens = new_token_budget(prepared.prompt_tokens, request.params.max_tokens, request.limits)
    args = SequenceRequest(
        max_tokens=max_tokens, sampling=prepared.sampling, ignore_eos=request.params.ignore_eos
    )
    yield Start("talk", _talk(step.handle("spoken_ids"), prepared.prompt_tokens, options))
    yield Start("sound", _sound())
    answer = yield Chain(
        Walk("prefill", inputs={"token_ids": step.handle("token_ids")}, args=args),
        Walk("decode", args=args),
        ends=("states",),
    )
    yield Join("talk")
    yield Join("sound")
    facts = answer.facts_as(SequenceFacts)
    usage = Usage(prompt_tokens=prepared.prompt_tokens, completion_tokens=facts.completion_tokens)
    return Finish(usage=usage, finish_reasons=(facts.finish_reason,))


def _talk(token_ids: Handle, prompt_tokens: int, options: TalkOptions) -> SubPlan:
    """Speak from the first new token on, which is a part of the talker's prompt."""
    args = SequenceRequest(
        max_tokens=options.frames,
        ignore_eos=True,
        stop_token_ids=[CODEC_END],
        prompt_items=prompt_tokens + 1,
    )
    yield Chain(Walk("talk", inputs={"token_ids": token_ids}, args=args), ends=("codes",))


def _sound() -> SubPlan:
    yield Walk("sound")


GRAPH = ModelGraph(
    family="talking",
    nodes={
        "prepare": EngineKind.CPU,
        "thinker": EngineKind.KV,
        "talker": EngineKind.KV,
        "codec": EngineKind.STATELESS,
    },
    walks={
        "prepare": compile_walk("prepare", PREPARE),
        "prefill": compile_walk("prefill", PREFILL),
        "decode": compile_walk("decode", DECODE),
        "talk": compile_walk("talk", TALK),
        "sound": compile_walk("sound", SOUND),
    },
    plan=plan,
    options=TalkOptions,
)
