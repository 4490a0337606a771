"""The engine called in process: the baseline for the cost of gateway, log and conductor.

It uses a worker's checkpoint, chat template, tokenizer, engine and text decoder, in one thread: a request is
prepared, added to the engine, stepped and decoded.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.client import Reply
from configs.deployment import DeploymentConfig
from models import registry
from models.base import Processing
from shared.events import Inputs, Params
from shared.tensors import read_ids
from workers import settings
from workers.generation.generated_text import GeneratedText
from workers.kv_engine.outputs import TokenOutput
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec
from workers.loading.engines import make_kv_engines


@dataclass(slots=True)
class _Pending:
    reply: Reply
    answer: GeneratedText
    begun_s: float


class InProcess:
    """A loaded model."""

    def __init__(self, config: DeploymentConfig) -> None:
        module = registry.module(config.model, "processing")
        self._processing: Processing = module.load(Path(config.checkpoint), max_seq_len=config.max_seq_len)
        engines = make_kv_engines(config, settings.parse(config.model_kwargs), 0, lambda *_: None)
        [self._engine] = engines.values()

    def answer(self, questions: list[dict[str, Any]], concurrency: int) -> list[Reply]:
        """Answer all questions, `concurrency` at a time."""
        replies: dict[int, Reply] = {}
        pending: dict[str, _Pending] = {}
        while len(replies) < len(questions):
            while len(pending) < concurrency and len(replies) + len(pending) < len(questions):
                number = len(replies) + len(pending)
                pending[str(number)] = self._ask(str(number), questions[number])
            for output in self._engine.step():
                assert isinstance(output, TokenOutput)
                one = pending[output.key]
                now_s = time.perf_counter() - one.begun_s
                text = one.answer.push(output.token_id)
                if text and not one.reply.first_s:
                    one.reply.first_s = now_s
                one.reply.texts.append(text)
                if one.answer.finish_reason is not None:
                    one.reply.end_s, one.reply.tokens = now_s, one.answer.tokens
                    replies[int(output.key)] = pending.pop(output.key).reply
        return [replies[number] for number in range(len(questions))]

    def _ask(self, key: str, question: dict[str, Any]) -> _Pending:
        begun_s = time.perf_counter()
        inputs = Inputs(messages=question["messages"])
        params = Params(
            max_tokens=question["max_tokens"],
            temperature=question["temperature"],
            ignore_eos=question["ignore_eos"],
        )
        prepared = self._processing.run(
            "prepare", key, {}, {"inputs": _plain(inputs), "params": _plain(params)}
        )
        spec = SequenceSpec(
            key=key,
            prompt_ids=read_ids(prepared.handle("token_ids")),
            max_tokens=question["max_tokens"],
            eos_ids=frozenset(self._processing.eos_ids),
            ignore_eos=question["ignore_eos"],
            sampling=Sampling(**prepared.facts["sampling"]),
        )
        answer = GeneratedText(
            self._processing.text_decoder(),
            max_tokens=spec.max_tokens,
            eos_ids=spec.eos_ids,
            ignore_eos=spec.ignore_eos,
        )
        self._engine.add(spec)
        return _Pending(Reply(), answer, begun_s)


def _plain(value: Inputs | Params) -> dict[str, Any]:
    """Convert to plain data, as an order on the log contains it."""
    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain
