"""Timelines of a step with stages: as measured on every rank, and as the simulator predicts it from the measured times of the tasks.

A trace is in the format of Chrome's tracing, which Perfetto (ui.perfetto.dev) and chrome://tracing show; the picture is SVG.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from autopar.runtime.pipeline import Span
from autopar.schedule.action import Action, Schedule
from autopar.schedule.clock import Times, run
from autopar.schedule.edge import Edge, needs
from autopar.schedule.simulate import Result, bubble_of

#: kinds of spans that are a schedule's actions.
TASKS = ("F", "B", "I", "W")

#: one colour for each kind of span, in the trace's own names and for the picture.
COLOURS = {
    "F": ("thread_state_running", "#4c78a8"), "B": ("thread_state_iowait", "#f58518"), "I": ("thread_state_iowait", "#f58518"),
    "W": ("rail_animation", "#54a24b"), "pre": ("grey", "#9d9da1"), "post": ("grey", "#9d9da1"), "send": ("rail_load", "#b279a2"),
    "wait": ("terrible", "#f2cf5b"),
}  # fmt: skip


@dataclass(frozen=True)
class Timeline:
    """A step on all ranks that differ only along ``pp``.

    Attributes:
        edges: what the stages need of each other; where there are none, they form a chain.
        measured: of every rank its spans, in seconds since the first of them all began.
        predicted: the schedule under measured durations: of each task, of what its rank did until it looked for the next one, waiting
            left out, and of messages' ways. When a task ran and how long it was waited for don't enter.
    """

    schedule: Schedule
    measured: tuple[tuple[Span, ...], ...]
    predicted: Result
    edges: tuple[Edge, ...] = ()

    @property
    def bubble(self) -> float:
        """The measured share of the busiest rank's time, from its first task to its last, in which it ran none (pre and post left out)."""
        found = []
        for spans in self.measured:
            tasks = [s for s in spans if s.kind in TASKS]
            if tasks:
                found.append((max(s.end for s in tasks) - min(s.begin for s in tasks), sum(s.end - s.begin for s in tasks)))
        return bubble_of(found)

    def trace(self) -> dict[str, Any]:
        """Chrome's trace: one process for what was measured, one for what was predicted, a thread for each rank; microseconds."""
        events: list[dict[str, Any]] = []
        for pid, name in enumerate(("measured", "predicted")):
            events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for rank, spans in enumerate(self.measured):
            events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"pp={rank}"}})
            for s in spans:
                if s.waited > 0:
                    events.append(_event(0, rank, "wait", "wait", s.begin - s.waited, s.begin, s))
                events.append(_event(0, rank, s.label, s.kind, s.begin, s.end, s))
        for p in self.predicted.spans:
            events.append(_event(1, p.rank, p.label, p.kind, p.start, p.end, p))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def svg(self, width: int = 1200) -> str:
        """Two grids, measured and predicted, on one scale of time: a row for each rank, a box for each task, waits and sends below it."""
        longest = max([s.end for spans in self.measured for s in spans] + [self.predicted.makespan, 1e-9])
        scale, left, row = (width - 60) / longest, 50, 34
        parts: list[str] = []
        y = 20
        for title in ("measured", "predicted"):
            parts.append(f'<text x="4" y="{y}" font-weight="bold">{title}</text>')
            y += 8
            for rank in range(len(self.schedule.ranks)):
                parts.append(f'<text x="4" y="{y + 18}">pp={rank}</text>')
                if title == "measured":
                    for s in self.measured[rank]:
                        if s.waited > 0:
                            parts.append(_box(left + (s.begin - s.waited) * scale, y + 22, s.waited * scale, 5, "wait", ""))
                        below = s.kind == "send"
                        height, at = (5, y + 22) if below else (20, y)
                        label = "" if below or s.kind in ("pre", "post") else s.label
                        parts.append(_box(left + s.begin * scale, at, (s.end - s.begin) * scale, height, s.kind, label))
                else:
                    for p in (p for p in self.predicted.spans if p.rank == rank):
                        parts.append(_box(left + p.start * scale, y, (p.end - p.start) * scale, 20, p.kind, p.label))
                y += row
            y += 16
        legend = "".join(
            f'<rect x="{60 + 80 * k}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind][1]}"/>'
            f'<text x="{76 + 80 * k}" y="{y}">{kind}</text>'
            for k, kind in enumerate(("F", "B", "I", "W", "pre", "send", "wait"))
        )
        told = f"{self.schedule.name}: bubble measured {self.bubble:.3f}, predicted {self.predicted.bubble:.3f}; {longest * 1e3:.1f} ms"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 30}" font-family="sans-serif" font-size="11">'
            f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}{legend}<text x="4" y="{y + 22}">{escape(told)}</text></svg>\n'
        )

    def save(self, path: str | Path) -> Path:
        """Writes the trace to ``path`` and the picture beside it, with the suffix ``.svg``; gives the picture's path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.trace()))
        picture = path.with_suffix(".svg")
        picture.write_text(self.svg())
        return picture


def make_timeline(schedule: Schedule, ranks: Sequence[tuple[float, Sequence[Span]]], edges: Sequence[Edge] = ()) -> Timeline:
    """The timeline of a step.

    Args:
        ranks: for every coordinate along ``pp`` the time of the clock at which its step began, and its spans since then.
        edges: what stages need of each other; left out, they form a chain.
    """
    # differences of the clock first: a time of day leaves no digits for parts of a microsecond
    base = min(begun for begun, _ in ranks)
    zero = min(begun - base + s.begin - s.waited for begun, spans in ranks for s in spans)
    measured = tuple(tuple(s.later(begun - base - zero) for s in spans) for begun, spans in ranks)
    means = mean_times([s for spans in measured for s in spans])
    stages = range(schedule.stages)
    forward = [means.get((s, "F"), 0.0) for s in stages]
    # a whole backward takes I and W together, however that is divided
    whole = {s: means[s, "B"] for s in stages if (s, "B") in means}
    inputs = [means.get((s, "I"), whole.get(s, 0.0)) for s in stages]
    rest = [means.get((s, "W"), 0.0) for s in stages]
    tasks = {Action(s.stage, s.kind, s.microbatch): s for spans in measured for s in spans if s.kind in TASKS}
    # a stage may have nothing to do in a task
    single = {action: tasks[action].end - tasks[action].begin if action in tasks else 0.0 for action in schedule}
    waits = needs(schedule, edges)
    times = Times(forward, inputs, rest, 0.0, single, busy_after(measured), transits(schedule, waits, tasks))
    return Timeline(schedule, measured, Result(schedule, times, run(schedule.ranks, waits, times, schedule.placement)), tuple(edges))


def busy_after(measured: Sequence[Sequence[Span]]) -> dict[Action, float]:
    """Seconds from the end of each action until its rank looked for the next one: sends, ``post`` and the driver, not their waiting."""
    found: dict[Action, float] = {}
    for spans in measured:
        last: Span | None = None
        waited = 0.0
        for s in spans:
            if s.kind in TASKS:
                if last is not None:
                    found[Action(last.stage, last.kind, last.microbatch)] = max(0.0, s.begin - s.waited - last.end - waited)
                last, waited = s, 0.0
            else:
                waited += s.waited
    return found


def transits(schedule: Schedule, waits: Mapping[Action, Sequence[Action]], tasks: Mapping[Action, Span]) -> dict[tuple[int, int], float]:
    """Seconds from the end of a task until another rank had what it made, by (from, to).

    Only a rank that looked for a message before it was made sees all of its way: the median of those. Where none did, what no message of
    the link exceeded: the shortest time from a task's end to the beginning of the one that needed it.
    """
    seen: dict[tuple[int, int], list[float]] = {}
    most: dict[tuple[int, int], float] = {}
    for action, needed in waits.items():
        target, at = schedule.placement[action.stage], tasks.get(action)
        crossing = [tasks[n] for n in needed if schedule.placement[n.stage] != target and n in tasks]
        if at is None or not crossing:
            continue
        # with several messages the last one ends the wait
        made = max(crossing, key=lambda s: s.end)
        link, way = (schedule.placement[made.stage], target), max(0.0, at.begin - made.end)
        most[link] = min(way, most.get(link, way))
        if at.begin - at.waited <= made.end:
            seen.setdefault(link, []).append(way)
    return {link: median(seen[link]) if link in seen else way for link, way in most.items()}


def mean_times(spans: Sequence[Span]) -> Mapping[tuple[int, str], float]:
    """Mean seconds of a task by (stage, kind)."""
    sums: dict[tuple[int, str], list[float]] = {}
    for s in spans:
        sums.setdefault((s.stage, s.kind), []).append(s.end - s.begin)
    return {key: sum(found) / len(found) for key, found in sums.items()}


def _event(pid: int, tid: int, name: str, kind: str, begin: float, end: float, span: Any) -> dict[str, Any]:
    args = {"stage": span.stage, "microbatch": span.microbatch}
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, "cname": COLOURS[kind][0], "ts": begin * 1e6,
        "dur": (end - begin) * 1e6, "args": args,
    }  # fmt: skip


def _box(x: float, y: float, width: float, height: float, kind: str, label: str) -> str:
    size = f'width="{max(width, 0.3):.1f}" height="{height}"'
    box = f'<rect x="{x:.1f}" y="{y}" {size} fill="{COLOURS[kind][1]}" stroke="white" stroke-width="0.4"/>'
    if label and width > 7 * len(label):
        box += f'<text x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle" fill="white">{label}</text>'
    return box
