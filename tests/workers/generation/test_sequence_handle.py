"""Emissions of token programs become text, chunks and items of streams."""

from shared.events import OutputChunk
from tests.workers.harness import EOS, ByteDecoder
from workers.generation.generated_text import GeneratedText
from workers.generation.output_chunks import Chunker, OutputState, OutputStream
from workers.generation.sequence_handle import SequenceHandle
from workers.kv_engine.outputs import EmissionOutput
from workers.kv_engine.sequence_spec import FinishReason

Items = list[tuple[int, int]]


def handle(posted: list[OutputChunk], items: Items, *, stop: tuple[str, ...] = ()) -> SequenceHandle:
    chunker = Chunker(OutputState(), request_id="r", attempt=1)
    text = GeneratedText(ByteDecoder(), max_tokens=12, eos_ids=[EOS], stop=stop)
    output = OutputStream(chunker, lambda chunk, _stored: posted.append(chunk))
    return SequenceHandle("r.llm", text, output, on_item=lambda *item: items.append(item))


def emission(
    text: bytes, index: int = 0, *, finish: FinishReason | None = None, forwards: int = 1
) -> EmissionOutput:
    return EmissionOutput(
        key="r.llm", token_ids=tuple(text), index=index, finish=finish, step=1, counts={"forwards": forwards}
    )


async def test_an_emission_is_text_a_chunk_and_items() -> None:
    posted, items = list[OutputChunk](), Items()
    one = handle(posted, items)

    one.take(emission(b"abcd"))

    assert [(chunk.text, bytes(chunk.token_ids)) for chunk in posted] == [("abcd", b"abcd")]
    assert items == [(97, 0), (98, 1), (99, 2), (100, 3)]
    assert one.began.done()
    assert not one.ended.done()
    assert one.last_token == 100


async def test_a_stop_string_ends_the_answer_within_an_emission() -> None:
    posted, items = list[OutputChunk](), Items()
    one = handle(posted, items, stop=("cd",))

    one.take(emission(b"ab", forwards=3))
    one.take(emission(b"xcdy", 2, forwards=5))

    assert "".join(chunk.text for chunk in posted) == "abx"
    assert b"".join(bytes(chunk.token_ids) for chunk in posted) == b"abxcd"
    assert items == [(97, 0), (98, 1), (120, 2), (99, 3)]
    assert one.ended.done()
    assert (one.generated.finish_reason, one.counts) == ("stop", {"forwards": 5})


async def test_an_answer_that_ends_early_keeps_what_its_matcher_held_back() -> None:
    posted, items = list[OutputChunk](), Items()
    one = handle(posted, items, stop=("cd",))
    one.take(emission(b"abc"))

    one.take(emission(b"", 3, finish=FinishReason.LENGTH))

    assert "".join(chunk.text for chunk in posted) == "ab"
    assert one.rest == "c"
    assert one.ended.done()
    assert (one.generated.finish_reason, one.generated.tokens) == ("length", 3)
