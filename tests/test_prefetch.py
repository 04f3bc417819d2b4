"""Things made ahead come in order, once each, and the thread that makes them never outlives its use."""

from __future__ import annotations

import threading
import time

import pytest

from data.prefetch import Prefetch, prefetching


def threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


def test_things_come_in_order_and_only_some_lie_ready() -> None:
    made: list[int] = []

    def make(key: int) -> int:
        made.append(key)
        return key * key

    with prefetching(make, range(3, 20), ahead=2) as prefetch:
        assert prefetch.take() == 9
        deadline = time.monotonic() + 10
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert made == [3, 4, 5, 6]  # one taken, two ready, one waiting for its place
        assert [prefetch.take() for _ in range(16)] == [key * key for key in range(4, 20)]
        with pytest.raises(IndexError):
            prefetch.take()
    assert threads() == 0


def test_what_goes_wrong_is_raised_when_its_turn_comes() -> None:
    def make(key: int) -> int:
        if key == 2:
            raise ValueError("no second thing")
        return key

    with prefetching(make, range(5)) as prefetch:
        assert [prefetch.take(), prefetch.take()] == [0, 1]
        with pytest.raises(ValueError, match="no second thing"):
            prefetch.take()
        with pytest.raises(IndexError):
            prefetch.take()


def test_an_error_of_the_user_ends_the_thread() -> None:
    with pytest.raises(KeyboardInterrupt), prefetching(lambda key: key, range(1000)) as prefetch:
        prefetch.take()
        raise KeyboardInterrupt
    assert threads() == 0


def test_nothing_to_make_is_nothing_to_take() -> None:
    prefetch: Prefetch[int, int] = Prefetch(lambda key: key, [])
    with pytest.raises(IndexError):
        prefetch.take()
    prefetch.close()
