import asyncio
import re
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from models.base import CpuResult, EngineKind, ModelGraph
from models.media.kinds import MediaError
from models.options import InvalidOptionError
from shared.errors import CapacityError, WorkerError
from shared.events import (
    EpochOpened,
    Failure,
    Media,
    NodeReady,
    NodeWork,
    OutputChunk,
    OutputTotals,
    Preemption,
    TokenLogprobs,
    WalkCall,
    WalkCompleted,
    WalkFailed,
    WalkProgressed,
    WalkStopped,
    encode,
)
from shared.log.memory import MemoryStore
from shared.tensors import Handle, inline_ids, read_ids
from shared.transcript import Transcript
from shared.walks import CLIENT, Edge, Loop, Node, Parallel, Sequential, compile_walk
from tests.workers import harness
from tests.workers.cluster import until
from tests.workers.harness import EOS, LIFE, SUBJECTS, chat, ready, rigged, told_of, turns
from workers.execution import executor
from workers.execution.walk_execution import WalkExecution
from workers.generation.output_chunks import HELD_CHUNKS
from workers.generation.prompt_echo import token_logprobs
from workers.kv_engine.sequence_spec import Sampling
from workers.orders.inbox import RequestEnded


def bytes_of(words: str) -> list[int]:
    return list(words.encode())


def totals_of(chunks: list[OutputChunk]) -> OutputTotals:
    transcript = Transcript()
    for chunk in chunks:
        transcript.fold(chunk)
    return transcript.totals


# ---- rows of the engine --------------------------------------------------------------------------


async def test_a_chain_is_one_sequence_its_tokens_are_chunks_and_its_end_one_result() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [*bytes_of("Hello, wörld"), EOS]
        rig.start(ready("r", *chat([5, 6]), step=1, seed=11))
        await rig.engine.has()
        rig.engine.run_out()
        done = await rig.event(WalkCompleted)

        [spec] = rig.engine.submitted
        assert (spec.prompt_ids, spec.max_tokens, spec.sampling.seed) == ([5, 6], 100, 11)
        assert [result.name for result in done.results] == ["prefill", "decode"]
        assert done.results[1].facts == {"completion_tokens": 14, "finish_reason": "stop", "stop_reason": EOS}
        # Although the engine had run to the end before the order was told of its first token.
        assert read_ids(done.results[0].outputs["token"]) == bytes_of("H")
        assert set(done.durations_s) == {"prefill", "decode"}
        chunks = rig.events(OutputChunk)
        assert "".join(chunk.text for chunk in chunks) == "Hello, wörld"
        assert [id for chunk in chunks for id in chunk.token_ids] == rig.engine.says["r"]
        assert done.output == totals_of(chunks)
        assert not rig.engine.cancelled


async def test_every_event_is_signed_numbered_and_says_what_it_answers() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [*bytes_of("Hi"), EOS]
        rig.start(ready("r", *chat(), step=1))
        await rig.engine.has()
        rig.engine.run_out()
        await rig.event(WalkCompleted)

        events = rig.all()
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        for event in events:
            assert (event.writer, event.incarnation, event.epoch) == ("w0", LIFE, 1)
            assert (event.request_id, event.attempt, event.trace) == ("r", 1, "00-trace")
        assert len({event.id for event in events}) == len(events)
        assert [chunk.index for chunk in rig.events(OutputChunk)] == list(range(len(events) - 1))
        assert events[-1].index == 1


async def test_the_first_text_goes_out_at_once() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = bytes_of("é says more")
        rig.start(ready("r", *chat()))
        await rig.engine.has()
        rig.engine.step()
        await turns()
        assert not rig.events(OutputChunk)  # half of a character is no text
        rig.engine.step()
        await turns()
        assert rig.released() == "é"


async def test_later_text_is_coalesced_and_goes_out_by_itself() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = bytes_of("abcdefgh")
        rig.start(ready("r", *chat()))
        await rig.engine.has()
        for _ in range(5):
            rig.engine.step()
        await turns()
        assert rig.released() == "a"
        async for record in rig.log.read([SUBJECTS.outputs_of("r")], 2):
            assert record.seq == 2
            break
        assert [chunk.text for chunk in rig.events(OutputChunk)] == ["a", "bcde"]


async def test_a_stop_string_ends_the_answer_before_the_engine_knows() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = bytes_of("one. two. three")
        rig.start(ready("r", *chat(stop=[". t", "zzz"])))
        await rig.engine.has()
        for _ in range(6):
            rig.engine.step()
        [key] = rig.engine.cancelled
        assert key.startswith("r.1.0")
        done = await rig.event(WalkCompleted)

        assert done.results[-1].facts == {
            "completion_tokens": 6,
            "finish_reason": "stop",
            "stop_reason": ". t",
        }
        assert rig.released() == "one"


async def test_the_length_ends_the_answer_and_what_was_held_back_is_shown() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = bytes_of("ab. tcd")
        rig.start(ready("r", *chat(max_tokens=5, stop=[". to"])))
        await rig.engine.has()
        rig.engine.run_out()
        done = await rig.event(WalkCompleted)

        assert done.results[-1].facts == {"completion_tokens": 5, "finish_reason": "length"}
        assert rig.released() == "ab. t"


async def test_one_token_is_an_answer_too() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = bytes_of("ab")
        rig.start(ready("r", *chat(max_tokens=1)))
        await rig.engine.has()
        rig.engine.run_out()
        done = await rig.event(WalkCompleted)

        assert [result.name for result in done.results] == ["prefill", "decode"]
        assert done.results[-1].facts == {"completion_tokens": 1, "finish_reason": "length"}


async def test_the_models_end_may_be_ignored() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [65, EOS, 66]
        rig.start(ready("r", *chat(max_tokens=3, ignore_eos=True)))
        await rig.engine.has()
        rig.engine.run_out()
        done = await rig.event(WalkCompleted)

        assert done.results[-1].facts == {"completion_tokens": 3, "finish_reason": "length"}


async def test_a_row_without_a_loop_is_one_token_and_a_secret_stays_one() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [65, 66]
        call = WalkCall(name="secret", inputs={"token_ids": inline_ids("p", [1])})
        rig.start(ready("r", call))
        await rig.engine.has()
        rig.engine.run_out()
        done = await rig.event(WalkCompleted)

        [result] = done.results
        assert read_ids(result.outputs["token"]) == [65]
        assert result.facts == {"completion_tokens": 1, "finish_reason": "length"}
        assert not rig.events(OutputChunk)


async def test_requests_run_side_by_side() -> None:
    async with rigged() as rig:
        names = [f"r{number}" for number in range(20)]
        for number, name in enumerate(names):
            rig.engine.says[name] = [*bytes_of(name * (number + 1)), EOS]
            rig.start(ready(name, *chat()))
        await rig.engine.has(20)
        rig.engine.run_out()
        for number, name in enumerate(names):
            await rig.event(WalkCompleted, name)
            assert rig.released(name) == name * (number + 1)
        assert rig.executor.running == 0


# ---- stops ---------------------------------------------------------------------------------------


async def test_a_stop_takes_the_row_out_and_says_how_many_steps_still_held_it() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = bytes_of("abcdef")
        order = ready("r", *chat())
        rig.start(order)
        await rig.engine.has()
        rig.engine.step()
        rig.executor.stop(harness.stop(order))
        stopped = await rig.event(WalkStopped)

        assert (stopped.steps_after, stopped.tokens, stopped.index) == (1, 1, 0)
        assert rig.engine.cancelled == ["r.1.0.llm"]
        await turns()
        assert not rig.events(WalkCompleted)
        assert not rig.events(WalkFailed)
        assert rig.executor.running == 0


async def test_a_stop_behind_the_end_says_nothing() -> None:
    async with rigged() as rig:
        order = ready("r", WalkCall(name="greet", inputs={"name": harness.text("you")}))
        rig.start(order)
        await rig.event(WalkCompleted)
        rig.executor.stop(harness.stop(order))
        await turns()

        assert not rig.events(WalkStopped)


async def test_an_order_that_is_dropped_as_a_node_is_to_fire_leaves_no_work_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = WalkExecution._start

    async with rigged() as rig:
        dropped = asyncio.Event()

        def drop(*args: Any) -> None:
            if rig.processing.calls:
                rig.executor.end_request(RequestEnded("r"))
                dropped.set()
            begin(*args)

        monkeypatch.setattr(WalkExecution, "_start", drop)
        rig.start(
            ready("r", WalkCall(name="count", inputs={"sum": inline_ids("s", [0])}, args={"rounds": 2}))
        )
        await dropped.wait()
        await turns()

        assert len(rig.processing.calls) == 1


async def test_an_order_that_never_started_is_reported_as_stopped() -> None:
    async with rigged() as rig:
        rig.executor.stop(harness.stop(ready("r", *chat()), started=False))
        stopped = await rig.event(WalkStopped)

        assert (stopped.steps_after, stopped.tokens) == (0, 0)


async def test_a_higher_attempt_drops_the_lower_one_without_a_word() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [*bytes_of("abc"), EOS]
        rig.start(ready("r", *chat()))
        await rig.engine.has()
        rig.put_fence(harness.fence("r", 2))
        rig.start(ready("r", *chat(), attempt=2))
        await rig.engine.until(lambda engine: list(engine.specs) == ["r.2.0.llm"])
        rig.engine.run_out()
        await rig.event(WalkCompleted, attempt=2)

        assert {event.attempt for event in rig.events(WalkCompleted)} == {2}
        assert not rig.events(WalkFailed)
        assert not rig.events(WalkStopped)


async def test_an_order_whose_request_ends_in_the_same_breath_says_nothing() -> None:
    async with rigged() as rig:
        rig.start(ready("r", *chat()))
        rig.executor.end_request(RequestEnded("r"))
        await turns()

        assert rig.executor.running == 0
        assert not rig.engine.submitted
        assert not rig.server.records


@pytest.mark.parametrize("turns_before_end", [0, 1])
async def test_an_order_that_is_stopped_and_whose_request_ends_in_the_same_breath_does_not_fail(
    turns_before_end: int,
) -> None:
    async with rigged() as rig:
        order = ready("r", *chat())
        rig.start(order)
        rig.executor.stop(harness.stop(order))
        await turns(turns_before_end)
        rig.executor.end_request(RequestEnded("r"))
        stopped = await rig.event(WalkStopped)
        await turns()

        assert (stopped.steps_after, stopped.tokens) == (0, 0)
        assert not rig.events(WalkFailed)
        assert not rig.engine.submitted
        assert rig.executor.running == 0


async def test_a_second_start_of_the_same_order_changes_nothing() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [65, EOS]
        rig.start(ready("r", *chat()))
        rig.start(ready("r", *chat()))
        await rig.engine.has()
        await turns()
        rig.engine.run_out()
        await rig.event(WalkCompleted)

        assert len(rig.engine.submitted) == 1


# ---- attempts ------------------------------------------------------------------------------------


def put_chunks(
    server: MemoryStore,
    *pieces: tuple[str, bytes],
    attempt: int = 1,
    first: int = 0,
    text: int = 0,
    tokens: int = 0,
) -> None:
    """Store the chunks of an earlier attempt, after the given `text` and `tokens` of earlier steps."""
    harness.admit(server)
    for place, (words, raw) in enumerate(pieces):
        chunk = OutputChunk(
            id=f"r.out.{attempt}.{first + place}",
            writer="w0",
            request_id="r",
            attempt=attempt,
            index=first + place,
            text=words,
            text_offset=text,
            token_ids=list(raw),
            token_offset=tokens,
        )
        text, tokens = text + len(words), tokens + len(raw)
        server.append(SUBJECTS.output("g-1", "r", "w0"), encode(chunk))


SHARP_S = "ß".encode()
GREETING = "Grüße, world"


async def test_a_later_attempt_goes_on_behind_the_chunks_that_count() -> None:
    async with rigged() as rig:
        put_chunks(rig.server, ("G", b"G"), ("rü", "rü".encode()), ("", SHARP_S[:1]))
        rig.put_fence(harness.fence("r", 2))
        put_chunks(rig.server, ("?", b"?"), first=3)  # behind the fence: void
        rig.engine.says["r"] = [*bytes_of(GREETING), EOS]
        rig.start(ready("r", *chat([5, 6]), attempt=2, step=1))
        await rig.engine.has()
        [spec] = rig.engine.submitted
        assert spec.prompt_ids == [5, 6]
        assert spec.finished is None
        rig.engine.run_out()
        done = await rig.event(WalkCompleted, attempt=2)

        chunks = [chunk for chunk in rig.events(OutputChunk) if chunk.text != "?"]
        assert "".join(chunk.text for chunk in chunks) == GREETING
        assert [id for chunk in chunks for id in chunk.token_ids] == rig.engine.says["r"]
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert (chunks[3].attempt, chunks[3].text_offset, chunks[3].token_offset) == (2, 3, 5)
        assert done.results[-1].facts == {
            "completion_tokens": 15,
            "finish_reason": "stop",
            "stop_reason": EOS,
        }
        assert done.output == totals_of(chunks)


