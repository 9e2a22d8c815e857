"""Where in a range of addresses there is room."""

from __future__ import annotations

import random

from dicp.runtime.spans import Span, Spans


def shown(spans: Spans) -> str:
    return " ".join(f"{s.start}-{s.end}{'w' if s.warm else 'c'}" for s in spans._free)


def test_the_smallest_warm_span_that_holds_it_is_taken_first() -> None:
    spans = Spans(100)
    assert [spans.take(n) for n in (20, 5, 10, 5, 10)] == [0, 20, 25, 35, 40]
    spans.give(0, 20)
    spans.give(25, 35)
    spans.give(40, 50)
    assert shown(spans) == "0-20w 25-35w 40-50w 50-100c"
    assert (spans.take(8), spans.take(10), spans.take(12)) == (25, 40, 0)
    assert shown(spans) == "12-20w 33-35w 50-100c"
    assert (spans.held, spans.warm) == (40, 10)


def test_a_piece_lies_away_from_what_is_held() -> None:
    """So that a chain of layers, each dropped before the next but one is made, meets no holes."""
    spans = Spans(100)
    spans.take(60)
    spans.give(0, 60)
    first, second = spans.take(20), spans.take(10)
    assert (first, second) == (0, 50)
    assert first is not None
    spans.give(first, 20)
    assert spans.take(45) == 0
    spans.give(0, 45)
    assert shown(spans) == "0-50w 60-100c"
    assert (spans.take(10), spans.take(10)) == (0, 10)  # held on both sides: the lower


def test_what_fits_in_no_warm_span_begins_in_one_that_cold_bytes_follow() -> None:
    spans = Spans(100)
    spans.take(10)
    spans.take(20)
    spans.give(10, 30)
    assert spans.take(30) == 10
    assert shown(spans) == "40-100c"


def test_it_ends_in_one_that_cold_bytes_come_before() -> None:
    spans = Spans(40)
    spans.take(40)
    spans.give(0, 10, warm=False)
    spans.give(10, 30)
    assert spans.take(25) == 5
    assert shown(spans) == "0-5c"
    assert spans.take(10) is None


def test_spans_that_touch_are_one_if_they_are_alike() -> None:
    spans = Spans(40)
    spans.take(40)
    for start, warm in ((0, True), (20, True), (30, False), (10, True)):
        spans.give(start, start + 10, warm)
    assert shown(spans) == "0-30w 30-40c"


def test_the_highest_warm_bytes_cool_first() -> None:
    spans = Spans(60)
    for start in (0, 20, 40):
        assert spans.take(20) == start
    spans.give(0, 20)
    spans.give(40, 60)
    assert spans.cool(25) == [Span(40, 60, True), Span(15, 20, True)]
    assert shown(spans) == "0-15w 15-20c 40-60c"
    assert spans.warm == 15
    assert spans.cool(100) == [Span(0, 15, True)]
    assert shown(spans) == "0-20c 40-60c"


def test_no_two_pieces_share_a_byte_whatever_is_taken_and_given() -> None:
    chance = random.Random(0)
    spans, held = Spans(1000), dict[int, int]()
    for _ in range(3000):
        if held and chance.random() < 0.5:
            start = chance.choice(list(held))
            spans.give(start, held.pop(start), chance.random() < 0.8)
        elif (start := spans.take(size := chance.randint(1, 120))) is not None:
            assert start + size <= 1000
            assert all(end <= start or start + size <= begin for begin, end in held.items())
            held[start] = start + size
        if chance.random() < 0.1:
            spans.cool(chance.randint(1, 100))
        free = spans._free
        assert all(a.end < b.start or a.end == b.start and a.warm != b.warm for a, b in zip(free, free[1:]))
        assert spans.held == sum(end - begin for begin, end in held.items())
        assert spans.warm == sum(s.size for s in free if s.warm)
        assert spans.held + sum(s.size for s in free) == 1000
