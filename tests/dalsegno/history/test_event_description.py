from dalsegno.history.event_description import summary_of
from shared.events import Inputs, NodeWork, OutputChunk, RequestSubmitted, WalkCompleted, WalkResult


def test_the_text_of_a_chunk_keeps_its_blanks() -> None:
    assert summary_of(OutputChunk(index=2, token_ids=[7], text=" the\n")) == "chunk 2: 1 token ' the\\n'"
    assert summary_of(OutputChunk(text="ok")) == "chunk 0: 0 tokens 'ok'"


def test_what_was_asked_is_shown_as_json() -> None:
    asked = Inputs(messages=[{"role": "user", "content": "What's “it”?"}])
    assert '[{"role":"user","content":"What\'s “it”?"}]' in summary_of(
        RequestSubmitted(model="m", inputs=asked)
    )


def test_facts_are_shown_as_json() -> None:
    done = WalkCompleted(rank=0, results=[WalkResult(name="decode", facts={"ok": True, "n": 3})])
    assert '{"ok":true,"n":3}' in summary_of(done)


def test_drafted_tokens_are_counted() -> None:
    work = {"llm": NodeWork(drafted=9, accepted=4, undrafted_steps=2), "other": NodeWork(undrafted_steps=2)}
    done = WalkCompleted(rank=0, results=[], work=work)
    assert summary_of(done).endswith("; llm accepted 4 of 9 drafted tokens, and drafted none in 2 steps")


def test_what_is_long_is_cut_and_says_so() -> None:
    shown = summary_of(OutputChunk(text="x" * 1000))
    assert shown.endswith("x…")
    assert len(shown) < 130