async def test_a_later_attempt_waits_for_its_fence() -> None:
    async with rigged() as rig:
        put_chunks(rig.server, ("G", b"G"))
        rig.put_fence(harness.fence("r", 2))
        rig.engine.says["r"] = [*bytes_of(GREETING), EOS]
        rig.start(ready("r", *chat(), attempt=3))
        await turns()
        assert not rig.engine.submitted
        put_chunks(rig.server, ("r", b"r"), attempt=2, first=1)
        rig.put_fence(harness.fence("r", 3))
        await rig.engine.has()
        rig.engine.run_out()
        done = await rig.event(WalkCompleted, attempt=3)

        assert rig.released() == GREETING
        assert done.output == totals_of(rig.events(OutputChunk))


async def test_a_fence_of_a_deposed_conductor_is_none() -> None:
    async with rigged() as rig:
        opened = EpochOpened(id="e", writer="conductor", epoch=2, conductor="c", core="")
        rig.server.append(SUBJECTS.epoch, encode(opened))
        rig.put_fence(harness.fence("r", 2, epoch=1))
        rig.start(ready("r", *chat(), attempt=2))
        await turns()
        assert not rig.engine.submitted
        rig.put_fence(harness.fence("r", 2, epoch=2))
        await rig.engine.has()


@pytest.mark.parametrize(
    ("pieces", "facts"),
    [
        (
            [("ab", b"ab"), ("", bytes([EOS]))],
            {"completion_tokens": 3, "finish_reason": "stop", "stop_reason": EOS},
        ),
        ([("abcde", b"abcde")], {"completion_tokens": 5, "finish_reason": "length"}),
        (
            [("ab", b"ab."), ("", b"t")],
            {"completion_tokens": 4, "finish_reason": "stop", "stop_reason": ".t"},
        ),
    ],
)
async def test_nothing_is_computed_when_the_answer_had_ended(
    pieces: list[tuple[str, bytes]], facts: dict[str, object]
) -> None:
    async with rigged() as rig:
        put_chunks(rig.server, *pieces)
        rig.put_fence(harness.fence("r", 2))
        rig.start(ready("r", *chat(max_tokens=5, stop=[".t"]), attempt=2))
        done = await rig.event(WalkCompleted, attempt=2)

        assert read_ids(done.results[0].outputs["token"]) == bytes_of("a")
        assert done.results[-1].facts == facts
        assert done.output == totals_of(rig.events(OutputChunk))
        assert not rig.engine.submitted


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([("abX", b"abc")], "difference from character 2"),
        ([("ab", b"abc")], "difference from character 2"),
        ([("abcde", b"abcde"), ("f", b"f")], r"ends \(length\) after 5 of them"),
    ],
)
async def test_text_that_was_released_is_never_contradicted(
    pieces: list[tuple[str, bytes]], message: str
) -> None:
    async with rigged() as rig:
        put_chunks(rig.server, *pieces)
        rig.put_fence(harness.fence("r", 2))
        rig.start(ready("r", *chat(max_tokens=5), attempt=2))
        failed = await rig.event(WalkFailed, attempt=2)

        assert failed.failure.code == "divergence"
        assert re.search(message, failed.failure.message)


async def test_a_later_step_goes_on_behind_the_output_of_earlier_ones() -> None:
    for remembered in (True, False):
        async with rigged() as rig:
            harness.admit(rig.server)
            rig.engine.says["r"] = [*bytes_of("one"), EOS]
            rig.start(ready("r", *chat(), step=0))
            await rig.engine.has()
            rig.engine.run_out()
            first = await rig.event(WalkCompleted)
            if not remembered:  # as on another rank, or in another life
                rig.executor._track_states.forget("r")
            rig.start(ready("r", WalkCall(name="greet", inputs={"name": harness.text("you")}), step=1))
            await turns()
            chunks = await until_chunk(rig, first.output.chunks)
            assert (chunks[-1].text, chunks[-1].text_offset, chunks[-1].token_offset) == ("hello you", 3, 4)


async def until_chunk(rig: harness.Rig, index: int) -> list[OutputChunk]:
    async with aclosing(rig.log.read([SUBJECTS.outputs_of("r")], 1)) as records:
        async for _ in records:
            if len(rig.events(OutputChunk)) > index:
                break
    return rig.events(OutputChunk)


async def test_a_later_attempt_of_a_later_step_takes_only_its_own_tokens_as_prefix() -> None:
    async with rigged() as rig:
        harness.admit(rig.server)
        rig.engine.says["r"] = [*bytes_of("one"), EOS]
        rig.start(ready("r", *chat(), step=0))
        await rig.engine.has()
        rig.engine.run_out()
        before = (await rig.event(WalkCompleted)).output.chunks
        put_chunks(rig.server, ("tw", b"tw"), first=before)
        rig.put_fence(harness.fence("r", 2))
        rig.engine.says["r"] = [*bytes_of("two"), EOS]
        rig.start(ready("r", *chat(), step=1, attempt=2))
        await rig.engine.has()
        assert rig.engine.submitted[-1].prefix_ids == list(b"tw")
        rig.engine.run_out()
        done = await rig.event(WalkCompleted, attempt=2)

        assert rig.released() == "onetwo"
        assert done.results[-1].facts["completion_tokens"] == 4


@pytest.mark.parametrize("parts", [["on"], ["one"], ["one", "tw"], ["one", "two"]])
async def test_steps_that_speak_in_turn_each_go_on_where_they_were_when_all_begin_again(
    parts: list[str],
) -> None:
    words = ["one", "two"]
    async with rigged() as rig:
        text = ""
        for step, part in enumerate(parts):
            order = ready("r", *chat(), step=step)
            rig.put_order(order)
            raw = bytes([*bytes_of(part), *[EOS] * (part == words[step])])
            put_chunks(rig.server, (part, raw), first=step, text=len(text), tokens=4 * step)
            text += part
            if part == words[step]:
                output = totals_of(rig.events(OutputChunk))
                rig.put_done(order, WalkCompleted(rank=0, results=[], output=output))
        rig.put_fence(harness.fence("r", 2))
        for step, word in enumerate(words):
            rig.engine.says["r"] = [*bytes_of(word), EOS]
            rig.order(ready("r", *chat(), step=step, attempt=2))
            if word not in parts:
                await rig.engine.has()
                assert bytes(rig.engine.submitted[-1].prefix_ids) == "".join(parts[step:]).encode()
                rig.engine.run_out()
            done = await rig.event(WalkCompleted, attempt=2, index=step)
            assert done.results[-1].facts == {
                "completion_tokens": 4,
                "finish_reason": "stop",
                "stop_reason": EOS,
            }

        assert rig.released() == "onetwo"
        chunks = rig.events(OutputChunk)
        assert [chunk.index for chunk in chunks] == [*range(len(chunks))]
        assert [chunk.text_offset for chunk in chunks] == [
            sum(len(before.text) for before in chunks[:place]) for place in range(len(chunks))
        ]
        assert done.output == totals_of(chunks)


