"""The progress line: on a terminal, after a while, and gone at the end."""

import io
import sys
import time

import pytest

from dicp.runtime import progress


class Terminal(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


def shown(monkeypatch: pytest.MonkeyPatch, tty: bool, seconds: float) -> str:
    terminal = Terminal(tty)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "AFTER", 0.2)
    monkeypatch.setattr(progress, "EVERY", 0.05)
    with progress.Progress("graph7") as line:
        line.step = "build"
        time.sleep(seconds)
    return terminal.getvalue()


def test_slow_compile_on_a_terminal_is_announced_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, tty=True, seconds=0.6)
    assert "dicp: compiling graph7: build, 0." in text
    assert text.endswith("\r\x1b[K")


def test_quick_compile_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, tty=True, seconds=0.0) == ""


def test_no_terminal_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, tty=False, seconds=0.5) == ""
