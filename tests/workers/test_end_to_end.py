"""A worker with the real engine and a tiny checkpoint: orders in, events out, against `generate`."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import jsonschema
import msgspec
import pytest
from tokenizers import Tokenizer

from configs.checks import resolve
from configs.deployment import ConfigError, DeploymentConfig
from shared.events import (
    Event,
    Inputs,
    NodeReady,
    OutputChunk,
    OutputTotals,
    Params,
    WalkCall,
    WalkCompleted,
    WalkFailed,
    WalkStopped,
    WorkerJoined,
    decode,
    encode,
)
from shared.log.memory import MemoryLog, MemoryStore
from shared.tensors import inline_ids, read_ids
from shared.transcript import Transcript
from tests.tiny import tiny_checkpoint
from tests.workers import harness
from tests.workers.harness import RANK, SUBJECTS
from tests.workers.kv_engine.oracle import generate, log_softmax, prompts
from workers import settings
from workers.data_plane.store import open_store
from workers.loading.model import LocalModel
from workers.process import Worker

E = TypeVar("E", bound=Event)
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
TOKENS = 24


def config(**kwargs: Any) -> DeploymentConfig:
    return msgspec.structs.replace(
        resolve(str(tiny_checkpoint("qwen3"))), model_kwargs={"device": "cpu", "max_sequences": 16} | kwargs
    )


@dataclass(slots=True)
class Life:
    server: MemoryStore
    log: MemoryLog
    model: LocalModel
    incarnation: int = 0

    async def event(self, kind: type[E], request_id: str, *, attempt: int = 1, step: int = 1) -> E:
        async with aclosing(self.log.read(SUBJECTS.all_of(request_id), 1)) as records:
            async for record in records:
                found = decode(record.data)
                assert isinstance(found, kind) or not isinstance(found, WalkFailed), found
                if isinstance(found, kind) and (found.attempt, found.index) == (attempt, step):
                    return found
        raise AssertionError

    def order(self, ready: NodeReady) -> None:
        ready = msgspec.structs.replace(ready, incarnation=self.incarnation)
        ready = msgspec.structs.replace(ready, placement={"prepare": RANK, "llm": RANK})
        self.server.append(SUBJECTS.ready(RANK, str(ready.request_id)), encode(ready))

    def answer(self, request_id: str, prompt: list[int], attempt: int = 1, **args: Any) -> NodeReady:
        """Order an answer."""
        args = {"max_tokens": TOKENS, "sampling": GREEDY, "stop": [], "ignore_eos": True} | args
        prefill = WalkCall(name="prefill", inputs={"token_ids": inline_ids("p", prompt)}, args=args)
        decode_ = WalkCall(name="decode", args=args)
        ready = harness.ready(request_id, prefill, decode_, step=1, attempt=attempt, seed=3)
        self.order(ready)
        return ready

    def chunks(self, request_id: str) -> list[OutputChunk]:
        events = [decode(record.data) for record in self.server.records]
        return [e for e in events if isinstance(e, OutputChunk) and e.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [id for chunk in self.chunks(request_id) for id in chunk.token_ids]

    def text(self, request_id: str) -> str:
        return "".join(chunk.text for chunk in self.chunks(request_id))


@asynccontextmanager
async def living(**kwargs: Any) -> AsyncIterator[Life]:
    server = MemoryStore(SUBJECTS)
    log, used = MemoryLog(server), config(**kwargs)
    store = open_store(total_bytes=1 << 20)
    model = LocalModel(used, settings.parse(used.model_kwargs), RANK, store.allocate)
    life = Life(server, log, model)
    task = asyncio.create_task(Worker(log, SUBJECTS, used, RANK, model, store).run())
    try:
        async with aclosing(log.read([SUBJECTS.worker(RANK)], 1)) as records:
            async for record in records:
                joined = decode(record.data)
                assert isinstance(joined, WorkerJoined)
                life.incarnation = record.seq
                assert joined.kv_tokens == 16 * 512
                break
        yield life
    finally:
        task.cancel()
        await asyncio.wait([task])
        await log.close()
        assert store.stats().puts == 0, "steps of one rank do not touch the store"
        await store.close()
        assert task.cancelled()


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint("qwen3") / "tokenizer.json"))


@pytest.mark.slow
async def test_messages_become_the_tokens_and_text_that_generate_gives() -> None:
    async with living() as life:
        inputs = Inputs(messages=[{"role": "user", "content": "What does len do?"}])
        args = msgspec.to_builtins({"inputs": inputs, "params": Params(max_tokens=TOKENS)})
        life.order(harness.ready("r", WalkCall(name="prepare", args=args)))
        prepared = (await life.event(WalkCompleted, "r", step=0)).results[0]
        prompt = read_ids(prepared.outputs["token_ids"])
        assert prepared.facts == {"prompt_tokens": len(prompt), "sampling": GREEDY}
        life.answer("r", prompt)
        done = await life.event(WalkCompleted, "r")

        expected = generate("qwen3", prompt, TOKENS)
        assert life.tokens("r") == expected
        assert life.text("r") == tokenizer().decode(expected)
        assert done.results[-1].facts == {"completion_tokens": TOKENS, "finish_reason": "length"}
        assert len(set(expected)) > 5  # or equality would say little


@pytest.mark.slow
async def test_many_at_once_each_get_what_they_get_alone() -> None:
    async with living(max_step_tokens=32) as life:
        asked = {f"r{n}": prompt for n, prompt in enumerate(prompts(24, seed=1))}
        for name, prompt in asked.items():
            life.answer(name, prompt)
        for name, prompt in asked.items():
            await life.event(WalkCompleted, name)
            assert life.tokens(name) == generate("qwen3", prompt, TOKENS)


PENALISED = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.7,
    "logit_bias": [[17, 2.0]],
    "bad_words": [[30], [17, 31]],
    "min_tokens": 12,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {"sampling": GREEDY},
        {"sampling": {"temperature": 1.0, "top_p": 0.9, "top_k": 50}},
        {"sampling": {"temperature": 1.0, "top_p": 0.9, "top_k": 50}, "choice": 3},
        {"sampling": GREEDY | PENALISED},
        {"sampling": {"temperature": 1.0, "top_p": 0.95, "top_k": 0, "min_p": 0.02} | PENALISED},
    ],
)
async def test_a_second_attempt_goes_on_exactly_behind_what_was_released(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.generation.output_chunks.COALESCE_S", 0.0)  # a chunk for every token
    [prompt] = prompts(1, seed=2)
    async with living() as life:
        life.answer("whole", prompt, **asked)
        whole = await life.event(WalkCompleted, "whole")
        released = life.chunks("whole")
        assert len(released) == TOKENS
        for kept in (0, 1, 2, 7, TOKENS - 1, TOKENS):
            name = f"r{kept}"
            for chunk in released[:kept]:
                copy = msgspec.structs.replace(chunk, request_id=name, id=f"{name}.out.1.{chunk.index}")
                harness.admit(life.server, name)
                life.server.append(SUBJECTS.output("g-1", name, "w0"), encode(copy))
            fence = harness.fence(name, 2)
            life.server.append(SUBJECTS.output("g-1", name, "conductor"), encode(fence))
            life.answer(name, prompt, attempt=2, **asked)
            done = await life.event(WalkCompleted, name, attempt=2)

            assert life.tokens(name) == life.tokens("whole")
            assert life.text(name) == life.text("whole")
            assert done.results[-1].facts == whole.results[-1].facts
            assert done.output == totals_of(life.chunks(name))


SENTENCE: Final = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3}},
    "required": ["words"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {"guide": {"json_schema": SENTENCE}, "sampling": {"temperature": 1.0, "top_p": 0.9, "top_k": 50}},
        {"guide": {"regex": "[a-z]{9}[0-9]{9}"}, "sampling": GREEDY},
        {"guide": {"choice": ["a rather long one", "another"]}, "exhausts_guide": True},
    ],
)
async def test_a_guided_answer_is_what_it_has_to_be_whoever_ends_it(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.generation.output_chunks.COALESCE_S", 0.0)  # a chunk for every token
    [prompt] = prompts(1, seed=2)
    asked = {"ignore_eos": False, "max_tokens": 90, **asked}
    async with living() as life:
        life.answer("whole", prompt, **asked)
        whole = await life.event(WalkCompleted, "whole")
        released = life.chunks("whole")
        assert whole.results[-1].facts["finish_reason"] == "stop"
        assert_guided(life.text("whole"), asked["guide"])
        for kept in (0, 1, 2, len(released) // 2, len(released) - 1, len(released)):
            name = f"r{kept}"
            for chunk in released[:kept]:
                copy = msgspec.structs.replace(chunk, request_id=name, id=f"{name}.out.1.{chunk.index}")
                harness.admit(life.server, name)
                life.server.append(SUBJECTS.output("g-1", name, "w0"), encode(copy))
            life.server.append(SUBJECTS.output("g-1", name, "conductor"), encode(harness.fence(name, 2)))
            life.answer(name, prompt, attempt=2, **asked)
            done = await life.event(WalkCompleted, name, attempt=2)

            assert life.tokens(name) == life.tokens("whole")
            assert life.text(name) == life.text("whole")
            assert done.results[-1].facts == whole.results[-1].facts


def assert_guided(text: str, guide: dict[str, Any]) -> None:
    match guide:
        case {"json_schema": schema}:
            jsonschema.validate(json.loads(text), schema)
        case {"regex": regex}:
            assert re.fullmatch(regex, text)
        case {"choice": texts}:
            assert text in texts
        case _:
            raise AssertionError(guide)


@pytest.mark.processes
async def test_a_guide_that_cannot_be_kept_fails_where_the_prompt_is_prepared() -> None:
    async with living() as life:
        for number, (guide, said) in enumerate(
            [({"json_schema": {"not": {}}}, "not"), ({"regex": "("}, "unclosed group")]
        ):
            args = {"inputs": {"text": "hi", "chat": False}, "params": {"guide": guide}}
            life.order(harness.ready(f"r{number}", WalkCall(name="prepare", args=args)))
            failed = await life.event(WalkFailed, f"r{number}", step=0)

            assert (failed.failure.code, failed.failure.status) == ("invalid_guide", 400)
            assert said in failed.failure.message


@pytest.mark.slow
async def test_a_guide_that_becomes_too_much_to_follow_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind twenty letters 144 ways to read the next one: more than is kept in mind."""
    monkeypatch.setattr(
        "workers.kv_engine.sampling.grammar_masks.MASK_S", 60.0
    )  # a busy machine is no reason
    names = [f"s{number}" for number in range(12)]
    pairs = " | ".join(f"{one} {other}" for one in names for other in names)
    rules = "\n".join(f'{name}: {pairs} | "a"' for name in names)
    too_much = {"grammar": f'start: "ab"{{10}} s0\n{rules}'}
    [prompt] = prompts(1, seed=2)
    async with living() as life:
        life.answer("stuck", prompt, guide=too_much, max_tokens=90, ignore_eos=False)
        life.answer("guided", prompt, guide={"regex": "(ab){60}"}, max_tokens=90, ignore_eos=False)
        life.answer("free", prompt, max_tokens=90)
        failed = await life.event(WalkFailed, "stuck")

        assert (failed.failure.code, failed.failure.status) == ("invalid_guide", 400)
        assert re.search(r"grammar: expected .*, found .* items .*; give it fewer", failed.failure.message)
        for name in ("guided", "free"):
            await life.event(WalkCompleted, name)
        assert re.fullmatch("(ab)+a?", life.text("guided"))
        assert life.tokens("free") == generate("qwen3", prompt, 90)