# ---- choices, log probabilities, echoes ------------------------------------------------------------


def score_alone(prompt: list[int], **args: Any) -> WalkCall:
    """A walk that echoes a prompt and generates nothing."""
    return WalkCall(name="score", inputs={"token_ids": inline_ids("p", prompt)}, args=args)


def as_attempt(chunk: OutputChunk, server: MemoryStore) -> None:
    harness.admit(server)
    server.append(SUBJECTS.output("g-1", "r", "w0"), encode(chunk))


async def test_a_choice_keys_the_draws_and_is_on_every_chunk() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [*bytes_of("Hi"), EOS]
        rig.start(ready("r", *chat(choice=2, echo="?"), seed=5))
        await rig.engine.has()
        rig.engine.run_out()
        await rig.event(WalkCompleted)

        [spec] = rig.engine.submitted
        assert (spec.sampling.seed, spec.sampling.sample_index) == (5, 2)
        assert {chunk.choice for chunk in rig.events(OutputChunk)} == {2}


async def test_how_to_choose_tokens_is_told_to_the_engine_and_a_stop_token_ends_the_answer() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [*bytes_of("Hi!?"), EOS]
        sampling: dict[str, Any] = {
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "logit_bias": [[65, -1.5]],
            "bad_words": [[1, 2]],
            "allowed_token_ids": [33, 72, 105],
            "min_tokens": 2,
        }
        rig.start(ready("r", *chat(sampling=sampling, stop_token_ids=[33], ignore_eos=True), seed=5))
        await rig.engine.has()
        rig.engine.run_out()
        done = await rig.event(WalkCompleted)

        [spec] = rig.engine.submitted
        assert spec.sampling == Sampling(**sampling | {"logit_bias": [(65, -1.5)]}, seed=5)
        assert spec.stop_token_ids == spec.end_ids == frozenset([33])
        assert rig.released() == "Hi"
        assert done.results[-1].facts == {"completion_tokens": 3, "finish_reason": "stop", "stop_reason": 33}


async def test_log_probabilities_come_with_their_tokens_the_end_of_the_answer_included() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [*bytes_of("wörld"), EOS]
        rig.start(ready("r", *chat(logprobs=2)))
        await rig.engine.has()
        rig.engine.run_out()
        await rig.event(WalkCompleted)

        found = [told for chunk in rig.events(OutputChunk) for told in chunk.logprobs or []]
        assert found == [
            token_logprobs(told_of(token, 2), lambda id: bytes([id])) for token in rig.engine.says["r"]
        ]
        assert b"".join(told.token for told in found) == "wörld".encode() + bytes([EOS])
        for chunk in rig.events(OutputChunk):
            assert [told.id for told in chunk.logprobs or []] == chunk.token_ids


async def test_text_that_a_stop_string_cuts_off_leaves_tokens_and_log_probabilities_alike() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = bytes_of("one. two")
        rig.start(ready("r", *chat(stop=[". t"], logprobs=0)))
        await rig.engine.has()
        for _ in range(6):
            rig.engine.step()
        await rig.event(WalkCompleted)

        chunks = rig.events(OutputChunk)
        assert rig.released() == "one"
        assert [told.id for chunk in chunks for told in chunk.logprobs or []] == bytes_of("one. t")


async def test_an_echo_is_the_first_chunk_and_does_not_wait_for_the_engine() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [*bytes_of("Hi"), EOS]
        rig.start(ready("r", *chat([5, 6], echo="ä?")))
        await rig.engine.has()
        await turns()
        [first] = rig.events(OutputChunk)
        assert (first.index, first.text, first.text_offset, first.token_ids) == (0, "ä?", 0, [])
        assert first.metadata == {"echo": True, "token_ids": [5, 6]}
        assert first.logprobs is None
        rig.engine.run_out()
        done = await rig.event(WalkCompleted)

        assert not rig.engine.submitted[0].scores_prompt
        assert rig.events(OutputChunk)[1].text_offset == 2
        assert rig.events(OutputChunk)[1].token_offset == 0
        assert rig.released() == "ä?Hi"
        assert done.results[-1].facts == {"completion_tokens": 3, "finish_reason": "stop", "stop_reason": EOS}
        assert done.output == totals_of(rig.events(OutputChunk))


async def test_an_echo_of_ids_is_not_scored() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [*bytes_of("Hi"), EOS]
        rig.start(ready("r", *chat([5, 6], echo="", echoes_ids=True, logprobs=1)))
        await rig.engine.has()
        await turns()
        [first] = rig.events(OutputChunk)
        assert (first.text, first.token_ids, first.logprobs) == ("", [], None)
        assert first.metadata == {"echo": True, "token_ids": [5, 6]}
        rig.engine.run_out()
        await rig.event(WalkCompleted)

        assert not rig.engine.submitted[0].scores_prompt
        told = [one.id for chunk in rig.events(OutputChunk)[1:] for one in chunk.logprobs or []]
        assert told == [*bytes_of("Hi"), EOS]
        assert rig.released() == "Hi"


async def test_an_echo_with_log_probabilities_waits_until_its_tokens_are_scored() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [*bytes_of("Hi"), EOS]
        rig.engine.scores_per_step = 2
        rig.start(ready("r", *chat([5, 6, 7, 8], echo="?", logprobs=1)))
        await rig.engine.has()
        rig.engine.step()
        await turns()
        assert not rig.events(OutputChunk)
        rig.engine.step()
        await turns()
        [first] = rig.events(OutputChunk)
        assert (first.text, first.metadata) == ("?", {"echo": True, "token_ids": [5, 6, 7, 8]})
        assert first.logprobs is not None
        assert first.logprobs[0] == TokenLogprobs(id=5, token=b"\x05")
        assert [told.logprob for told in first.logprobs[1:]] == [-0.75, -0.875, -1.0]
        assert [len(told.top) for told in first.logprobs] == [0, 1, 1, 1]
        rig.engine.run_out()
        await rig.event(WalkCompleted)

        assert rig.released() == "?Hi"


