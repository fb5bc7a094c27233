"""Progress: what a compilation is doing and how long each stage took, said on a stream once it takes longer than a person waits."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

#: seconds after which something is said.
PATIENCE = 2.0


class Progress:
    """The stages of one compilation, one after the other.

    On a terminal one line grows in place. Elsewhere a line says after ``PATIENCE`` seconds what is being done, and a last one what took
    how long. A shorter compilation says nothing.

    Args:
        what: ``GPT for dp=2,tp=2``.
        stream: where to say it; None says nothing and only keeps time.
        patience: seconds until something is said.
    """

    def __init__(self, what: str = "", stream: TextIO | None = None, patience: float = PATIENCE) -> None:
        #: seconds of every stage so far, in order; a stage that comes again adds up.
        self.seconds: dict[str, float] = {}
        self._what, self._stream, self._patience = what, stream, patience
        self._live = stream is not None and stream.isatty()
        self._begun = self._since = time.perf_counter()
        self._stage = ""
        self._said = 0.0  # when something was said last; 0: never

    def __enter__(self) -> Progress:
        self._begun = self._since = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()
        if self._stream is None or not self._said:
            return
        if error is None:
            took = time.perf_counter() - self._begun
            self._write(f"autopar compiled {self._what} in {took:.1f} s: {self._shown()}", end="\n")
        elif self._live:
            self._write("", end="\n")

    def at(self, stage: str) -> None:
        """A stage begins, and the one before it ends."""
        self._close()
        self._stage = stage
        self.seconds.setdefault(stage, 0.0)
        self.tick()

    def tick(self) -> None:
        """Called now and then by long stages: says what is being done when it is time to."""
        if self._stream is None:
            return
        now = time.perf_counter()
        if now - self._begun < self._patience or (self._said and not (self._live and now - self._said > 0.2)):
            return
        self._said = now
        done = self._shown(leave=self._stage)
        self._write(f"autopar compiles {self._what}: {done + ', ' if done else ''}{self._stage} ...", end="" if self._live else "\n")

    def _close(self) -> None:
        now = time.perf_counter()
        if self._stage:
            self.seconds[self._stage] += now - self._since
        self._since, self._stage = now, ""

    def _shown(self, leave: str = "") -> str:
        return ", ".join(f"{name} {s:.1f} s" for name, s in self.seconds.items() if name != leave and s >= 0.05)

    def _write(self, text: str, end: str) -> None:
        assert self._stream is not None
        self._stream.write(("\r\x1b[K" if self._live else "") + text + end)
        self._stream.flush()


__all__ = ["PATIENCE", "Progress"]
