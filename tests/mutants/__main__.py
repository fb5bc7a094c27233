"""``python -m tests.mutants``: plants faults in communication and in the sources, and sees who notices.

Every fault is planted in a process of its own, forked after all is loaded and captured. Writes docs/mutants.md.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tabulate import tabulate

from tests.mutants.battery import Battery, Verdict
from tests.mutants.comm import COMMS
from tests.mutants.known import EQUIVALENT, SURVIVORS
from tests.mutants.source import Fault, faults, sample

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mutants.md"
CHECKERS = (
    "row check", "verifier", "an error while compiling", "verify: an error", "verify: a difference", "verify: replicas differ",
    "never ends",
)  # fmt: skip
#: seconds of one fault: of a processor, and by the clock (a deadlock uses no processor).
CPU, WALL = 60, 240

TEXT = """# Seeded faults

Written by `python -m tests.mutants --count {count} --seed {seed}`; a fault is one change of one function, made by operators over the syntax
tree (tests/mutants/source.py), or a simulated transport that goes wrong in one way (tests/mutants/comm.py). Each is planted in a process
of its own, in which the battery runs (tests/mutants/battery.py): the check of {rows} rows, then `verify` with the verifier after every
pass on {cases} small models, four of them under random layouts. Who notices first is counted; *an error while compiling* is any
exception of a pass that isn't the verifier's. Faults of the rules themselves are another study: tests/rules/mutants.py.

Of {possible} possible changes of {functions} functions {sampled} were drawn (functions in turn, operators in turn), and all {comms} faults
of communication were taken. {equivalent} of the changes are none: the program means the same (listed below). Of the other
**{total} faults {caught} are caught: {share:.1%}**; without those of communication {source_caught} of {source_total}:
{source_share:.1%}. Cases were added to the battery where an earlier run of this sample showed a gap: another seed is the fairer measure.

{table}

## Faults that nobody notices

{survivors}

## Changes that are none

{none}

## By operator