@pytest.mark.parametrize(
    ("prompt", "args"), [([5, 6], {}), ([5], {"logprobs": 3}), ([5, 6, 7], {"logprobs": 3})]
)
async def test_a_prompt_may_be_echoed_without_an_answer(prompt: list[int], args: dict[str, int]) -> None:
    async with rigged() as rig:
        rig.start(ready("r", score_alone(prompt, echo="?", **args)))
        if len(prompt) > 1 and args:
            await rig.engine.has()
            rig.engine.run_out()
        done = await rig.event(WalkCompleted)

        [result] = done.results
        assert result.facts == {"completion_tokens": 0, "finish_reason": "length"}
        assert not result.outputs
        [chunk] = rig.events(OutputChunk)
        assert (chunk.text, chunk.metadata["token_ids"]) == ("?", prompt)
        assert (chunk.logprobs is not None) is bool(args)
        assert len(rig.engine.submitted) == int(len(prompt) > 1 and bool(args))
        assert rig.executor.running == 0


@pytest.mark.parametrize("released", [0, 1, 2, 3])
async def test_a_later_attempt_goes_on_behind_its_echo_and_does_not_score_it_again(
    released: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An echo of three pieces: the released piece keeps the log probabilities it was released with."""
    monkeypatch.setattr(
        "workers.generation.output_chunks.MAX_CHUNK_LOGPROBS", 4
    )  # two tokens with one likeliest each
    prompt, order = [5, 6, 7, 8, 9, 10], chat([5, 6, 7, 8, 9, 10], echo="abcdef", logprobs=1)
    async with rigged() as rig:
        rig.engine.says["r"] = [*bytes_of("Hi"), EOS]
        rig.start(ready("r", *order))
        await rig.engine.has()
        rig.engine.run_out()
        await rig.event(WalkCompleted)
        whole = rig.events(OutputChunk)
    assert [chunk.text for chunk in whole[:3]] == ["ab", "cd", "ef"]

    async with rigged() as rig:
        for chunk in whole[:released]:
            rounded = [msgspec.structs.replace(told, logprob=-9.0) for told in chunk.logprobs or []]
            as_attempt(msgspec.structs.replace(chunk, logprobs=rounded), rig.server)
        rig.put_fence(harness.fence("r", 2))
        rig.engine.says["r"] = [*bytes_of("Hi"), EOS]
        rig.start(ready("r", *order, attempt=2))
        await rig.engine.has()
        assert rig.engine.submitted[0].scores_prompt is (released < 3)
        rig.engine.run_out()
        done = await rig.event(WalkCompleted, attempt=2)

        chunks = rig.events(OutputChunk)
        assert rig.released() == "abcdefHi"
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert [id for chunk in chunks for id in chunk.metadata.get("token_ids", [])] == prompt
        kept = [told.logprob for chunk in chunks[:released] for told in chunk.logprobs or []]
        assert kept == [-9.0] * 2 * released
        behind = [told for chunk in chunks[released:] for told in chunk.logprobs or []]
        assert behind == [told for chunk in whole[released:] for told in chunk.logprobs or []]
        assert done.output == totals_of(chunks)


async def test_released_tokens_keep_their_log_probabilities_and_new_ones_follow() -> None:
    async with rigged() as rig:
        first = OutputChunk(
            id="r.out.1.0",
            writer="w0",
            request_id="r",
            attempt=1,
            text="G",
            token_ids=list(b"G"),
            logprobs=[TokenLogprobs(id=71, token=b"G", logprob=-9.0)],
        )
        as_attempt(first, rig.server)
        rig.put_fence(harness.fence("r", 2))
        rig.engine.says["r"] = [*bytes_of("Go"), EOS]
        rig.start(ready("r", *chat(logprobs=0), attempt=2))
        await rig.engine.has()
        rig.engine.run_out()
        await rig.event(WalkCompleted, attempt=2)

        found = [told for chunk in rig.events(OutputChunk) for told in chunk.logprobs or []]
        assert [(told.id, told.logprob) for told in found] == [(71, -9.0), (111, -13.875), (EOS, 0.0)]


async def test_nothing_is_computed_when_the_echo_alone_was_asked_for_and_is_out() -> None:
    async with rigged() as rig:
        order = score_alone([5, 6], echo="?", logprobs=0)
        rig.start(ready("r", order))
        await rig.engine.has()
        rig.engine.run_out()
        await rig.event(WalkCompleted)
        [chunk] = rig.events(OutputChunk)
    async with rigged() as rig:
        as_attempt(chunk, rig.server)
        rig.put_fence(harness.fence("r", 2))
        rig.start(ready("r", order, attempt=2))
        done = await rig.event(WalkCompleted, attempt=2)

        assert done.output == totals_of([chunk])
        assert not rig.engine.submitted


async def test_an_echo_that_comes_out_otherwise_is_a_divergence() -> None:
    for echo, released in (("goodbye", b""), ("goodbye", b"G")):
        async with rigged() as rig:
            put_chunks(rig.server, ("hello", b""), *[("G", released)] * bool(released))
            rig.put_fence(harness.fence("r", 2))
            rig.engine.says["r"] = [71, EOS]
            rig.start(ready("r", *chat(echo=echo), attempt=2))
            await turns()
            rig.engine.run_out()

            assert (await rig.event(WalkFailed, attempt=2)).failure.code == "divergence"


@pytest.mark.slow
async def test_an_echo_waits_for_a_full_backlog_and_is_not_lost() -> None:
    async with rigged(max_posted=1) as rig:
        rig.engine.says |= {"q": [65, EOS], "r": [66, EOS]}
        rig.server.stop()
        rig.start(ready("q", *chat(echo="one")))
        rig.start(ready("r", *chat(echo="two")))
        await rig.engine.has(2)
        rig.engine.run_out()
        await turns()
        rig.server.start()
        await rig.event(WalkCompleted, "q")
        await rig.event(WalkCompleted, "r")

        assert (rig.released("q"), rig.released("r")) == ("oneA", "twoB")


# ---- CPU nodes -----------------------------------------------------------------------------------


async def test_any_graph_of_cpu_nodes_runs_nested_loops_and_parallels_too() -> None:
    async with rigged() as rig:
        call = WalkCall(name="count", inputs={"sum": inline_ids("s", [10])}, args={"rounds": 2})
        rig.start(ready("r", call))
        done = await rig.event(WalkCompleted)

        [result] = done.results
        assert {name: read_ids(handle) for name, handle in result.outputs.items()} == {
            "shown.0": [13],
            "shown.1": [13],  # each round of the outer loop begins anew
            "joined": [26],
        }
        assert result.facts == {"last": 13}
        keys = [key for node, key in rig.processing.calls if node == "add"]
        assert keys == [f"r/1/0/count/add/{outer}/{inner}" for outer in range(2) for inner in range(3)]


async def test_an_input_that_is_not_given_is_what_a_walk_before_put_out() -> None:
    async with rigged() as rig:
        first = WalkCall(name="greet", inputs={"name": harness.text("you")})
        rig.start(ready("r", WalkCall(name="secret", inputs={"token_ids": inline_ids("p", [1])}), first))
        rig.engine.says["r"] = [65]
        await rig.engine.has()
        rig.engine.run_out()
        done = await rig.event(WalkCompleted)

        assert [result.name for result in done.results] == ["secret", "greet"]
        assert done.results[1].facts == {"length": 9}
        assert rig.released() == "hello you"


async def test_what_was_released_and_is_computed_again_is_not_released_again() -> None:
    async with rigged() as rig:
        put_chunks(rig.server, ("hello you", b""))
        rig.put_fence(harness.fence("r", 2))
        call = WalkCall(name="greet", inputs={"name": harness.text("you")})
        rig.start(ready("r", call, attempt=2))
        done = await rig.event(WalkCompleted, attempt=2)

        assert rig.released() == "hello you"
        assert done.output.chunks == 1


async def test_what_was_released_and_comes_out_otherwise_is_a_divergence() -> None:
    async with rigged() as rig:
        put_chunks(rig.server, ("goodbye you", b""))
        rig.put_fence(harness.fence("r", 2))
        rig.start(ready("r", WalkCall(name="greet", inputs={"name": harness.text("you")}), attempt=2))

        assert (await rig.event(WalkFailed, attempt=2)).failure.code == "divergence"


IN_TURN: Final = ModelGraph(
    family="toy",
    nodes=dict.fromkeys(("say", "wait", "turn"), EngineKind.CPU),
    walks={
        "talk": compile_walk(
            "talk",
            Loop(
                "again",
                Sequential(
                    Parallel(
                        Node("say", inputs=("word",), outputs=(Edge("said", to=CLIENT("text")),)),
                        Node("wait", inputs=("number",), outputs=(Edge("next", to="turn"),)),
                    ),
                    Node(
                        "turn",
                        inputs=("next",),
                        outputs=(Edge("number", to="wait"), Edge("word", to="say")),
                    ),
                ),
                max_iters="times",
            ),
        )
    },
    plan=harness.TOY.plan,
)


async def test_what_a_node_says_goes_out_in_the_order_of_its_firings_whatever_takes_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first value takes longer to copy than the second; the output keeps the order of the firings."""

    def run(_: object, node: str, key: str, inputs: Mapping[str, Handle], args: object) -> CpuResult:
        if node == "say":
            return CpuResult(outputs={"said": inputs["word"]})
        if node == "wait":
            return CpuResult(outputs={"next": inputs["number"]})
        [number] = read_ids(inputs["next"])
        word = harness.text(f"{number} ", f"{key}/word")
        return CpuResult(outputs={"number": inline_ids(f"{key}/number", [number + 1]), "word": word})

    async def copied_late(data: Any) -> bytes:
        word = bytes(data)
        for _ in range(40 if word == b"0 " else 0):
            await asyncio.sleep(0.001)
        return word

    monkeypatch.setattr(harness, "TOY", IN_TURN)
    monkeypatch.setattr(harness.ToyProcessing, "run", run)
    monkeypatch.setattr("workers.execution.step_values.copied", copied_late)
    async with rigged() as rig:
        inputs = {"number": inline_ids("n", [1]), "word": harness.text("0 ")}
        rig.start(ready("r", WalkCall(name="talk", inputs=inputs, args={"times": 3})))
        await rig.event(WalkCompleted)

        assert rig.released() == "0 1 2 "


# ---- failures ------------------------------------------------------------------------------------


async def test_a_typed_error_fails_its_own_order_with_its_code_and_status() -> None:
    async with rigged() as rig:
        call = WalkCall(name="trap", inputs={"name": harness.text("x")}, args={"error": "not like this"})
        rig.start(ready("r", call))
        failed = await rig.event(WalkFailed)

        assert failed.failure == Failure(code="trapped", message="not like this", status=400)
        assert rig.executor.running == 0


async def test_an_error_about_a_parameter_names_it_on_the_log() -> None:
    async with rigged() as rig:
        wrong = InvalidOptionError("width", "width: expected less")
        rig.start(
            ready("r", WalkCall(name="trap", inputs={"name": harness.text("x")}, args={"error": wrong}))
        )

        assert (await rig.event(WalkFailed)).failure.param == "width"


async def test_an_unexpected_error_is_internal_and_its_trace_stays_in_the_process_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rigged() as rig:
        call = WalkCall(name="trap", inputs={"name": harness.text("x")}, args={"error": KeyError("secret")})
        rig.start(ready("r", call))
        failed = await rig.event(WalkFailed)

        assert failed.failure == Failure(code="internal_error", message="KeyError: 'secret'", status=500)
        assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("walks", "message"),
    [
        ([WalkCall(name="nowhere")], "order of walk 'nowhere': expected a walk of toy"),
        ([WalkCall(name="greet")], "takes the inputs"),
        ([WalkCall(name="paint")], "expected a stateless engine on this rank"),
        (
            [WalkCall(name="decode", inputs={"token": inline_ids("t", [1])}, args={"max_tokens": 3})],
            "expected an input 'token_ids' to start",
        ),
        ([*chat(), chat()[0]], "fires again outside of a resident loop"),
    ],
)
async def test_an_order_that_cannot_be_run_fails_and_says_why(walks: list[WalkCall], message: str) -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [EOS]
        order = asyncio.create_task(rig.engine.has())
        rig.start(ready("r", *walks))
        await turns()
        rig.engine.run_out()
        order.cancel()

        assert message in (await rig.event(WalkFailed)).failure.message


