"""Making the next things while the present one is used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, Queue
from typing import Generic, TypeVar

Key = TypeVar("Key")
Made = TypeVar("Made")
AHEAD = 1  # things that lie ready; one more is in the making


class Prefetch(Generic[Key, Made]):
    """`make(key)` for keys in their order, by a thread of its own that stays a few keys ahead.

    What `make` raises, `take` raises when its key's turn comes. Close it, or use `prefetching`.
    """

    def __init__(self, make: Callable[[Key], Made], keys: Sequence[Key], ahead: int = AHEAD) -> None:
        self._make = make
        self._left = len(keys)
        self._ready: Queue[tuple[Made | None, BaseException | None]] = Queue(maxsize=ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(keys,), name="prefetch", daemon=True)
        self._thread.start()

    def take(self) -> Made:
        """The next key's thing, as soon as it is there. Raises IndexError behind the last key."""
        if not self._left:
            raise IndexError("nothing is left to take")
        made, error = self._ready.get()
        self._left = 0 if error is not None else self._left - 1
        if error is not None:
            raise error
        return made  # type: ignore[return-value] # there where no error is

    def close(self) -> None:
        """Stop making; what lies ready is dropped. Returns when the thread has ended."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)
            except Empty:
                continue

    def _work(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if self._closed.is_set():
                return
            try:
                self._ready.put((self._make(key), None))
            except BaseException as error:  # noqa: BLE001 - raised where the thing is taken
                self._ready.put((None, error))
                return


@contextmanager
def prefetching(make: Callable[[Key], Made], keys: Sequence[Key], ahead: int = AHEAD) -> Iterator[Prefetch[Key, Made]]:
    prefetch = Prefetch(make, keys, ahead)
    try:
        yield prefetch
    finally:
        prefetch.close()
