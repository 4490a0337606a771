"""The JSON of a window's transcript: what the gateway reads of it."""

import msgspec

from models.speech_to_text.transcript import Segment, Transcript, Word, compression_ratio


def transcript(*segments: Segment) -> Transcript:
    return Transcript(
        language="",
        language_name="",
        duration=2.0,
        seek=0,
        next_seek=200,
        tokens=1,
        text="hello",
        segments=[*segments],
        final=True,
    )


def test_a_segment_has_all_its_fields_and_words_if_they_are_set() -> None:
    word = Word(word="hello", start=0.0, end=0.5, probability=1.0)
    plain = Segment(id=0, seek=0, start=0.0, end=0.0, text="")
    found = msgspec.json.decode(transcript(plain, msgspec.structs.replace(plain, words=[word])).encoded())
    first, second = found["segments"]
    assert {*first, "words"} == {*second} == {*Segment.__struct_fields__}


def test_repetitions_compress() -> None:
    assert compression_ratio("again " * 50) > 10
    assert 1 > compression_ratio("once") > compression_ratio("")