async def test_what_the_engine_gives_up_fails_its_own_order_alone() -> None:
    async with rigged() as rig:
        rig.engine.says |= {"r": [65, EOS], "q": [66, EOS]}
        rig.start(ready("r", *chat()))
        rig.start(ready("q", *chat()))
        await rig.engine.has(2)
        del rig.engine.specs["r.1.0.llm"]
        rig.engine.rows.on_error(["r.1.0.llm"], WorkerError("out of memory", code="step_failed"))
        rig.engine.run_out()

        assert (await rig.event(WalkFailed)).failure.code == "step_failed"
        await rig.event(WalkCompleted, "q")


async def test_an_engine_that_is_full_fails_the_order_as_overloaded() -> None:
    async with rigged() as rig:
        rig.engine.refuses = CapacityError("full")
        rig.start(ready("r", *chat()))

        failure = (await rig.event(WalkFailed)).failure
        assert (failure.code, failure.status) == ("overloaded", 503)


async def test_a_text_that_cannot_be_decoded_fails_its_own_order_alone() -> None:
    async with rigged() as rig:
        rig.engine.says |= {"r": [65, 255, 65], "q": [65, 66, EOS]}
        rig.start(ready("r", *chat()))
        rig.start(ready("q", *chat()))
        await rig.engine.has(2)
        rig.engine.run_out()

        assert (await rig.event(WalkFailed)).failure.message == "ZeroDivisionError: a decoder's bug"
        await rig.event(WalkCompleted, "q")
        assert rig.engine.cancelled == ["r.1.0.llm"]


