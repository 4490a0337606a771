"""Kills at random times: every role and nats-server, under every kind of request.

The deployment, the clients and the rounds are those of the chaos tests; the faults have no point and no plan.
`tests.chaos.checker` compares what every client received with the raw log and with an undisturbed run.
"""

import asyncio
import json
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.attack.promises import Verdict
from tests.chaos.checker import Finding
from tests.chaos.deployment import Deployment, Shape, deployed
from tests.chaos.questions import CANCELLED, LASTING, LEAVER, SPOKEN, WHOLE, Question
from tests.chaos.rounds import Disturbance, Outcome, Rounds
from tests.tiny import write_checkpoint
from tests.tiny.orpheus import tiny_orpheus

_MANY_ATTEMPTS: Final = 50
"""A request survives so many deaths of workers: that is not what is attacked."""
_MOST_KILLS: Final = 5
_PAUSE_S: Final = (0.02, 1.0)
_SPEAKING_SHARE: Final = 0.3
_ON_THREE_RANKS: Final = [
    {"node_names": ["LLM"], "ranks": [0], "graph_walks": ["prefill"]},
    {"node_names": ["LLM"], "ranks": [1], "graph_walks": ["decode"]},
    {"node_names": ["snac_decoder"], "ranks": [2], "graph_walks": ["snac_chunk"]},
]


async def attack(out: Path, seconds: float = 120.0, seed: int = 0) -> list[Verdict]:
    """Kill for so many seconds: most of the time under text, the rest under speech."""
    kinds = {
        "every acknowledged request ends exactly once": {
            "lost", "no-end", "two-ends", "not-on-the-log", "acked-lost",
        },
        "no chunk is lost, doubled or contradicted": {
            "twice", "missing", "order", "altered", "invented", "contradiction", "offset", "differs",
            "unnamed",
        },
        "only placed and ordered incarnations are heard, nothing after the end": {
            "unordered", "behind-the-end", "never-submitted", "submitted-twice",
        },
        "ends, usage and cancels are told as the log has them": set(),
    }  # fmt: skip
    verdicts = {Verdict(promise).promise: Verdict(promise) for promise in kinds}
    text = Shape(checkpoint=_with_tools(out / "checkpoint"), settings={"max_attempts": _MANY_ATTEMPTS})
    asked: Sequence[Question] = (*LASTING, *WHOLE)
    besides = (LEAVER, CANCELLED)
    outcomes = await _rounds(out / "text", text, asked, besides, seconds * (1 - _SPEAKING_SHARE), seed)
    speech = Shape(
        checkpoint=tiny_orpheus(),
        family="orpheus",
        workers=3,
        settings={"node_groups": _ON_THREE_RANKS, "max_seq_len": 2048, "max_attempts": _MANY_ATTEMPTS},
    )
    outcomes += await _rounds(out / "speech", speech, SPOKEN, (), seconds * _SPEAKING_SHARE, seed)
    for outcome in outcomes:
        for verdict in verdicts.values():
            verdict.tried(outcome.clients)
        for finding in outcome.findings:
            verdicts[_promise_of(finding, kinds)].broken(outcome.note, str(finding))
    again = sum(outcome.attempts for outcome in outcomes)
    stall_s = max((outcome.stall_s for outcome in outcomes), default=0.0)
    for verdict in verdicts.values():
        verdict.note = f"{len(outcomes)} rounds, {again} attempts again, longest silence {stall_s:.1f} s"
    return list(verdicts.values())


def _with_tools(folder: Path) -> Path:
    """A tiny checkpoint whose chat template takes tools, in the format of Hermes and Qwen."""
    folder.mkdir(parents=True)
    write_checkpoint(folder, "qwen3")
    file = folder / "tokenizer_config.json"
    said = json.loads(file.read_text())
    tools = "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    file.write_text(json.dumps({**said, "chat_template": tools + said["chat_template"]}))
    return folder


def _promise_of(finding: Finding, kinds: dict[str, set[str]]) -> str:
    *promises, rest = kinds
    return next((promise for promise in promises if finding.kind in kinds[promise]), rest)


async def _rounds(
    folder: Path,
    shape: Shape,
    asked: Sequence[Question],
    besides: Sequence[Question],
    seconds: float,
    seed: int,
) -> list[Outcome]:
    """Rounds of random kills until the time is over."""
    outcomes: list[Outcome] = []
    async with deployed(folder, shape) as deployment:
        rounds = Rounds(deployment)
        undisturbed = await rounds.undisturbed(asked)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            await deployment.wait_until_ready()
            number = seed + len(outcomes)
            said: list[str] = []
            outcome = await rounds.round(
                f"kills-{number}",
                [*undisturbed.questions, *besides],
                expected=undisturbed.expected,
                disturb=_kills(deployment, number, said),
            )
            outcome.note = f"--seed {number}, {', '.join(said)} killed"
            outcomes.append(outcome)
    return outcomes


def _kills(deployment: Deployment, seed: int, said: list[str]) -> Disturbance:
    """Kill some processes, one after the other, at random times."""
    chance = random.Random(seed)
    names = [*deployment.roles, "nats"]

    async def disturb() -> bool:
        for _ in range(chance.randint(1, _MOST_KILLS)):
            await asyncio.sleep(chance.uniform(*_PAUSE_S))
            name = chance.choice(names)
            said.append(name)
            victim = deployment.nats if name == "nats" else deployment.roles[name]
            victim.signal(signal.SIGKILL)
        return True

    return disturb
