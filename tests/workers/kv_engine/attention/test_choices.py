"""The keys that an indexer chooses: each token's choice is that of `generate`, whatever is beside it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from models.decoder_lm.nodes import DecoderLM, load
from models.transformers_lm.indexers import Indexed, scores
from shared.errors import BugError
from tests.tiny import Family, tiny_checkpoint
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import clear_text, generate, ids, run
from workers.kv_engine import engine as kv_engine
from workers.kv_engine.attention import choices
from workers.kv_engine.attention.choices import ChosenKeys
from workers.kv_engine.attention.span_groups import Group, group_spans
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.step import Spans

INDEXED: list[Family] = ["deepseek_v32", "glm_dsa"]
TOKENS = 48
TOP, DIM, BLOCK = 4, 6, 4
CPU = torch.device("cpu")


# ---- one step ------------------------------------------------------------------------------------------


def spans_of(*texts: tuple[int, int, int]) -> Spans:
    """Return spans of (tokens in the prompt, keys, tokens that are computed), in blocks of their own."""
    lengths, counts = [keys for _, keys, _ in texts], [count for *_, count in texts]
    columns = -(-max(lengths) // BLOCK)
    tables = np.arange(len(texts) * columns, dtype=np.int32).reshape(len(texts), columns)
    return Spans(
        query_offsets=np.cumsum([0, *counts]).astype(np.int32),
        kv_lengths=np.array(lengths, np.int32),
        block_tables=tables[:, ::-1].copy(),
        block_size=BLOCK,
        prompt_lengths=np.array([prompt for prompt, *_ in texts], np.int32),
    )


def drawn(spans: Spans, *, heads: int, seed: int = 0) -> tuple[Indexed, torch.Tensor]:
    """Return an indexer's results for the tokens of a step, and the rows of its layer, (slots, 1, 9)."""
    by = torch.Generator().manual_seed(seed)
    tokens = int(spans.query_offsets[-1])
    cells = torch.randn(spans.block_tables.size * BLOCK, 1, 3 + DIM, generator=by)
    indexed = Indexed(
        layer=0,
        top=TOP,
        queries=torch.randn(tokens, heads, DIM, generator=by),
        keys=torch.randn(tokens, DIM, generator=by),
        weights=torch.randn(tokens, heads, generator=by),
        scale=0.5,
    )
    return indexed, cells


