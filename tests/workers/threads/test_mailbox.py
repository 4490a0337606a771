from threading import Thread

from workers.threads.mailbox import Mailbox


def test_all_items_are_taken_at_once_in_order() -> None:
    box: Mailbox[int] = Mailbox(8)
    for item in range(3):
        assert box.try_put(item)

    assert box.take(wait=True) == [0, 1, 2]
    assert box.take(wait=False) == []


def test_a_full_box_refuses_unless_forced() -> None:
    box: Mailbox[int] = Mailbox(1)

    assert box.try_put(0)
    assert not box.try_put(1)
    assert box.try_put(2, force=True)
    assert box.take(wait=False) == [0, 2]


def test_put_waits_for_room_and_take_for_an_item() -> None:
    box: Mailbox[int] = Mailbox(1)
    writer = Thread(target=lambda: [box.put(item) for item in range(100)])
    writer.start()
    taken: list[int] = []
    while len(taken) < 100:
        items = box.take(wait=True)
        assert len(items) == 1
        taken += items
    writer.join()

    assert taken == list(range(100))


def test_closing_wakes_all_waiting_threads_and_keeps_the_items() -> None:
    empty: Mailbox[int] = Mailbox(1)
    full: Mailbox[int] = Mailbox(1)
    full.put(7)
    results: list[object] = []
    reader = Thread(target=lambda: results.append(empty.take(wait=True)))
    writer = Thread(target=lambda: results.append(full.put(8)))
    reader.start()
    writer.start()

    empty.close()
    full.close()
    reader.join()
    writer.join()

    assert sorted(map(repr, results)) == ["False", "[]"]
    assert full.take(wait=False) == [7]
    assert not full.try_put(9, force=True)
