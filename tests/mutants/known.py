"""Faults that nobody can notice because they are none, and faults that the battery rightly doesn't see. By fault, the reason."""

from __future__ import annotations

#: the program means the same with the change: not counted.
EQUIVALENT: dict[str, str] = {}

#: a real fault that the battery doesn't notice, and why: counted as a survivor.
SURVIVORS: dict[str, str] = {}