async def test_a_result_too_large_for_the_log_is_a_failure() -> None:
    async with rigged(MemoryStore(SUBJECTS, max_payload=1500)) as rig:
        names = {"name": harness.text("x" * 2000)}
        rig.start(ready("r", WalkCall(name="greet", inputs=names)))

        assert (await rig.event(WalkFailed)).failure.code == "payload_too_large"


async def test_too_many_orders_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.execution.executor.MAX_ORDERS", 1)
    async with rigged() as rig:
        rig.engine.says["r"] = [65, EOS]
        rig.start(ready("r", *chat()))
        rig.start(ready("q", *chat()))
        await rig.engine.has()
        rig.engine.run_out()

        assert (await rig.event(WalkFailed, "q")).failure.code == "overloaded"
        await rig.event(WalkCompleted, "r")


# ---- the log -------------------------------------------------------------------------------------


async def test_the_end_is_told_only_when_every_chunk_is_stored() -> None:
    async with rigged() as rig:
        rig.engine.says["r"] = [*bytes_of("Hello"), EOS]
        rig.start(ready("r", *chat()))
        await rig.engine.has()
        rig.server.stop()
        rig.engine.run_out()  # the log is away: what runs goes on
        await turns()
        assert rig.executor.running == 1
        assert not rig.server.records
        rig.server.start()
        await rig.event(WalkCompleted)

        assert [type(event) for event in rig.all()] == [OutputChunk] * (len(rig.all()) - 1) + [WalkCompleted]
        assert rig.released() == "Hello"


async def test_a_full_backlog_holds_chunks_back_and_loses_none() -> None:
    async with rigged(max_posted=1) as rig:
        rig.engine.says["r"] = [*bytes_of("Hello"), EOS]
        rig.server.stop()
        rig.start(ready("r", *chat()))
        await rig.engine.has()
        rig.engine.run_out()
        await turns()
        rig.server.start()
        done = await rig.event(WalkCompleted)

        chunks = rig.events(OutputChunk)
        assert [chunk.text for chunk in chunks] == ["H", "ello"]
        assert done.output == totals_of(chunks)
        assert [event.number for event in rig.all()] == [1, 2, 3]


@pytest.mark.slow
async def test_a_row_is_held_when_too_much_of_it_waits_for_the_log_and_goes_on_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.generation.output_chunks.MAX_CHUNK_TOKENS", 5)
    async with rigged(max_posted=1) as rig:
        rig.engine.says |= {"r": bytes_of("x" * 100), "q": bytes_of("y" * 100)}
        rig.server.stop()
        for name in "rq":
            rig.start(ready(name, *chat()))
        await rig.engine.has(2)
        while len(rig.engine.held) < 2:
            rig.engine.step()
        held_at = rig.engine.steps
        assert held_at <= 1 + HELD_CHUNKS * 5 + 1
        assert rig.executor.running == 2
        rig.server.start()
        while rig.engine.specs:
            await rig.engine.until(lambda engine: not engine.specs.keys() <= engine.held)
            rig.engine.step()
        for name, letter in (("r", "x"), ("q", "y")):
            done = await rig.event(WalkCompleted, name)
            assert done.results[-1].facts == {"completion_tokens": 100, "finish_reason": "length"}
            assert rig.released(name) == letter * 100
        assert not rig.engine.held


@pytest.mark.slow
async def test_an_echo_that_waits_for_the_log_holds_its_row_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.generation.output_chunks.HELD_BYTES", 10)
    async with rigged(max_posted=1) as rig:
        rig.engine.says |= {"r": [65, EOS], "q": [66, EOS]}
        rig.server.stop()
        rig.start(ready("q", *chat(echo="fills the backlog")))
        rig.start(ready("r", *chat(echo="is too large to wait")))
        await rig.engine.has(2)
        assert rig.engine.held == {"r.1.0.llm"}
        rig.engine.step()
        await turns()
        assert list(rig.engine.specs) == ["q.1.0.llm", "r.1.0.llm"]
        rig.server.start()
        await rig.event(OutputChunk)
        await rig.engine.until(lambda engine: not engine.held)
        rig.engine.run_out()
        await rig.event(WalkCompleted)

        assert rig.released() == "is too large to waitA"


@pytest.mark.slow
async def test_what_a_node_puts_out_waits_with_it_while_the_log_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.generation.output_chunks.HELD_BYTES", 1)
    greet = WalkCall(name="greet", inputs={"name": harness.text("you")})
    async with rigged(max_posted=1) as rig:
        rig.server.stop()
        rig.start(ready("q", greet))
        await turns()
        rig.start(ready("r", greet, greet, greet))
        await until(lambda: len(rig.processing.calls) == 2)
        for _ in range(50):  # it would go on at once, if it might
            await asyncio.sleep(0.001)
        assert [key.split("/")[0] for _, key in rig.processing.calls] == ["q", "r"]
        rig.server.start()
        await rig.event(WalkCompleted)

        assert rig.released() == "hello you" * 3


async def test_when_idle_it_is_finished_and_otherwise_not_in_time() -> None:
    async with rigged() as rig:
        assert await rig.executor.wait_idle(0)
        rig.engine.says["r"] = [65, EOS]
        rig.start(ready("r", *chat()))
        await rig.engine.has()
        assert not await rig.executor.wait_idle(0)
        await rig.executor.abandon()
        assert await rig.executor.wait_idle(0)
        await turns()
        assert not rig.server.records


# ---- probation -------------------------------------------------------------------------------------


