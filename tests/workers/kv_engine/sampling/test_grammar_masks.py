"""Guided answers match their guide, for any weights, batch and interruption."""

import json
import os
import re
import sys
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import cache
from random import Random
from threading import Event, current_thread
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from models.decoder_lm.nodes import DecoderLM, load
from models.decoder_lm.processing import DecoderLmProcessing
from models.decoder_lm.processing import load as load_processing
from models.text.guides import Allowed, CompiledGuide, InvalidGuideError
from shared.errors import ClientError
from shared.events import Guide
from tests.schemas import random_schema
from tests.tiny import Family, tiny_checkpoint
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, log_softmax, run, run_all, scores
from workers.data_plane.port import Array
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import Output, StepFailedError
from workers.kv_engine.sampling.grammar_masks import GuideThread, _MaskDeadline, _MaskThread, unpack_forbidden
from workers.kv_engine.sequence_spec import FinishReason, KvExport, Sampling, SequenceSpec

PROMPT = [5, 6, 7, 8]
COLOURS = ["red", "green", "deep blue", "deep blue sea", 'q"\\\n', "é😀"]
VERDICT = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["function", "class"]},
        "count": {"type": "integer", "minimum": -20, "maximum": 300},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
}


@cache
def processing_of(family: Family = "qwen3") -> DecoderLmProcessing:
    return load_processing(tiny_checkpoint(family), max_seq_len=512)


def compiled(family: Family = "qwen3", **asked: Any) -> CompiledGuide:
    guides = processing_of(family).guides
    assert guides is not None
    return guides.compiled(Guide(**asked))


def spec(
    key: str = "a", *, family: Family = "qwen3", guide: CompiledGuide | None = None, **changes: Any
) -> SequenceSpec:
    values: dict[str, Any] = {
        "key": key,
        "prompt_ids": PROMPT,
        "max_tokens": 80,
        "eos_ids": frozenset(processing_of(family).eos_ids),
        "guide": guide,
    }
    return SequenceSpec(**(values | changes))


def engine_of(node: DecoderLM, **changes: Any) -> KVEngine:
    sizes: dict[str, Any] = {"num_blocks": 500, "block_size": 8, "max_step_tokens": 64, "max_sequences": 32}
    return make_engine(node, **(sizes | changes))


def text_of(token_ids: Items[int], family: Family = "qwen3") -> str:
    decoder = processing_of(family).text_decoder()
    return "".join(map(decoder.push, token_ids)) + decoder.flush()


