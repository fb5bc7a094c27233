"""A few faults of every kind, each of which has to be noticed; ``python -m tests.mutants`` plants hundreds."""

from __future__ import annotations

from tests.mutants.__main__ import comm_work, in_processes, source_work
from tests.mutants.battery import CASES, Battery
from tests.mutants.source import faults

#: what has to be noticed, and by whom (the beginning of the checker's name).
FAULTS = {
    "rules.strategies strategies: PARTIAL_SUM → REPLICATE": "row check",
    "runtime.ops _inside: index - start → index + start": "row check",
    "layout.sharding Sharding.starts: index * local → index // local": "",
    "layout.reshard step_kind: 'reduce_scatter' → 'all_reduce'": "verifier",
    "passes.insert_collectives _Inserter.output: have.on(axis) == REPLICATE → have.on(axis) != REPLICATE": "",
    "passes.insert_collectives _Inserter.output: REPLICATE → PARTIAL_SUM (number 2)": "",
    "passes.buckets make_buckets: members[-1].offset + members[-1].numel → members[-1].offset - members[-1].numel": "verifier",
    "passes.buckets bucketize: if axis in bucket.partial: continue → dropped": "",
    "passes.microbatch _Splitter.final: if held.placement == REPLICATE: return held.name → dropped": "",
    "codegen.emit Emitter.region: wait(node.refs()) → dropped": "verify",
    "runtime.executor own: index * part → index // part": "verify",
    "runtime.executor paste: x.copy_(piece.reshape(sharding.local_atoms(mesh))) → dropped": "verify",
}
COMMS = ("all-reduce: the last rank is off by 1e-9", "all-gather: the first piece twice", "reduce-scatter: average instead of sum")


def test_faults_are_noticed() -> None:
    battery = Battery((*CASES[:2], *CASES[6:9]))
    battery.warm()
    planted = {str(f): f for f in faults() if str(f) in FAULTS}
    assert set(planted) == set(FAULTS), "the sources have changed: choose others"
    works = [(name, source_work(battery, f)) for name, f in planted.items()] + [(name, comm_work(battery, name)) for name in COMMS]
    verdicts = {name: verdict for name, verdict, _ in in_processes(works, 2)}
    assert [name for name, v in verdicts.items() if not v.by or v.by == "no code"] == []
    assert {n: verdicts[n].by for n, by in FAULTS.items() if not verdicts[n].by.startswith(by)} == {}