def suspected(*walks: WalkCall, attempt: int = 2, **kwargs: Any) -> NodeReady:
    """An order in quarantine."""
    return msgspec.structs.replace(ready("r", *walks, attempt=attempt, **kwargs), on_probation=True)


async def test_eight_tokens_behind_what_was_stored_are_progress_and_it_is_said_once() -> None:
    async with rigged() as rig:
        put_chunks(rig.server, ("abc", b"abc"))
        rig.put_fence(harness.fence("r", 2))
        rig.engine.says["r"] = bytes_of("abc" + "x" * 60)
        rig.start(suspected(*chat(max_tokens=60), step=1))
        await rig.engine.has()
        for _ in range(7):
            rig.engine.step()
        async with aclosing(rig.log.read([SUBJECTS.outputs_of("r")], 1)) as records:
            async for _ in records:  # what is computed goes out by itself
                if len(rig.released()) == 3 + 7:
                    break
        await turns()
        assert not rig.events(WalkProgressed)
        rig.engine.step()
        progressed = await rig.event(WalkProgressed, attempt=2)
        assert (progressed.rank, progressed.index, progressed.incarnation) == (0, 1, LIFE)
        assert progressed.tokens == 3 + 8
        assert progressed.tokens <= sum(len(chunk.token_ids) for chunk in rig.events(OutputChunk))
        rig.engine.run_out()
        await rig.event(WalkCompleted, attempt=2)

        assert len(rig.events(WalkProgressed)) == 1


async def test_what_is_not_stored_is_no_progress() -> None:
    async with rigged() as rig:
        rig.put_fence(harness.fence("r", 2))
        rig.engine.says["r"] = bytes_of("x" * 40)
        rig.start(suspected(*chat(max_tokens=40)))
        await rig.engine.has()
        rig.server.stop()
        rig.engine.run_out()
        await turns()
        assert not rig.events(WalkProgressed)
        rig.server.start()
        await rig.event(WalkCompleted, attempt=2)

        assert len(rig.events(WalkProgressed)) <= 1


@pytest.mark.parametrize(
    ("order", "says", "why"),
    [
        (suspected(*chat(max_tokens=7)), "x" * 7, "it is done before, which says more"),
        (suspected(*chat(max_tokens=7, echo="the prompt " * 9)), "x" * 7, "an echo is not computed"),
        (ready("r", *chat(max_tokens=40), attempt=2), "x" * 40, "nobody died under it"),
        (suspected(WalkCall(name="secret", inputs={"token_ids": inline_ids("p", [1])})), "x", "no output"),
    ],
)
async def test_nothing_is_said_of_progress_where_there_is_none_to_tell(
    order: NodeReady, says: str, why: str
) -> None:
    async with rigged() as rig:
        rig.put_fence(harness.fence("r", 2))
        rig.engine.says["r"] = bytes_of(says)
        rig.start(order)
        await rig.engine.has()
        rig.engine.run_out()
        await rig.event(WalkCompleted, attempt=2)

        assert not rig.events(WalkProgressed), why


@pytest.mark.parametrize("released", [True, False])
async def test_a_chunk_that_is_new_is_progress_and_one_that_was_released_is_none(released: bool) -> None:
    async with rigged() as rig:
        if released:
            put_chunks(rig.server, ("hello you", b""))
        rig.put_fence(harness.fence("r", 2))
        rig.start(suspected(WalkCall(name="greet", inputs={"name": harness.text("you")})))
        await rig.event(WalkCompleted, attempt=2)
        await turns()

        assert [event.tokens for event in rig.events(WalkProgressed)] == [0] * (not released)


# ---- arrays of CPU nodes -------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "is_inline"), [(256, True), (257, False)])
async def test_an_array_of_a_cpu_node_is_in_the_log_only_if_it_is_small(
    monkeypatch: pytest.MonkeyPatch, count: int, *, is_inline: bool
) -> None:
    made = np.arange(2 * count, dtype=np.float32).reshape(2, count)[:1]
    monkeypatch.setattr(harness.ToyProcessing, "run", lambda *_: CpuResult(outputs={"nothing": made}))
    async with rigged(puts=not is_inline) as rig:
        rig.start(ready("r", WalkCall(name="trap", inputs={"name": harness.text("x")})))
        done = await rig.event(WalkCompleted)

        kept = done.results[0].outputs["nothing"]
        assert (kept.dtype, kept.shape) == ("float32", (1, count))
        assert kept.data == (made.tobytes() if is_inline else None)
        assert (kept.rank is None) is is_inline


async def test_an_array_without_a_dtype_of_tensors_is_a_bug_of_the_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = np.array(["a"], dtype=object)
    monkeypatch.setattr(harness.ToyProcessing, "run", lambda *_: CpuResult(outputs={"nothing": made}))
    async with rigged() as rig:
        rig.start(ready("r", WalkCall(name="trap", inputs={"name": harness.text("x")})))
        failed = await rig.event(WalkFailed)

        assert failed.failure.code == "internal_error"
        assert "expected an array of one of" in failed.failure.message


async def test_an_error_of_media_names_the_part_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [Media(modality="image", digest=f"{number:064x}", name=f"{number}.png") for number in range(2)]
    error = MediaError("expected a complete image")
    error.digest = files[1].digest

    def run(*_: object) -> CpuResult:
        raise error

    monkeypatch.setattr(harness.ToyProcessing, "run", run)
    async with rigged() as rig:
        args = {"inputs": {"files": msgspec.to_builtins(files)}}
        rig.start(ready("r", WalkCall(name="trap", inputs={"name": harness.text("x")}, args=args)))
        failed = await rig.event(WalkFailed)

        assert failed.failure.code == "invalid_media"
        assert failed.failure.message == "files[1] ('1.png'): expected a complete image"


def test_a_preempted_sequence_is_an_event_of_the_orders_span() -> None:
    events: list[tuple[str, dict[str, Any]]] = []

    class Recorded:
        def add_event(self, name: str, attributes: dict[str, Any]) -> None:
            events.append((name, attributes))

    span: Any = Recorded()
    preemptions = [Preemption(at_s=0.1, by="r4", tokens=412, waited_s=0.6)]
    work = {
        "llm": NodeWork(calls=2, preemptions=preemptions, preemption_count=1, preempted_s=0.6),
        "prepare": NodeWork(calls=1),
    }
    executor._note_preemptions(span, work)

    assert events == [
        (
            "preempted",
            {
                "dalsegno.node": "llm",
                "dalsegno.preemptions": 1,
                "dalsegno.preempted_s": 0.6,
                "dalsegno.recomputed_tokens": 412,
            },
        )
    ]
