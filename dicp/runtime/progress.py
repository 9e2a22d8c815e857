"""A line on the terminal for compiles that take a while, so that a compile can be told from a hang."""

from __future__ import annotations

import sys
import threading
import time

AFTER = 2.0  # seconds of silence first
EVERY = 0.5


class Progress:
    """Shows `dicp: compiling <name>: <step>, 3.5 s` while the compile runs; nothing without a terminal."""

    def __init__(self, name: str) -> None:
        self.name, self.step = name, "starting"
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if sys.stderr is not None and sys.stderr.isatty():
            self._thread = threading.Thread(target=self._show, name="dicp-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        start = time.monotonic()
        shown = False
        wait = AFTER
        while not self._done.wait(wait):
            wait = EVERY
            shown = True
            seconds = time.monotonic() - start
            text = f"\r\x1b[Kdicp: compiling {self.name}: {self.step}, {seconds:.1f} s"
            print(text, end="", file=sys.stderr)
            sys.stderr.flush()
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr)
            sys.stderr.flush()