{operators}
"""


def in_processes(works: list[tuple[str, Callable[[], Verdict]]], jobs: int) -> Iterator[tuple[str, Verdict, float]]:
    """Each work in a forked process, so many at a time; results as they come."""
    left, running = works[::-1], {}
    while left or running:
        while left and len(running) < jobs:
            name, work = left.pop()
            read, write = os.pipe()
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _child(work, write)
            os.close(write)
            running[read] = (pid, name, time.monotonic())
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for read, (pid, name, begun) in list(running.items()):
            seconds = time.monotonic() - begun
            if read in ready:
                data = b""
                while block := os.read(read, 65536):
                    data += block
                verdict = pickle.loads(data) if data else Verdict("never ends", "more processor time than allowed, or a crash")
            elif seconds > WALL:
                os.kill(pid, signal.SIGKILL)
                verdict = Verdict("never ends", f"more than {WALL} s")
            else:
                continue
            os.waitpid(pid, 0)
            os.close(read)
            del running[read]
            yield name, verdict, seconds


def _child(work: Callable[[], Verdict], write: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os.write(write, pickle.dumps(work()))
    finally:
        os._exit(0)


def source_work(battery: Battery, fault: Fault) -> Callable[[], Verdict]:
    def work() -> Verdict:
        try:
            fault.plant()
        except SyntaxError as error:
            return Verdict("no code", str(error))
        return battery.judge(fault.module)

    return work


def comm_work(battery: Battery, name: str) -> Callable[[], Verdict]:
    def work() -> Verdict:
        for case in battery.cases:
            verdict = battery.run(case, COMMS[name])
            if verdict.by:
                return verdict
        return Verdict("")

    return work


def page(results: dict[str, tuple[str, Verdict]], count: int, seed: int, battery: Battery) -> tuple[str, float]:
    """The page and the share that is caught. ``results``: a fault to its operator and its verdict."""
    from tests.mutants.battery import ROWS

    real = {k: v for k, v in results.items() if k not in EQUIVALENT and v[1].by != "no code"}
    missed = [k for k, (_, v) in real.items() if not v.by]
    rows = []
    for title in ("communication", "layout", "rules", "plan", "passes", "codegen", "runtime", "step", "all"):
        found = Counter(v.by for k, (_, v) in real.items() if title in ("all", _room(k)))
        total = found.total()
        if total:
            rows.append([title, total, *(found[c] or "" for c in CHECKERS), found[""] or "", f"{1 - found[''] / total:.1%}"])
    operators: dict[str, Counter[str]] = {}
    for operator, v in real.values():
        operators.setdefault(operator, Counter())["caught" if v.by else "missed"] += 1
    everything = list(faults())
    none = [(k, EQUIVALENT[k]) for k in results if k in EQUIVALENT]
    share = 1 - len(missed) / max(1, len(real))
    sampled = sum(not k.startswith("comm:") for k in results)

    def listed(pairs: list[tuple[str, str]]) -> str:
        return "\n".join(f"- `{k.replace('`', '')}`: {why}" for k, why in pairs) or "none"

    of_sources = [v.by for k, (_, v) in real.items() if not k.startswith("comm:")]
    noticed = sum(map(bool, of_sources))
    by_operator = [(o, c.total(), c["caught"]) for o, c in sorted(operators.items())]
    text = TEXT.format(
        count=count, seed=seed, rows=len(ROWS), cases=len(battery.cases), possible=len(everything),
        functions=len({(f.module, f.function) for f in everything}), sampled=sampled, comms=len(COMMS), equivalent=len(none),
        total=len(real), caught=len(real) - len(missed), share=share, source_caught=noticed, source_total=len(of_sources),
        source_share=noticed / max(1, len(of_sources)),
        table=tabulate(rows, ("", "faults", *CHECKERS, "nobody", "caught"), tablefmt="github"),
        survivors=listed([(k, SURVIVORS.get(k, "no reason known: a hole")) for k in missed]), none=listed(none),
        operators=tabulate(by_operator, ("operator", "faults", "caught"), tablefmt="github"),
    )  # fmt: skip
    return text, share


def _room(fault: str) -> str:
    return "communication" if fault.startswith("comm:") else re.split(r"\W", fault)[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="faults in the sources; those of communication are all taken")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="only faults whose name has this text, all of them; no page is written")
    parser.add_argument("--results", type=Path, help="a file of results: what is in it isn't run again")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    begun = time.monotonic()
    battery = Battery()
    battery.warm()
    chosen = sample(options.count if not options.only else 10**9, options.seed)
    chosen = [f for f in chosen if options.only in str(f)]
    operators = {str(f): f.operator for f in chosen} | {f"comm: {name}": "communication" for name in COMMS}
    known: dict[str, list[str]] = {}
    if options.results and options.results.exists():
        known = json.loads(options.results.read_text())
    works = [(f"comm: {name}", comm_work(battery, name)) for name in COMMS if options.only in f"comm: {name}"]
    works += [(str(f), source_work(battery, f)) for f in chosen]
    names = [name for name, _ in works]
    todo = [(name, work) for name, work in works if name not in known]
    print(f"{len(works)} faults, {len(todo)} to plant; ready after {time.monotonic() - begun:.0f} s", flush=True)
    for number, (name, verdict, seconds) in enumerate(in_processes(todo, options.jobs), 1):
        known[name] = [verdict.by, verdict.text]
        equal = " (equivalent)" if name in EQUIVALENT else ""
        print(f"{number}/{len(todo)} {seconds:.0f} s {name}: {verdict.by or 'NOBODY'}{equal} {verdict.text[:100]}", flush=True)
        if options.results:
            options.results.write_text(json.dumps(known, indent=1))
    results = {name: (operators[name], Verdict(*known[name])) for name in names}
    text, share = page(results, options.count, options.seed, battery)
    if not options.only:
        PAGE.write_text(text)
    missed = [n for n, (_, v) in results.items() if not v.by and n not in EQUIVALENT]
    print("\n".join(["nobody noticed:", *missed]) if missed else "all noticed")
    print(f"{share:.1%} caught, {time.monotonic() - begun:.0f} s")
    return 0 if share > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