def seen_keys(group: Group) -> list[list[int]]:
    """Return the sorted slots that each token of a group attends to."""
    slots = group.slots.view(group.spans, -1)
    found = []
    for place in range(len(group.tokens)):
        at = place if group.kept is None else int(group.kept[place])
        span, query = (at, 0) if group.kept is None else divmod(at, len(group.queries) // group.spans)  # type: ignore[arg-type]
        mask = torch.zeros(slots.shape[1]) if group.mask is None else group.mask[span, 0, query]
        found.append(sorted({int(slot) for slot, value in zip(slots[span], mask, strict=True) if value == 0}))
    return found


def chosen(spans: Spans, indexed: Indexed, cells: torch.Tensor) -> dict[int, list[int]]:
    """Return the slots that each token of a step attends to."""
    whole = group_spans(spans, device=CPU, dtype=torch.float32)
    groups = ChosenKeys(spans, CPU).groups(indexed, cells, whole)
    return {
        int(token): slots
        for group in groups
        for token, slots in zip(group.tokens, seen_keys(group), strict=True)
    }


def by_hand(spans: Spans, indexed: Indexed, cells: torch.Tensor) -> dict[int, list[int]]:
    """Return the same, token by token, from a row as long as the one that `generate` has."""
    found = {}
    for span in range(len(spans.kv_lengths)):
        slots = (spans.block_tables[span][:, None] * BLOCK + np.arange(BLOCK)).ravel()
        first, end = spans.query_offsets[span : span + 2].tolist()
        for token in range(first, end):
            seen = int(spans.kv_lengths[span]) - end + token + 1
            assert spans.prompt_lengths is not None
            row = torch.full((max(seen, int(spans.prompt_lengths[span])),), float("-inf"))
            at = torch.from_numpy(slots[:seen]).long()
            row[:seen] = scores(
                indexed.queries[None, token, None],
                indexed.weights[None, token, None],
                cells[None, at, 0, 3:],
                scale=0.5,
            )
            best = row.topk(min(TOP, len(row))).indices.tolist()
            found[token] = sorted(int(slots[place]) for place in best if place < seen)
    return found


STEPS = [
    spans_of((9, 9, 9)),
    spans_of((30, 9, 5), (12, 12, 12), (7, 3, 3), (5, 21, 1)),
    spans_of((5, 21, 1), (9, 13, 1), (4, 4, 1), (30, 31, 1)),
    spans_of((5, 12, 1), (9, 12, 1)),
    spans_of((40, 40, 40), (5, 19, 3)),
]


@pytest.mark.parametrize("spans", STEPS)
@pytest.mark.parametrize("heads", [1, 2, 16])
@pytest.mark.parametrize("piece", [1, choices.PIECE])
def test_a_choice_is_made_from_a_row_of_its_own(
    spans: Spans, heads: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one head, half of the scores are equal; and each token gets its choice as if it were alone."""
    monkeypatch.setattr(choices, "PIECE", piece)
    for seed in range(5):
        indexed, cells = drawn(spans, heads=heads, seed=seed)

        assert chosen(spans, indexed, cells) == by_hand(spans, indexed, cells)


def test_layers_that_share_a_choice_share_the_groups() -> None:
    spans = STEPS[1]
    indexed, cells = drawn(spans, heads=16)
    whole = group_spans(spans, device=CPU, dtype=torch.float32)
    one = ChosenKeys(spans, CPU)

    assert one.groups(indexed, cells, whole) is one.groups(indexed, cells, whole)
    assert one.groups(replace(indexed, layer=1), cells, whole) is not one.groups(indexed, cells, whole)


def test_tokens_whose_choice_depends_on_the_prompts_length_are_told() -> None:
    """The scores of all keys are 0 in the second span alone, whose first tokens see no more than four."""
    spans = spans_of((9, 9, 5), (12, 7, 6), (20, 20, 1))
    indexed, cells = drawn(spans, heads=16)
    indexed.weights[5:11] = 0
    one = ChosenKeys(spans, CPU)
    one.groups(indexed, cells, group_spans(spans, device=CPU, dtype=torch.float32))

    assert one.ties() == [None, 3, None], "of keys 2 to 7, the fifth is the first one too many"


def test_a_step_without_the_lengths_of_its_prompts_is_a_bug() -> None:
    with pytest.raises(BugError, match="lengths of its prompts"):
        ChosenKeys(replace(STEPS[0], prompt_lengths=None), CPU)


# ---- in the engine -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=INDEXED)
def node(request: pytest.FixtureRequest) -> DecoderLM:
    return load(tiny_checkpoint(request.param))


def family_of(node: DecoderLM) -> Family:
    return "deepseek_v32" if node.architecture == "DeepseekV32ForCausalLM" else "glm_dsa"


def engine(node: DecoderLM, **changes: Any) -> KVEngine:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "max_step_tokens": 9, "max_sequences": 4}
    return make_engine(node, **(sizes | changes))


def spec(key: str, text: list[int], tokens: int = TOKENS) -> SequenceSpec:
    return SequenceSpec(key=key, prompt_ids=text, max_tokens=tokens)


@pytest.mark.slow
def test_a_common_prefix_is_shared_where_it_is_the_same(node: DecoderLM) -> None:
    """A later turn of a chat, a longer prompt, and an equal one: each answers as it does alone."""
    family = family_of(node)
    text, answer = clear_text(family, 38, TOKENS)
    turns = [text, [*text, *answer[:30]], [*text, 3, 4, 5], text, [*text, *answer[:30]]]
    one = engine(node)

    found, hits = [], []
    for number, turn in enumerate(turns):
        before = one.stats().cache.hits
        found.append(ids(run(one, [spec(str(number), turn)])[str(number)]))
        hits.append(one.stats().cache.hits - before)

    assert found == [generate(family, turn, TOKENS) for turn in turns]
    assert hits[3:] == [32, 64], "an equal prompt finds all full blocks, but for the last token"
    if family == "glm_dsa":  # its scores are hardly ever equal
        assert hits[1:3] == [64, 32]
    else:
        assert max(hits[1:3]) < 32


@pytest.mark.slow
def test_sharing_what_depends_on_the_prompts_length_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a prefix is shared although equal scores were decided by another length."""
    monkeypatch.setattr(ChosenKeys, "ties", lambda self: [None] * (len(self._offsets) - 1))
    one = engine(load(tiny_checkpoint("deepseek_v32")))
    differing = 0
    for length in (38, 66, 90, 120):
        text, answer = clear_text("deepseek_v32", length, TOKENS)
        turn = [*text, *answer[:30]]
        run(one, [spec("a", text)])
        differing += ids(run(one, [spec("b", turn)])["b"]) != generate("deepseek_v32", turn, TOKENS)

    assert differing
    assert one.stats().cache.hits > 38 + 66 + 90 + 120


@pytest.mark.slow
def test_preempted_sequences_answer_as_generate_does(node: DecoderLM) -> None:
    family = family_of(node)
    texts, answers = zip(*(clear_text(family, length, TOKENS) for length in (6, 38, 66, 21)), strict=True)
    crowded = engine(node, num_blocks=22)

    found = run(crowded, [spec(str(number), text) for number, text in enumerate(texts)])

    assert [ids(found[str(number)]) for number in range(4)] == [*answers]
    assert crowded.stats().cache.preemptions > 0
    assert len({token for answer in answers for token in answer}) > 60


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [1, 20, 40])
def test_a_resumed_answer_has_the_choices_of_the_first_attempt(node: DecoderLM, resumed: int) -> None:
    """The released tokens are computed in one step; each chooses as it did when it was generated."""
    text, answer = clear_text(family_of(node), 38, TOKENS)

    found = run(engine(node, max_step_tokens=100), [replace(spec("a", text), prefix_ids=answer[:resumed])])

    assert ids(found["a"]) == answer[resumed:]


@pytest.mark.slow
def test_a_neighbour_changes_no_answer(node: DecoderLM) -> None:
    family = family_of(node)
    text, answer = clear_text(family, 38, TOKENS)
    others = [clear_text(family, length, 1)[0] for length in (5, 90, 150)]

    found = run(
        engine(node, max_step_tokens=40), [spec("a", text), *(spec(str(n), o) for n, o in enumerate(others))]
    )

    assert ids(found["a"]) == answer


# ---- negative controls ---------------------------------------------------------------------------------


def differs(family: Family, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether all of some answers differ from those of `generate`."""
    monkeypatch.setattr(kv_engine, "check_node", lambda *_: None)
    texts, answers = zip(*(clear_text(family, length, TOKENS) for length in (15, 38, 66)), strict=True)
    found = run(
        engine(load(tiny_checkpoint(family)), max_step_tokens=50),
        [spec(str(number), text) for number, text in enumerate(texts)],
    )
    return all(ids(found[str(number)]) != answer for number, answer in enumerate(answers))


@pytest.mark.slow
@pytest.mark.parametrize("family", INDEXED)
def test_attention_to_all_keys_is_detected(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChosenKeys, "groups", lambda _, __, ___, whole: whole)

    assert differs(family, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("family", INDEXED)
@pytest.mark.parametrize("more", [1, -1])
def test_one_key_more_or_less_is_detected(family: Family, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ChosenKeys.groups

    def other(
        self: ChosenKeys, indexed: Indexed, cells: torch.Tensor, whole: Sequence[Group]
    ) -> Sequence[Group]:
        return groups(self, replace(indexed, top=indexed.top + more), cells, whole)

    monkeypatch.setattr(ChosenKeys, "groups", other)

    assert differs(family, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["keys of the token before", "no weights"])
@pytest.mark.parametrize("family", INDEXED)
def test_other_scores_are_detected(family: Family, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(queries: Any, weights: Any, keys: Any, *, scale: float) -> torch.Tensor:
        if change == "no weights":
            return scores(queries, torch.ones_like(weights), keys, scale=scale)
        return scores(queries, weights, keys.roll(1, dims=1), scale=scale)

    monkeypatch.setattr(choices, "scores", other)

    assert differs(family, monkeypatch)


@pytest.mark.slow
def test_a_layer_with_another_choice_than_the_one_before_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM's third layer attends to what the second one has chosen; here to what the first one has."""
    groups, made = ChosenKeys.groups, list[Sequence[Group]]()

    def other(
        self: ChosenKeys, indexed: Indexed, cells: torch.Tensor, whole: Sequence[Group]
    ) -> Sequence[Group]:
        made.append(groups(self, indexed, cells, whole))
        return made[-3] if len(made) % 4 == 3 else made[-1]

    monkeypatch.setattr(ChosenKeys, "groups", other)

    assert differs("glm_dsa", monkeypatch)


@pytest.mark.slow
def test_equal_scores_decided_by_the_step_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows as long as what happens to be computed together."""
    init = ChosenKeys.__init__

    def other(self: ChosenKeys, spans: Spans, device: torch.device) -> None:
        init(self, spans, device)
        self._rows = self._seen + 17  # type: ignore[misc]

    monkeypatch.setattr(ChosenKeys, "__init__", other)

    assert differs("deepseek_v32", monkeypatch)
