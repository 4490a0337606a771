"""The division of entries into requests on the log."""

from gateway.media.sources import InlineSource
from gateway.texts.batches import BATCH_BYTES, batches_of
from gateway.texts.entries import Entry
from shared.events import MAX_TEXTS


def text(number: int, size: int = 1) -> Entry:
    return Entry(where=f"input[{number}]", text="a" * size)


def image(number: int) -> Entry:
    where = f"input[{number}]"
    return Entry(where=where, image=InlineSource(where=where, modality="image", data=b"x"))


def test_small_texts_are_one_request_in_their_order() -> None:
    [found] = batches_of([text(0), text(1)], ["q"])
    assert (found.order, found.text_places) == ([0, 1], ["input[0]", "input[1]"])
    inputs = found.inputs("score")
    assert (inputs.texts, inputs.queries, inputs.output_modalities) == (["a", "a"], ["q"], ["score"])


def test_the_rows_of_images_follow_those_of_the_texts() -> None:
    [found] = batches_of([image(0), text(1), image(2), text(3)])
    assert found.order == [1, 3, 0, 2]
    assert [one.where for one in found.images] == ["input[0]", "input[2]"]
    assert found.text_places == ["input[1]", "input[3]"]


def test_a_request_of_images_has_no_text() -> None:
    [found] = batches_of([image(0)])
    assert (found.inputs("embedding").texts, found.order) == ([], [0])


def test_large_texts_are_divided_and_all_images_are_in_the_first_request() -> None:
    half = BATCH_BYTES // 2
    found = batches_of([text(0, half), text(1, half), image(2), text(3, 3 * half), text(4)], ["q"])
    assert [one.order for one in found] == [[0, 1, 2], [3], [4]]
    assert [one.queries for one in found] == [["q"]] * 3


def test_each_text_keeps_its_own_query() -> None:
    queries = [f"{number}" * (BATCH_BYTES // 2) for number in range(3)]
    found = batches_of([text(0), image(1), text(2)], queries)
    assert [one.order for one in found] == [[0, 1], [2]]
    assert [one.queries for one in found] == [[queries[0], queries[1]], [queries[2]]]


def test_more_texts_than_an_event_may_have_are_divided() -> None:
    found = batches_of([text(0)] * (MAX_TEXTS + 1))
    assert [len(one.order) for one in found] == [MAX_TEXTS, 1]


def test_token_ids_count_as_they_are_stored() -> None:
    ids = Entry(where="input", text=[2**31 - 1] * (BATCH_BYTES // 5))
    assert len(batches_of([ids, ids])) == 2
