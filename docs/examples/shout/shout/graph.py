"""Nodes, walks, plan and claim. The conductor imports it, so it imports no tokenizer and no torch."""

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from shared.errors import ClientError
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, KEEP, Edge, Loop, Node, Sequential, compile_walk

LISTEN = compile_walk("listen", Node("listener", inputs=(), outputs=(Edge("words", to=KEEP),)))
SPEAK = compile_walk(
    "speak",
    Loop(
        "words",
        Sequential(
            Node("taker", ["words"], [Edge("word", to="shouter"), Edge("words", to="taker")]),
            Node("shouter", ["word"], [Edge("loud", to=CLIENT("text"))]),
        ),
        max_iters="count",
    ),
)


def plan(request: PlanRequest) -> Plan:
    """Count the words, then shout as many as the request may have."""
    step = yield Walk("listen", args={"inputs": request.inputs})
    count: int = step.fact("count")
    if not count:
        raise ClientError("there is nothing to shout: expected at least one word", code="no_words")
    limit = request.params.max_tokens or count
    yield Walk("speak", inputs={"words": step.handle("words")}, args={"count": min(count, limit)})
    return Finish(
        usage=Usage(prompt_tokens=count, completion_tokens=min(count, limit)),
        finish_reasons=("length" if limit < count else "stop",),
    )


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim the checkpoints that `dalsegno serve FOLDER` detects as this family's."""
    return Claim.ARCHITECTURE if checkpoint.architecture == "Shout" else None


GRAPH = ModelGraph(
    family="shout",
    nodes=dict.fromkeys(("listener", "taker", "shouter"), EngineKind.CPU),
    walks={"listen": LISTEN, "speak": SPEAK},
    plan=plan,
    claims=claims,
    serves="checkpoints of the architecture Shout",
)
