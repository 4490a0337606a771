from dalsegno.history import describe
from shared.events import Inputs, OutputChunk, RequestSubmitted, WalkCompleted, WalkResult


def test_the_text_of_a_chunk_keeps_its_blanks() -> None:
    assert describe.why(OutputChunk(index=2, token_ids=[7], text=" the\n")) == "chunk 2: 1 token ' the\\n'"
    assert describe.why(OutputChunk(text="ok")) == "chunk 0: 0 tokens 'ok'"


def test_what_was_asked_is_shown_as_json() -> None:
    asked = Inputs(messages=[{"role": "user", "content": "What's “it”?"}])
    assert '[{"role":"user","content":"What\'s “it”?"}]' in describe.why(
        RequestSubmitted(model="m", inputs=asked)
    )


def test_facts_are_shown_as_json() -> None:
    done = WalkCompleted(rank=0, results=[WalkResult(name="decode", facts={"ok": True, "n": 3})])
    assert '{"ok":true,"n":3}' in describe.why(done)


def test_what_is_long_is_cut_and_says_so() -> None:
    shown = describe.why(OutputChunk(text="x" * 1000))
    assert shown.endswith("x…")
    assert len(shown) < 130