def variety(number: int) -> Sampling:
    return Sampling(
        temperature=(0.0, 0.8, 1.6)[number % 3],
        top_p=(1.0, 0.9)[number % 2],
        top_k=(0, 30, 3)[number // 2 % 3],
        min_p=(0.0, 0.05)[number // 3 % 2],
        repetition_penalty=(1.0, 1.3)[number // 4 % 2],
        seed=number,
    )


# ---- what comes out ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("family", "count"), [("qwen3", 160), ("mistral", 60), ("gemma2", 40)])
def test_every_finished_answer_is_valid_by_its_schema(family: Family, count: int) -> None:
    schemas = {str(seed): random_schema(Random(seed)) for seed in range(count)}
    specs = [
        spec(key, family=family, guide=compiled(family, json_schema=schema), sampling=variety(int(key)))
        for key, schema in schemas.items()
    ]

    found = run(engine_of(load(tiny_checkpoint(family))), specs)

    finished = {key for key, answer in found.items() if answer[-1].finish is FinishReason.STOP}
    for key in finished:
        answer = json.loads(text_of(ids(found[key]), family))
        jsonschema.Draft202012Validator(schemas[key]).validate(answer)
    assert len(finished) > 0.8 * count
    assert len({tuple(ids(answer)) for answer in found.values()}) > 0.6 * count


REGEXES = (
    "yes|no",
    r"[0-9]{4}-[01][0-9]-[0-3][0-9]",
    "^a{2,5}b?$",
    r"(?:[A-Z][a-z]{1,5} ){2}\d",
    "[^a-zA-Z]{3}",
    r" leading\n\t[/\"\\]?",
    "é(ü|日本)+?é",
    r"\p{Lu}{2}",
    "(?i)ok",
    "(?s).{4}",
    "[/]",
    "",
)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_an_answer_is_matched_by_its_regular_expression_as_a_whole(family: Family) -> None:
    specs = [
        spec(f"{number}/{seed}", family=family, guide=compiled(family, regex=regex), sampling=variety(seed))
        for number, regex in enumerate(REGEXES)
        if regex
        for seed in range(4)
    ]

    found = run(engine_of(load(tiny_checkpoint(family))), specs)

    for key, answer in found.items():
        regex = REGEXES[int(key.split("/")[0])].replace(r"\p{Lu}", r"[^\W\d_a-zà-ÿ]")
        text = text_of(ids(answer), family)
        assert answer[-1].finish is FinishReason.STOP
        assert re.fullmatch(regex, text), (regex, text)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_choice_is_made_word_for_word_and_any_of_them_can_be(family: Family) -> None:
    guide = compiled(family, choice=COLOURS)
    specs = [
        spec(str(seed), family=family, guide=guide, sampling=Sampling(temperature=8.0, seed=seed))
        for seed in range(96)
    ]

    found = run(engine_of(load(tiny_checkpoint(family))), specs)

    assert {answer[-1].finish for answer in found.values()} == {FinishReason.STOP}
    assert {text_of(ids(answer), family) for answer in found.values()} == set(COLOURS)


def test_a_grammar_is_followed(qwen3: DecoderLM) -> None:
    sums = compiled(grammar='start: sum\nsum: NUMBER ("+" NUMBER){1,3} "="\nNUMBER: /[1-9][0-9]?/')
    specs = [spec(str(seed), guide=sums, sampling=variety(seed)) for seed in range(8)]

    found = run(engine_of(qwen3), specs)

    for answer in found.values():
        assert re.fullmatch(r"[1-9]\d?(\+[1-9]\d?){1,3}=", text_of(ids(answer)))


@pytest.mark.slow
def test_any_object_is_one(qwen3: DecoderLM) -> None:
    closers = processing_of()._tokenizer.encode('"}]', add_special_tokens=False)
    likes = Sampling(temperature=1.0, logit_bias=[(token_id, 4.0) for token_id in closers])
    specs = [
        spec(str(seed), guide=compiled(json_object=True), sampling=replace(likes, seed=seed))
        for seed in range(8)
    ]

    found = run(engine_of(qwen3), specs)

    finished = [answer for answer in found.values() if answer[-1].finish is FinishReason.STOP]
    assert len(finished) > 3
    for answer in finished:
        assert isinstance(json.loads(text_of(ids(answer))), dict)


# ---- which of the allowed ones -------------------------------------------------------------------


def naive(guide: CompiledGuide, ends: Items[int], limit: int, *, bias: dict[int, float]) -> list[int]:
    """The greedy answer by the stock model's logits and a new mask for every token."""
    answer: list[int] = []
    while len(answer) < limit:
        bits, may_end = guide.matcher().push(answer)
        allowed = np.unpackbits(bits, bitorder="little", count=guide.vocab_size).astype(bool)
        allowed[list(ends)] = may_end
        logits = log_softmax("qwen3", [*PROMPT, *answer])[-1].clone()
        for token_id, amount in bias.items():
            logits[token_id] += amount
        logits[~torch.from_numpy(allowed)] = -torch.inf
        best, second = logits.topk(2).values.tolist()
        assert best - second > 1e-4, "a tie: choose another guide"
        answer.append(int(logits.argmax()))
        if answer[-1] in ends:
            break
    return answer


GUIDES: list[dict[str, Any]] = [
    {"json_schema": VERDICT},
    {"json_schema": {"type": "string", "maxLength": 20}},
    {"regex": "([a-z]+ ){2,4}[A-Z]{2}"},
    {"choice": COLOURS},
    {"grammar": 'start: "<" /[a-f]{3,9}/ ">"'},
]


@pytest.mark.slow
@pytest.mark.parametrize("asked", GUIDES, ids=lambda asked: next(iter(asked)))
@pytest.mark.parametrize("bias", [{}, {70: 4.0, 71: 4.0, 260: -3.0}])
def test_the_greedy_answer_is_that_of_the_stock_model_masked_token_by_token(
    qwen3: DecoderLM, asked: dict[str, Any], bias: dict[int, float]
) -> None:
    guide, ends = compiled(**asked), processing_of().eos_ids
    expected = naive(guide, ends, 40, bias=bias)
    asked_for = spec(guide=guide, max_tokens=40, sampling=Sampling(logit_bias=list(bias.items())))
    beside = spec("free", max_tokens=40, ignore_eos=True)

    found = run(engine_of(qwen3), [beside, asked_for])

    assert ids(found["a"]) == expected
    assert ids(found["free"]) == ids(run(engine_of(qwen3), [beside])["free"])


@pytest.mark.slow
def test_the_same_request_alone_and_among_31_others_gives_the_same_tokens(qwen3: DecoderLM) -> None:
    guides = [*(compiled(**asked) for asked in GUIDES), None]
    specs = [
        spec(
            str(number),
            prompt_ids=[*PROMPT, number],
            guide=guides[number % len(guides)],
            max_tokens=40,
            sampling=variety(number),
        )
        for number in range(32)
    ]

    together = run(engine_of(qwen3), specs, every=1)

    for one in specs[::3]:
        assert ids(run(engine_of(qwen3), [one])[one.key]) == ids(together[one.key])


@pytest.mark.slow
def test_a_draw_takes_what_is_allowed_as_often_as_the_model_likes_it() -> None:
    """Chi-square: one in a hundred sets of seeds would fail, these do not."""
    node = load(tiny_checkpoint("qwen3"))
    texts = ["a", "e", "i", "o", "u"]
    guide, draws = compiled(choice=texts), 600
    specs = [
        spec(str(seed), guide=guide, max_tokens=1, sampling=Sampling(temperature=1.0, seed=seed))
        for seed in range(draws)
    ]

    found = run(engine_of(node, num_blocks=200), specs)

    chosen = [text_of(ids(answer)) for answer in found.values()]
    logprobs = log_softmax("qwen3", PROMPT)[-1]
    [*allowed] = (processing_of()._tokenizer.encode(text, add_special_tokens=False)[0] for text in texts)
    shares = logprobs[allowed].softmax(-1).tolist()
    statistic = sum(
        (chosen.count(text) - draws * share) ** 2 / (draws * share)
        for text, share in zip(texts, shares, strict=True)
    )
    assert statistic < 13.28  # 4 degrees of freedom


def test_log_probabilities_stay_those_of_the_model(qwen3: DecoderLM) -> None:
    free = spec(max_tokens=1, logprobs=2)
    [likeliest] = scores(run_all(engine_of(qwen3), [free])["a"])

    [found] = scores(run_all(engine_of(qwen3), [replace(free, guide=compiled(choice=["zz"]))])["a"])

    assert text_of([found.token_id]) in {"z", "zz"}
    assert found.top == likeliest.top
    assert found.logprob == pytest.approx(float(log_softmax("qwen3", PROMPT)[-1][found.token_id]), abs=1e-4)


# ---- the end of an answer -------------------------------------------------------------------------------


def answer_to(node: DecoderLM, **changes: Any) -> tuple[str, FinishReason | None]:
    [found] = run(engine_of(node), [spec(**changes)]).values()
    return text_of(ids(found)), found[-1].finish


def test_an_answer_that_finds_no_end_within_its_limit_is_cut_there(qwen3: DecoderLM) -> None:
    text, finish = answer_to(qwen3, guide=compiled(regex="(ab){30}"), max_tokens=5)

    assert finish is FinishReason.LENGTH
    assert re.fullmatch("(ab)*a?", text)


def test_the_end_is_chosen_only_where_the_guide_may_end(qwen3: DecoderLM) -> None:
    [end] = processing_of().eos_ids
    eager = Sampling(logit_bias=[(end, 100.0)])

    assert answer_to(qwen3, guide=compiled(regex="x{3,9}"), sampling=eager) == ("xxx", FinishReason.STOP)
    assert answer_to(qwen3, guide=compiled(regex="x{3,9}|"), sampling=eager) == ("", FinishReason.STOP)


def test_a_minimum_of_tokens_holds_the_end_back_as_long_as_anything_else_may_follow(
    qwen3: DecoderLM,
) -> None:
    [end] = processing_of().eos_ids
    later = Sampling(logit_bias=[(end, 100.0)], min_tokens=6)
    [found] = run(engine_of(qwen3), [spec(guide=compiled(regex="[0-9]{1,40}"), sampling=later)]).values()

    assert len(ids(found)) == 6 + 1
    assert answer_to(qwen3, guide=compiled(choice=["7"]), sampling=later) == ("7", FinishReason.STOP)


def test_an_end_that_is_ignored_comes_where_nothing_else_may_follow(qwen3: DecoderLM) -> None:
    [end] = processing_of().eos_ids
    eager = Sampling(logit_bias=[(end, 100.0)])

    text, finish = answer_to(qwen3, guide=compiled(regex="x{3,9}"), sampling=eager, exhausts_guide=True)

    assert (text, finish) == ("x" * 9, FinishReason.STOP)


def test_a_token_that_stops_the_answer_is_an_end_and_no_text(qwen3: DecoderLM) -> None:
    [stop] = processing_of()._tokenizer.encode("x", add_special_tokens=False)
    likes = Sampling(logit_bias=[(stop, 100.0)])
    asked: dict[str, Any] = {"guide": compiled(regex="x{0,3}[0-9]{2}"), "sampling": likes}

    free, _ = answer_to(qwen3, **asked)
    [found] = run(engine_of(qwen3), [spec(**asked, stop_token_ids=frozenset([stop]))]).values()

    assert free.startswith("x")
    assert re.fullmatch("[0-9]{2}", text_of(ids(found)[:-1]))
    assert ids(found)[-1] == stop
    assert found[-1].finish is FinishReason.STOP


def test_an_answer_may_end_with_a_stop_token_alone(qwen3: DecoderLM) -> None:
    text, finish = answer_to(
        qwen3, guide=compiled(choice=["ab"]), eos_ids=frozenset(), stop_token_ids=frozenset([500])
    )

    assert (text[:2], finish) == ("ab", FinishReason.STOP)


def test_bad_words_that_leave_the_guide_nothing_fail_the_request_alone(qwen3: DecoderLM) -> None:
    [word] = processing_of()._tokenizer.encode("7", add_special_tokens=False)
    stuck = spec("stuck", guide=compiled(regex="ab7"), sampling=Sampling(bad_words=[[word]]))
    other = spec("other", guide=compiled(choice=["ab7"]))

    outputs, [failed] = drained(engine_of(qwen3), [stuck, other])

    assert failed.keys == ()
    [error] = failed.others.values()
    assert isinstance(error, ClientError)
    assert (error.code, list(failed.others)) == ("nothing_left", ["stuck"])
    assert text_of(ids(o for o in outputs if o.key == "other")) == "ab7"


def drained(engine: KVEngine, specs: Items[SequenceSpec]) -> tuple[list[Output], list[StepFailedError]]:
    """All outputs, those of steps that failed for some included; and these failures."""
    for one in specs:
        engine.add(one)
    outputs: list[Output] = []
    failures: list[StepFailedError] = []
    while engine.has_work:
        try:
            outputs += engine.step()
        except StepFailedError as error:
            outputs += error.outputs
            failures.append(error)
    return outputs, failures


# ---- interrupted, moved, in company --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("asked", GUIDES, ids=lambda asked: next(iter(asked)))
def test_resuming_at_any_token_goes_on_as_if_never_stopped(qwen3: DecoderLM, asked: dict[str, Any]) -> None:
    for how in (variety(0), variety(11)):
        one = spec(guide=compiled(**asked), max_tokens=30, sampling=how)
        whole = run(engine_of(qwen3), [one])["a"]
        cuts = {str(cut): ids(whole)[:cut] for cut in range(1, len(whole))}

        found = run(
            engine_of(qwen3), [replace(one, key=key, prefix_ids=prefix) for key, prefix in cuts.items()]
        )

        for key, prefix in cuts.items():
            assert [(o.token_id, o.index, o.finish) for o in found[key]] == [
                (o.token_id, o.index, o.finish) for o in whole[len(prefix) :]
            ]


@pytest.mark.slow
def test_sequences_that_gave_way_go_on_as_if_they_had_not(qwen3: DecoderLM) -> None:
    specs = [
        spec(str(number), guide=compiled(**GUIDES[number % 5]), sampling=variety(number), max_tokens=30)
        for number in range(12)
    ]
    roomy = run(engine_of(qwen3), specs)
    tight = engine_of(qwen3, num_blocks=12, max_sequences=6)

    found = run(tight, specs)

    assert tight.stats().cache.preemptions > 0
    assert {key: ids(answer) for key, answer in found.items()} == {
        key: ids(answer) for key, answer in roomy.items()
    }


@pytest.mark.slow
def test_an_answer_that_moves_to_another_engine_goes_on_there(qwen3: DecoderLM) -> None:
    store: dict[str, Array] = {}

    def allocate(key: str, dtype: str, shape: tuple[int, ...], *, scope: str) -> Any:
        data = np.zeros(4 * int(np.prod(shape)), np.uint8)
        store[key] = Array(dtype=dtype, shape=shape, data=data)
        return key, data

    one = spec(guide=compiled(json_schema=VERDICT), sampling=variety(1))
    whole = ids(run(engine_of(qwen3), [one])["a"])
    first = replace(one, max_tokens=1, export=KvExport(key="kv", scope="s"))

    begun = ids(run(engine_of(qwen3, export_to=allocate), [first])["a"])
    rest = run(engine_of(qwen3), [replace(one, prefix_ids=begun, kv=store["kv"])])["a"]

    assert [*begun, *ids(rest)] == whole


def test_a_prompt_that_is_computed_in_pieces_is_guided_behind_its_end(qwen3: DecoderLM) -> None:
    long = spec("long", prompt_ids=list(range(10, 90)), guide=compiled(choice=COLOURS))
    short = [spec(str(seed), guide=compiled(choice=COLOURS), sampling=variety(seed)) for seed in range(6)]

    found = run(engine_of(qwen3, max_step_tokens=32), [*short, long], every=1)

    assert {text_of(ids(answer)) for answer in found.values()} <= set(COLOURS)


def test_a_guide_that_is_too_much_to_follow_fails_its_request_alone(qwen3: DecoderLM) -> None:
    class Endless:
        marks = frozenset[int]()
        vocab_size = 512
        tokens = 0

        def matcher(self) -> "Endless":
            return self

        def push(self, token_ids: Items[int]) -> Allowed:
            self.tokens += len(token_ids)
            if self.tokens == 3:
                raise InvalidGuideError("too much")
            return Allowed(np.full(64, 255, np.uint8), may_end=False)

    guide: Any = Endless()
    stuck, other = spec("stuck", guide=guide), spec("other", guide=compiled(choice=["fine"]))

    outputs, [failed] = drained(engine_of(qwen3), [stuck, other, spec("free", max_tokens=8, ignore_eos=True)])

    assert failed.keys == ()
    assert {key: str(error) for key, error in failed.others.items()} == {"stuck": "too much"}
    assert text_of(ids(o for o in outputs if o.key == "other")) == "fine"
    assert len(ids(o for o in outputs if o.key == "free")) == 8


class Spinning:
    """A guide that computes for its second token until it is banned, and further until it is released."""

    marks = frozenset[int]()
    vocab_size = 512
    tokens = 0

    def __init__(self) -> None:
        self.banned = False
        self.let_go, self.ended = Event(), Event()

    def matcher(self) -> "Spinning":
        return self

    def ban(self) -> None:
        self.banned = True

    def push(self, token_ids: Items[int]) -> Allowed:
        if self.banned:
            raise InvalidGuideError("banned")
        self.tokens += len(token_ids)
        if self.tokens == 2:
            self.thread = current_thread()
        while self.tokens == 2 and not self.let_go.is_set():
            pass
        if self.tokens == 2:
            self.ended.set()
        return Allowed(np.full(64, 255, np.uint8), may_end=False)


def test_a_guide_that_takes_for_ever_fails_who_follow_it_and_the_rest_go_on(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.kv_engine.sampling.grammar_masks.MASK_S", 0.05)
    spinning = Spinning()
    guide: Any = spinning
    before, behind = compiled(choice=["before"]), compiled(choice=["behind"])
    specs = [
        spec("first", guide=before),
        spec("stuck", guide=guide, sampling=Sampling(logit_bias=[(70, 100.0)])),
        spec("too", prompt_ids=[9], guide=guide, sampling=Sampling(logit_bias=[(70, 100.0)])),
        spec("last", guide=behind),
        spec("free", max_tokens=12, ignore_eos=True),
    ]

    outputs, failures = drained(engine_of(qwen3), specs)

    assert not spinning.ended.is_set()
    assert spinning.thread.daemon, "a process that has to end would wait for it"
    if sys.platform == "linux":
        assert spinning.thread.native_id is not None
        assert os.getpriority(os.PRIO_PROCESS, spinning.thread.native_id) == 19
    told = {key: str(error) for failed in failures for key, error in failed.others.items()}
    assert told == {"stuck": "banned", "too": "banned"}
    assert text_of(ids(o for o in outputs if o.key == "first")) == "before"
    assert text_of(ids(o for o in outputs if o.key == "last")) == "behind"
    assert len(ids(o for o in outputs if o.key == "free")) == 12
    spinning.let_go.set()
    assert spinning.ended.wait(20)
    spinning.thread.join(20)
    assert not spinning.thread.is_alive()


def test_a_thread_of_masks_ends_with_who_asked_it() -> None:
    asked = _MaskThread()
    thread = asked.submit(current_thread).result(20)
    with pytest.raises(ZeroDivisionError):
        asked.submit(lambda: 1 // 0).result(20)

    del asked

    thread.join(20)
    assert not thread.is_alive()


def test_a_thread_that_waits_for_the_processor_has_used_up_nothing(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the thread's CPU time counts: a busy machine bans no guide."""
    monkeypatch.setattr("workers.kv_engine.sampling.grammar_masks.MASK_S", 0.001)
    asked: list[None] = []
    enough = Event()

    class Waiting(Spinning):
        def push(self, token_ids: Items[int]) -> Allowed:
            self.tokens += len(token_ids)
            assert enough.wait(20)
            return Allowed(np.full(64, 255, np.uint8), may_end=False)

    def abandon(turn: Any) -> Any:
        asked.append(None)
        if len(asked) == 3:
            enough.set()
        return really_leave(turn)

    really_leave = _MaskDeadline.abandon
    monkeypatch.setattr(_MaskDeadline, "abandon", abandon)
    guide: Any = Waiting()

    found = run(engine_of(qwen3), [spec(guide=guide, max_tokens=3)])

    assert len(ids(found["a"])) == 3
    assert len(asked) >= 3


# ---- what it costs -------------------------------------------------------------------------------


def test_who_is_not_guided_pays_nothing(qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a mask was made")

    monkeypatch.setattr("workers.kv_engine.sampling.grammar_masks.StepMasks.__init__", refused)
    engine = engine_of(qwen3)
    run(engine, [spec(str(seed), max_tokens=8, sampling=variety(seed)) for seed in range(4)])

    assert engine._runner._guides._thread is None
    assert engine._runner._guides._buffer is None


def test_the_masks_are_made_while_the_forward_runs(qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to begin: run one after the other, neither would finish."""
    forward_begins, mask_begins = Event(), Event()
    guide = compiled(choice=["ab"])
    matcher = guide.matcher()

    class Watched:
        marks = guide.marks
        vocab_size = guide.vocab_size
        tokens = property(lambda self: matcher.tokens)

        def matcher(self) -> "Watched":
            return self

        def push(self, token_ids: Items[int]) -> Allowed:
            mask_begins.set()
            assert forward_begins.wait(20)
            return matcher.push(token_ids)

    forward = DecoderLM.forward

    def watched(self: DecoderLM, inputs: torch.Tensor, step: Any) -> torch.Tensor:
        forward_begins.set()
        assert mask_begins.wait(20)
        return forward(self, inputs, step)

    engine, watching = engine_of(qwen3), Watched()
    asked: Any = watching
    monkeypatch.setattr(DecoderLM, "forward", watched)

    assert text_of(ids(run(engine, [spec(guide=asked)])["a"])) == "ab"


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 512, 1000])
def test_bits_are_unpacked_on_a_device_as_numpy_does(vocab_size: int) -> None:
    bits = np.random.default_rng(vocab_size).integers(0, 256, (3, (vocab_size + 7) // 8), dtype=np.uint8)

    found = unpack_forbidden(torch.from_numpy(bits), vocab_size)

    expected = np.unpackbits(~bits, axis=-1, count=vocab_size, bitorder="little").astype(bool)
    assert torch.equal(found, torch.from_numpy(expected))


def test_a_model_may_have_more_rows_than_the_tokenizer_has_tokens(qwen3: DecoderLM) -> None:
    guide = compiled(choice=["a"])
    thread = GuideThread(max_sequences=2, vocab_size=600, device=torch.device("cpu"))
    engine = engine_of(qwen3)
    engine.add(spec(guide=guide))
    [span] = engine._scheduler.schedule()
    masks = thread.begin([span])
    assert masks is not None
    logits = torch.zeros(1, 600)

    assert masks.apply(logits) == {}

    allowed = logits[0].isfinite().nonzero().flatten().tolist()
    assert allowed == processing_of()._tokenizer.encode("a", add_special_tokens=False)


# ---- tokens that a request allows at all -------------------------------------------------------------------


def test_a_guided_answer_has_allowed_tokens_and_ends_where_its_guide_does(qwen3: DecoderLM) -> None:
    guide = compiled(regex="[a-z]{4}")
    plain = ids(run(engine_of(qwen3), [spec(guide=guide)])["a"])
    [letter] = [one for one in range(200) if text_of([one]) == "z"]
    only = Sampling(allowed_token_ids=[letter])

    outputs = run(engine_of(qwen3), [spec(guide=guide, sampling=only)])["a"]

    assert text_of(ids(outputs)[:4]) == "zzzz" != text_of(plain[:4])
    assert outputs[-1].finish is FinishReason.STOP


def test_tokens_that_no_answer_can_have_fail_it_alone(qwen3: DecoderLM) -> None:
    [letter] = [one for one in range(200) if text_of([one]) == "z"]
    stuck = spec("stuck", guide=compiled(regex="[0-9]+"), sampling=Sampling(allowed_token_ids=[letter]))

    outputs, [failed] = drained(engine_of(qwen3), [stuck, spec("other", max_tokens=3)])

    [error] = failed.others.values()
    assert isinstance(error, ClientError)
    assert (error.code, list(failed.others)) == ("nothing_left", ["stuck"])
    assert len([one for one in outputs if one.key == "other"]) == 3
