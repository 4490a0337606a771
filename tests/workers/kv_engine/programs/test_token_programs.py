"""Sequences whose tokens come from a program: those of a naive oracle, alone, packed, and resumed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final
from unittest.mock import Mock

import pytest
import torch

from models.programs import NewTokens, Pass, TokenRequest
from shared.errors import BugError, ClientError, WorkerError
from tests.workers.cpu_kernels.libraries import NAMES, library
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids as ids_of
from tests.workers.kv_engine.programs.flow import flow_node
from tests.workers.kv_engine.programs.infill import (
    WAYS,
    expected,
    infill_node,
    spec,
)
from tests.workers.kv_engine.programs.test_programs import serve, texts
from workers.cpu_kernels.decoder import NativeDecoder
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import EmissionOutput, Output, StepFailedError
from workers.kv_engine.sequence_spec import (
    FinishReason,
    KvExport,
    Pooling,
    PoolingMode,
)

SIZES: Final[dict[str, Any]] = {
    "num_blocks": 200,
    "block_size": 8,
    "max_step_tokens": 64,
    "max_sequences": 16,
}
PROMPTS: Final = {
    f"{way} {n}": spec(f"{way} {n}", [*range(5 + n, 11 + 4 * n)], way) for n in range(2) for way in WAYS
}
MIXED: Final = [PROMPTS[f"{way} 1"] for way in WAYS]


def engine(*, native: bool = False, **options: Any) -> KVEngine:
    node: Any = infill_node()
    if native:
        node = NativeDecoder(node, library(NAMES[-1]), threads=1)
    return make_engine(node, **{**SIZES, **options})


@cache
def oracle(key: str) -> list[int]:
    """The tokens of a prompt by the oracle."""
    return expected(infill_node(), PROMPTS[key])


def tokens(outputs: Sequence[Output]) -> list[int]:
    return [token for one in outputs if isinstance(one, EmissionOutput) for token in one.token_ids]


def failures_of(by: KVEngine) -> tuple[dict[str, Exception], list[Output]]:
    """Run to the end; the errors by key, and the outputs."""
    errors, outputs = dict[str, Exception](), list[Output]()
    while by.has_work:
        try:
            outputs += by.step()
        except StepFailedError as failed:
            errors.update(failed.others)
            outputs += failed.outputs
    return errors, outputs


@pytest.mark.parametrize("native", [True, False])
def test_all_ways_at_once_are_each_as_the_oracle_says(native: bool) -> None:
    found = serve(engine(native=native), [*PROMPTS.values()])

    for key, outputs in found.items():
        assert tokens(outputs) == oracle(key)


def test_the_ways_differ_where_the_contexts_differ() -> None:
    answers = {tuple(oracle(f"{way} 1")) for way in WAYS}

    assert len(answers) == len(WAYS), "the control: a pass that ignores `after` or `tower` would show"


def test_each_block_is_one_emission_with_its_counts() -> None:
    [first, second, third] = serve(engine(), [PROMPTS["plain 0"]])["plain 0"]

    assert isinstance(third, EmissionOutput)
    assert [len(one.token_ids) for one in (first, second, third) if isinstance(one, EmissionOutput)] == [
        4
    ] * 3
    assert (third.index, third.finish, third.counts) == (8, FinishReason.LENGTH, {"forwards": 1 + 3 * 5})
    assert (first.finish, second.finish) == (None, None)


def test_staggered_among_sampled_texts_no_token_changes() -> None:
    only_texts = serve(engine(native=True), list(texts(4)))
    among: list[Any] = [*texts(4)]
    for place, one in enumerate(MIXED):
        among.insert(2 * place, one)

    by = engine(native=True, max_pass_tokens=30)
    found = serve(by, among, every=2)

    for one in MIXED:
        assert tokens(found[one.key]) == oracle(one.key)
    for key, outputs in only_texts.items():
        assert ids_of(found[key]) == ids_of(outputs)
    assert by.stats().work.sampled_tokens == 4 * 12 + 5 * 12


def test_an_answer_goes_on_after_the_emissions_of_an_earlier_attempt() -> None:
    by = engine()
    for way in WAYS:
        whole = PROMPTS[f"{way} 1"]
        emitted = oracle(whole.key)

        resumed = serve(by, [replace(whole, prefix_ids=emitted[:4])])[whole.key]

        assert tokens(resumed) == emitted[4:]
        assert isinstance(resumed[0], EmissionOutput)
        assert resumed[0].index == 4


def test_the_limit_cuts_a_block() -> None:
    outputs = serve(engine(), [replace(PROMPTS["plain 0"], max_tokens=6)])["plain 0"]

    assert tokens(outputs) == oracle("plain 0")[:6]
    assert outputs[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize(("ignores", "ends_at"), [(False, 6), (True, 12)])
def test_an_end_token_cuts_a_block(ignores: bool, ends_at: int) -> None:
    by, end = engine(), oracle("plain 0")[5]
    asked = replace(PROMPTS["plain 0"], eos_ids=frozenset({end}), ignore_eos=ignores)

    outputs = serve(by, [asked])["plain 0"]

    assert tokens(outputs) == oracle("plain 0")[:ends_at]
    assert outputs[-1].finish is (FinishReason.LENGTH if ignores else FinishReason.STOP)
    assert by.stats().kv_used == 0


def test_a_held_sequence_waits_while_others_go_on() -> None:
    by = engine()
    for key in ("plain 0", "plain 1"):
        by.add(PROMPTS[key])
    by.step()

    assert by.hold("plain 0")
    others = [output for _ in range(40) if by.has_work for output in by.step()]

    assert {output.key for output in others} == {"plain 1"}
    assert not by.has_work, "nothing is left but the held one"
    assert by.stats().held == 1
    assert by.resume("plain 0")
    assert tokens(failures_of(by)[1]) == oracle("plain 0")


def test_a_cancelled_sequence_gives_its_room_back_and_changes_no_other() -> None:
    by = engine()
    for key in ("guided 0", "judged 1"):
        by.add(PROMPTS[key])
    for _ in range(4):
        by.step()

    assert by.cancel("guided 0")

    assert tokens(failures_of(by)[1]) == oracle("judged 1")
    assert by.stats().kv_used == 0
    assert not by.cancel("guided 0")


def test_sequences_wait_for_room_in_their_order() -> None:
    by = engine(max_sequences=1)
    late = replace(PROMPTS["plain 1"], key="first", priority=1)
    for one in (PROMPTS["plain 0"], PROMPTS["crop 0"], late):
        by.add(one)

    order = [output.key for output in failures_of(by)[1] if output.finish]

    assert order == ["first", "plain 0", "crop 0"]


def test_the_tenant_that_was_served_least_comes_first() -> None:
    by = engine(max_sequences=1)
    for n in range(3):
        by.add(replace(PROMPTS["plain 0"], key=f"much {n}", tenant="much"))
    by.add(replace(PROMPTS["plain 0"], key="little", tenant="little"))

    order = [output.key for output in failures_of(by)[1] if output.finish]

    assert order == ["much 0", "little", "much 1", "much 2"]


def test_the_passes_of_a_step_share_one_call_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    by, calls = engine(), list[int]()
    head: Callable[..., torch.Tensor] = by.node.head

    def counted(hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        calls.append(len(indices))
        return head(hidden, indices)

    monkeypatch.setattr(by.node, "head", counted)
    for one in PROMPTS.values():
        if one.options["way"] == "plain":
            by.add(one)

    by.step()
    by.step()

    assert calls == [2 * 4], "the first step asks for no logits, the second one for those of both blocks"


def test_what_excludes_a_program_is_refused_by_name() -> None:
    by, plain = engine(), PROMPTS["plain 0"]
    refused = {
        "logprobs": replace(plain, logprobs=1),
        "a guide": replace(plain, guide=Mock()),
        "embeddings": replace(plain, max_tokens=0, pooling=Pooling(mode=PoolingMode.MEAN)),
        "warm": replace(plain, max_tokens=0, caches_prompt=True),
        "different ranks": replace(plain, export=KvExport(key="kv", scope="")),
    }
    for name, asked in refused.items():
        with pytest.raises(ClientError, match=name) as found:
            by.add(asked)
        assert found.value.code == "not_supported"
    assert not by.has_work


def test_an_answer_that_can_never_fit_is_refused_at_once() -> None:
    long = replace(PROMPTS["plain 0"], max_tokens=600)

    with pytest.raises(ClientError, match="model's context length is 512"):
        engine().add(long)
    with pytest.raises(ClientError, match="the size of the KV cache is 16 tokens"):
        engine(num_blocks=2).add(PROMPTS["plain 0"])
    with pytest.raises(ClientError, match="2 contexts"):
        engine(max_sequences=1).add(PROMPTS["guided 0"])


def test_an_answer_may_fill_the_whole_pool() -> None:
    by = engine(num_blocks=4)  # 32 tokens
    fills = replace(PROMPTS["plain 0"], prompt_ids=[*range(1, 13)])  # its driver declares 12 + 12 + 8

    outputs = serve(by, [fills])[fills.key]

    assert len(tokens(outputs)) == 12


def test_an_unknown_program_is_named() -> None:
    with pytest.raises(BugError, match=r"no program 'fill'.*\['infill'\]"):
        engine().add(replace(PROMPTS["plain 0"], token_program="fill"))
    with pytest.raises(BugError, match=r"no program 'infill'.*\[\]"):
        make_engine(flow_node(), **SIZES).add(PROMPTS["plain 0"])


class Scripted:
    """A driver that asks for given passes and returns given tokens, round by round."""

    max_contexts = 2
    max_tokens = 40

    def __init__(self, rounds: list[list[Pass]], returned: list[NewTokens | None]) -> None:
        self._rounds, self._returned = rounds, returned

    def passes(self) -> list[Pass]:
        return self._rounds.pop(0)

    def take(self, _results: Any) -> NewTokens | None:
        return self._returned.pop(0)


def scripted(
    rounds: list[list[Pass]], returned: list[NewTokens | None]
) -> tuple[dict[str, Exception], list[Output]]:
    """The errors and the outputs of such a driver, beside a sequence that is served well."""
    served = infill_node()

    def start(node: Any, request: TokenRequest) -> Any:
        assert (node, request.max_tokens) == (served, 5)
        return Scripted(rounds, returned)

    served.token_programs["scripted"] = start
    by = make_engine(served, **SIZES)
    by.add(PROMPTS["plain 0"])
    by.add(replace(PROMPTS["plain 0"], key="scripted", token_program="scripted", max_tokens=5))
    errors, outputs = failures_of(by)
    assert tokens([one for one in outputs if one.key == "plain 0"]) == oracle("plain 0")
    return errors, [one for one in outputs if one.key == "scripted"]


BEGIN: Final = [Pass(context="a", ids=[1, 2, 3], commits=True)]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (Pass(context="a", ids=[4], after=4), "begins after 4 cells of its context: expected 0 to 3"),
        (Pass(context="a", ids=[4], after=-1), "begins after -1 cells"),
        (Pass(context="a", ids=[4], logits=[1]), "asks for the logits of"),
        (Pass(context="a", ids=[4], logits=[]), "at least one"),
        (
            Pass(context="b", ids=[4], tower="judges"),
            r"names the tower 'judges': expected one of \['judge'\]",
        ),
        (Pass(context="a", ids=[4], tower="judge"), "context 'a' is of the tower ''"),
        (Pass(context="b", ids=[4], tower="judge", forks="a"), "of the tower 'judge' forks 'a'"),
        (Pass(context="a", ids=[10**6]), "expected them below"),
    ],
)
def test_a_wrong_pass_fails_its_sequence_alone(wrong: Pass, reason: str) -> None:
    errors, outputs = scripted([BEGIN, [wrong]], [None, None])

    assert not outputs
    with pytest.raises(BugError, match=reason):
        raise errors["scripted"]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (NewTokens(ids=[10**6]), "emits token ids from"),
        (NewTokens(ids=[], ended=True), "ended without a token"),
    ],
)
def test_wrong_tokens_fail_their_sequence_alone(returned: NewTokens, reason: str) -> None:
    errors, outputs = scripted([BEGIN], [returned])

    assert not outputs
    with pytest.raises(BugError, match=reason):
        raise errors["scripted"]


def test_a_program_may_end_an_answer_early_and_after_its_last_tokens() -> None:
    again = [Pass(context="a", ids=[4])]

    errors, outputs = scripted([BEGIN, again], [NewTokens(ids=[7, 8]), NewTokens(ids=[], ended=True)])

    assert not errors
    assert [(one.token_ids, one.finish) for one in outputs if isinstance(one, EmissionOutput)] == [
        ((7, 8), None),
        ((), FinishReason.LENGTH),
    ]


def test_broken_weights_emit_nothing() -> None:
    node = infill_node()
    by = make_engine(node, **SIZES)
    by.add(PROMPTS["plain 0"])
    with torch.no_grad():
        node.model.model.norm.weight.fill_(torch.nan)

    errors, outputs = failures_of(by)

    assert not outputs
    assert isinstance(errors["plain 0"], WorkerError)
    assert "not numbers" in str(errors["plain 0"])