@pytest.mark.slow
async def test_the_least_length_counts_the_tokens_of_earlier_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token that would end the answer does not, before there are so many, whoever made them."""
    monkeypatch.setattr("workers.generation.output_chunks.COALESCE_S", 0.0)  # a chunk for every token
    least = 10
    [prompt] = prompts(1, seed=2)
    ends = [*{*generate("qwen3", prompt, TOKENS)[3:]}]
    asked: dict[str, Any] = {"sampling": GREEDY | {"min_tokens": least}, "stop_token_ids": ends}
    async with living() as life:
        life.answer("whole", prompt, **asked)
        whole = await life.event(WalkCompleted, "whole")
        assert not {*life.tokens("whole")[:least]} & {*ends}
        assert least < len(life.tokens("whole")) < TOKENS
        assert whole.results[-1].facts["finish_reason"] == "stop"
        for kept in (1, least - 1, least, len(life.tokens("whole"))):
            name = f"r{kept}"
            for chunk in life.chunks("whole")[:kept]:
                copy = msgspec.structs.replace(chunk, request_id=name, id=f"{name}.out.1.{chunk.index}")
                harness.admit(life.server, name)
                life.server.append(SUBJECTS.output("g-1", name, "w0"), encode(copy))
            life.server.append(SUBJECTS.output("g-1", name, "conductor"), encode(harness.fence(name, 2)))
            life.answer(name, prompt, attempt=2, **asked)
            done = await life.event(WalkCompleted, name, attempt=2)

            assert life.tokens(name) == life.tokens("whole")
            assert done.results[-1].facts == whole.results[-1].facts


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 1, 2, 9])
async def test_after_a_death_one_output_has_all_log_probabilities_of_prompt_and_answer(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.generation.output_chunks.COALESCE_S", 0.0)  # a chunk for every token
    [prompt] = prompts(1, seed=2, shortest=30)
    asked: dict[str, Any] = {"sampling": GREEDY, "logprobs": 4, "echo": "the prompt"}
    async with living(max_step_tokens=16) as life:
        life.answer("whole", prompt, **asked)
        await life.event(WalkCompleted, "whole")
        for chunk in life.chunks("whole")[:kept]:
            copy = msgspec.structs.replace(chunk, request_id="r", id=f"r.out.1.{chunk.index}")
            harness.admit(life.server, "r")
            life.server.append(SUBJECTS.output("g-1", "r", "w0"), encode(copy))
        life.server.append(SUBJECTS.output("g-1", "r", "conductor"), encode(harness.fence("r", 2)))
        life.answer("r", prompt, attempt=2, **asked)
        done = await life.event(WalkCompleted, "r", attempt=2)
        chunks = life.chunks("r")

    expected = generate("qwen3", prompt, TOKENS)
    assert chunks[0].text == "the prompt"
    assert chunks[0].metadata == {"echo": True, "token_ids": prompt}
    assert [id for chunk in chunks for id in chunk.token_ids] == expected
    assert done.output == totals_of(chunks)
    first, *told = [told for chunk in chunks for told in chunk.logprobs or []]
    assert (first.id, first.logprob, first.top) == (prompt[0], None, [])
    rows = log_softmax("qwen3", prompt + expected)
    for place, score in enumerate(told):
        token_id = (prompt + expected)[place + 1]
        assert score.id == token_id
        assert score.logprob == pytest.approx(float(rows[place][token_id]), abs=1e-4)
        assert [likely.id for likely in score.top] == rows[place].topk(4).indices.tolist()
        assert len(score.token) > 0
    assert len(told) == len(prompt) - 1 + TOKENS


@pytest.mark.slow
async def test_the_same_choice_gives_the_same_answer_and_another_an_independent_one() -> None:
    async with living() as life:
        [prompt] = prompts(1, seed=6)
        hot = {"temperature": 1.3, "top_p": 1.0, "top_k": 0}
        for choice in (0, 1, 2):
            for copy in "ab":
                life.answer(f"{choice}{copy}", prompt, sampling=hot, choice=choice)
        life.answer("default", prompt, sampling=hot)
        names = ["0a", "0b", "1a", "1b", "2a", "2b", "default"]
        for name in names:
            await life.event(WalkCompleted, name)
        answers = {name: life.tokens(name) for name in names}

    assert answers["0a"] == answers["0b"] == answers["default"]
    assert answers["1a"] == answers["1b"]
    assert answers["2a"] == answers["2b"]
    pairs = [("0a", "1a"), ("0a", "2a"), ("1a", "2a")]
    for one, other in pairs:
        same = sum(a == b for a, b in zip(answers[one], answers[other], strict=True))
        assert same < TOKENS / 2


async def test_a_prompt_is_scored_without_an_answer() -> None:
    async with living() as life:
        [prompt] = prompts(1, seed=7, shortest=20)
        args = {"echo": "text", "logprobs": 0, "max_tokens": 0}
        call = WalkCall(name="score", inputs={"token_ids": inline_ids("p", prompt)}, args=args)
        life.order(harness.ready("r", call, step=1))
        done = await life.event(WalkCompleted, "r")
        [chunk] = life.chunks("r")

    rows = log_softmax("qwen3", prompt)
    assert done.results[0].facts == {"completion_tokens": 0, "finish_reason": "length"}
    assert chunk.logprobs is not None
    found = [told.logprob for told in chunk.logprobs]
    assert found[0] is None
    assert found[1:] == pytest.approx([float(rows[n][id]) for n, id in enumerate(prompt[1:])], abs=1e-4)


def totals_of(chunks: list[OutputChunk]) -> OutputTotals:
    transcript = Transcript()
    for chunk in chunks:
        transcript.fold(chunk)
    return transcript.totals


async def test_a_stop_frees_the_row_within_two_steps() -> None:
    async with living() as life:
        [prompt] = prompts(1, seed=3)
        order = life.answer("r", prompt, max_tokens=400)
        async with aclosing(life.log.read([SUBJECTS.outputs_of("r")], 1)) as records:
            async for _ in records:
                break
        stop = msgspec.structs.replace(harness.stop(order).order, incarnation=life.incarnation)
        life.server.append(SUBJECTS.ready(RANK, "r"), encode(stop))
        stopped = await life.event(WalkStopped, "r")

        assert stopped.steps_after <= 2
        assert 1 <= stopped.tokens < 400
        counters = life.model.counters()
        assert counters is not None
        assert (counters.running, counters.waiting, counters.kv_used) == (0, 0, 0)


@pytest.mark.slow
async def test_a_stop_string_ends_an_answer_where_generate_would_have_gone_on() -> None:
    async with living() as life:
        [prompt] = prompts(1, seed=4)
        whole = tokenizer().decode(generate("qwen3", prompt, TOKENS))
        stop = whole[len(whole) // 2 :][:3]
        life.answer("r", prompt, stop=[stop])
        done = await life.event(WalkCompleted, "r")

        assert life.text("r") == whole[: whole.find(stop)]
        assert done.results[-1].facts["finish_reason"] == "stop"
        assert done.results[-1].facts["completion_tokens"] == len(life.tokens("r")) < TOKENS


@pytest.mark.slow
async def test_bad_words_and_stop_tokens_come_from_the_request_to_the_engine() -> None:
    """Prepared by the real tokenizer: a word of the plain answer is nowhere in the other one."""
    async with living() as life:
        inputs = Inputs(messages=[{"role": "user", "content": "What does len do?"}])

        async def facts(name: str, **params: Any) -> tuple[list[int], dict[str, Any]]:
            args = msgspec.to_builtins({"inputs": inputs, "params": Params(**params)})
            life.order(harness.ready(name, WalkCall(name="prepare", args=args)))
            prepared = (await life.event(WalkCompleted, name, step=0)).results[0]
            return read_ids(prepared.outputs["token_ids"]), prepared.facts["sampling"]

        prompt, _ = await facts("plain")
        plain = generate("qwen3", prompt, TOKENS)
        word = tokenizer().decode(plain[2:4])
        _, sampling = await facts("asked", bad_words=[word], min_tokens=6)
        life.answer("asked", prompt, sampling=sampling, stop_token_ids=plain[:5])
        done = await life.event(WalkCompleted, "asked")

        assert word not in life.text("asked")
        found = life.tokens("asked")
        assert not set(plain[:5]) & set(found[:6])  # held back until there are six
        if done.results[-1].facts["finish_reason"] == "stop":
            assert found[-1] in plain[:5]


async def test_an_answer_too_long_for_the_model_is_a_typed_failure() -> None:
    async with living() as life:
        life.answer("r", [1, 2, 3], max_tokens=600)
        failed = await life.event(WalkFailed, "r")

        assert (failed.failure.code, failed.failure.status) == ("context_length_exceeded", 400)


async def test_a_context_longer_than_the_models_is_refused_at_load() -> None:
    log = MemoryLog(MemoryStore(SUBJECTS))
    long = msgspec.structs.replace(config(), max_seq_len=100_000)
    model = LocalModel(long, settings.EngineSettings(device="cpu"), RANK)
    store = open_store(total_bytes=1 << 20)

    with pytest.raises(ExceptionGroup) as caught:
        await Worker(log, SUBJECTS, long, RANK, model, store).run()
    assert caught.group_contains(ConfigError, match="made for 512 tokens")
    await store.close()
    await log.close()


async def test_progress_reaches_its_end() -> None:
    async with living() as life:
        assert life.model.progress == 1.0
