"""Walks for several tests, and a runner without a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.walks import (
    CLIENT,
    KEEP,
    Edge,
    Emission,
    Firing,
    Loop,
    Node,
    Parallel,
    Sequential,
    SlidingWindow,
    StreamingEdge,
    StreamInput,
    WalkRun,
)

PIPELINE = Sequential(
    Node("encode", ["image"], [Edge("features", "decode")]),
    Node("decode", ["features"], [Edge("output", CLIENT("text"))]),
)

DIFFUSION = Sequential(
    Loop(
        "denoise",
        Node("denoiser", ["latents", "prompt"], [Edge("latents", "denoiser"), Edge("latents", "decoder")]),
        max_iters=3,
        outputs=["latents"],
    ),
    Node("decoder", ["latents"], [Edge("image", CLIENT("image"))]),
)

DECODE = Loop(
    "decode",
    Node("llm", ["token"], [Edge("token", "llm"), Edge("token", CLIENT("text"))]),
    max_iters="max_tokens",
)

REFINE = Sequential(
    Loop(
        "refine",
        Sequential(
            Loop(
                "denoise",
                Node(
                    "denoiser",
                    ["latents", "prompt"],
                    [Edge("latents", "denoiser"), Edge("latents", "refiner")],
                ),
                max_iters=3,
                outputs=["latents"],
            ),
            Node("refiner", ["latents"], [Edge("latents", "denoiser"), Edge("latents", "decoder")]),
        ),
        max_iters=2,
        outputs=["latents"],
    ),
    Node("decoder", ["latents"], [Edge("image", CLIENT("image"))]),
)

ROLLOUT = Loop(
    "rollout",
    Node("predictor", ["x"], [Edge("x", "predictor"), Edge("x", KEEP), Edge("pred", KEEP)]),
    max_iters=3,
    outputs=["x"],
    accumulated=["pred"],
)

BRANCHES = ("llm", "llm_cfg_text", "llm_cfg_img")
GUIDED = Sequential(
    Loop(
        "image_gen",
        Sequential(
            Parallel(
                *(Node(name, ["latents", "time_index"], [Edge(f"v_{name}", "combine")]) for name in BRANCHES)
            ),
            Node(
                "combine",
                ["latents", "time_index", *(f"v_{name}" for name in BRANCHES)],
                [
                    *(Edge(edge, to) for edge in ("latents", "time_index") for to in (*BRANCHES, "combine")),
                    Edge("latents", "vae_decoder"),
                ],
            ),
        ),
        max_iters=49,
        outputs=["latents"],
    ),
    Node("vae_decoder", ["latents"], [Edge("image", CLIENT("image"))]),
)

SPOKEN = StreamingEdge("token", "vocoder", chunks=SlidingWindow(28, 7), only=(100, 200))

SPEAK = Loop(
    "decode", Node("llm", ["token"], [Edge("token", "llm"), SPOKEN, Edge("n", KEEP)]), 9, outputs=["n"]
)

VOICE = Loop(
    "voice", Node("vocoder", [StreamInput("token")], [Edge("audio", CLIENT("audio"))]), max_iters=None
)


def even(iteration: int, args: Mapping[str, Any]) -> bool:
    return iteration % 2 == 0


def odd(iteration: int, args: Mapping[str, Any]) -> bool:
    return iteration % 2 == 1


def never(iteration: int, args: Mapping[str, Any]) -> bool:
    return False


def guided(iteration: int, args: Mapping[str, Any]) -> bool:
    return iteration < int(args["guided_steps"])


@dataclass(slots=True)
class Trace:
    """The firings and emissions of a run."""

    firings: list[Firing] = field(default_factory=list)
    emissions: list[Emission] = field(default_factory=list)

    def fired(self, node: str) -> int:
        return sum(firing.node == node for firing in self.firings)

    def values(self, edge: str) -> list[Any]:
        return [emission.value for emission in self.emissions if emission.edge == edge]


def numbered(run: WalkRun) -> Callable[[Firing], Mapping[str, Any]]:
    """Nodes whose outputs count their firings, as `edge0`, `edge1`, ..."""
    counts: dict[str, int] = {}

    def produce(firing: Firing) -> Mapping[str, Any]:
        count = counts.get(firing.node, 0)
        counts[firing.node] = count + 1
        return {edge: f"{edge}{count}" for edge in run.walk.nodes[firing.node].outputs}

    return produce


def drive(
    run: WalkRun,
    produce: Callable[[Firing], Mapping[str, Any]] | None = None,
    *,
    stops: Mapping[str, int] | None = None,
) -> Trace:
    """Fire until no node is ready; `stops` maps a node to the number of its firing that stops its loop."""
    produce = produce or numbered(run)
    trace = Trace()
    while firings := run.take_ready():
        for firing in firings:
            trace.firings.append(firing)
            if (stops or {}).get(firing.node) == trace.fired(firing.node):
                run.stop(run.walk.loop_table[run.walk.nodes[firing.node].loop].name)
            emissions = run.complete(firing, produce(firing))
            assert emissions is not None
            trace.emissions += emissions
    return trace
