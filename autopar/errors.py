"""The error family and its one formatter: what went wrong, where, why, and what to try."""

from __future__ import annotations

from typing import Self


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose.

    Args:
        what: one sentence, what went wrong.
        where: the place in the user's file or the program (``model.py:12 in blocks.0.attn``).
        why: the reason, when it is not in ``what``.
        hint: what to try.

    Attributes:
        everywhere: every rank raises it, with one text, and none is left waiting: the next call can be a good one.
    """

    everywhere = False

    def __init__(self, what: str, *, where: str = "", why: str = "", hint: str = "") -> None:
        self.what, self.where, self.why, self.hint = what, where, why, hint
        super().__init__(format_error(what, where, why, hint))

    def alike(self) -> Self:
        """The same error, known to be raised by every rank."""
        self.everywhere = True
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.why, self.hint))


def _rebuild(kind: type[AutoparError], what: str, where: str, why: str, hint: str) -> AutoparError:
    return kind(what, where=where, why=why, hint=hint)


def format_error(what: str, where: str = "", why: str = "", hint: str = "") -> str:
    """The text of an error: one line of what, then a line each for where, why and try."""
    lines = [what]
    lines += [f"  {name}: {text}" for name, text in (("where", where), ("why", why), ("try", hint)) if text]
    return "\n".join(lines)


class CaptureError(AutoparError):
    """The model can't be captured as one graph without losing something."""


class RuleError(AutoparError):
    """An op has no row, or a row doesn't fit the op's shapes."""


class PlanError(AutoparError):
    """No plan satisfies the pins, or two pins contradict each other."""


class LayoutError(AutoparError):
    """A mesh, sharding or plan text is not well formed."""


class VerifyError(AutoparError):
    """A program broke an invariant of the compiler: a fault of autopar, not of the user."""


class InputError(AutoparError):
    """A batch, label, weight or argument given by the user can't be used."""


class CommError(AutoparError):
    """A collective failed, or ranks disagree or wait for each other for ever."""


class UnsupportedError(AutoparError):
    """A feature that autopar doesn't have, asked for by name."""
