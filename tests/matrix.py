"""The full matrix: every model on every mesh under every variant or schedule, compared with the plain model in float64.

``python -m tests.matrix [--only TEXT] [--jobs N] [--fresh] [--page]``. Goes on where it stopped: results lie in out/matrix.json by case,
each with the hash of the sources that it holds for; what is missing is run first, then what is of other sources. Writes docs/matrix.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate

from autopar.compare import FLOOR, TOLERANCE
from tests.equality import cases
from tests.pipeline import cases as stages

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "out" / "matrix.json"
PAGE = ROOT / "docs" / "matrix.md"
TEXT = """# The matrix

Written by `make matrix`. Every cell is one run of `autopar.verify`: all ranks of the mesh simulated, three SGD steps, against
the plain model in one process. The number is the largest relative difference of any loss, gradient, parameter or buffer in
float64, where {allowed} is allowed; a tensor under {floor} of the largest of its kind is measured against that share. Copies of
one tensor on several ranks are equal to the last bit, or the cell fails.

{filled} {versions}.

{table}

Variants: `sequence, zero=2` is `Plan(sequence=True, zero=2, recompute="selective")`; `interleave=2` runs two microbatches side by side;
`zero=3` has two microbatches and `recompute="full"`; in these and in `zero=0` dropout has a probability of 0.3 everywhere the model has
it; `together` is sequence, two microbatches, dropout and small buckets at once. Rows of a
batch have different numbers of labels. `refused`: the loss isn't a sum over microbatches, since the model takes statistics of the
whole batch; compiling says so.

## With stages

Every model on meshes with `pp` under every schedule, with dropout, and with 1, 2 or 4 microbatches, ZeRO 0 to 3, sequence or not, and
no, full or selective recompute in turn. `refused`: the model calls fewer modules one after the other than there are stages.

{stages}

Models that cast to float32 inside are compared with their own run without those casts. The plain model as it is differs from
that run by rounding (float32; losses, gradients and parameters): {gaps}.
"""


def source_hash() -> str:
    """Of the package, the models and the cases, and the versions beneath them: a result holds for one of these."""
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for path in sorted([*(ROOT / "autopar").rglob("*.py"), *(ROOT / "models").glob("*.py"), Path(cases.__file__), Path(stages.__file__)]):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def everything() -> list[cases.Case | stages.Staged]:
    return [*cases.every(), *stages.every()]


def run_case(name: str) -> dict[str, Any]:
    """Verifies one case; what it raises is a result too."""
    torch.set_num_threads(1)
    case, begun = {str(c): c for c in everything()}[name], time.monotonic()
    try:
        if case.refused:
            return {"ok": True, "refused": case.refusal(), "worst": 0.0, "seconds": round(time.monotonic() - begun, 1), "error": ""}
        report = case.verify()
    except Exception:  # noqa: BLE001 (told in the page)
        return {"ok": False, "error": traceback.format_exc(), "seconds": round(time.monotonic() - begun, 1)}
    gap = max((row.difference for row in report.gaps), default=None)
    seconds = round(time.monotonic() - begun, 1)
    return {"ok": report.ok, "worst": report.worst, "gap": gap, "seconds": seconds, "error": "" if report.ok else report.table()}


def results_of(names: list[str], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Cases as they get ready; in this process for one job."""
    if jobs == 1:
        yield from ((name, run_case(name)) for name in names)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from zip(names, pool.map(run_case, names), strict=True)


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return "refused" if found.get("refused") else f"{found['worst']:.0e}" if found["ok"] else "FAILS"


def _table(results: dict[str, dict[str, Any]], own: Sequence[cases.Case | stages.Staged], meshes: Sequence[str], kind: str) -> str:
    rows = [
        [model, variant, *(_cell(results.get(f"{model} / {mesh} / {variant}")) for mesh in meshes)]
        for model, variant in dict.fromkeys((c.name, c.variant) for c in own)
    ]
    return tabulate(rows, headers=("model", kind, *meshes), tablefmt="github", disable_numparse=True)


def page(results: dict[str, dict[str, Any]]) -> str:
    """docs/matrix.md."""
    names = {str(c) for c in everything()}
    results = {name: found for name, found in results.items() if name in names}
    gaps = {}
    for case in everything():
        found = results.get(str(case))
        if found is not None and found.get("gap") is not None:
            gaps[case.name] = max(gaps.get(case.name, 0.0), found["gap"])
    worst = max((r["worst"] for r in results.values() if r["ok"]), default=0.0)
    failed, refused = sum(not r["ok"] for r in results.values()), sum("refused" in r for r in results.values())
    told = "; ".join(f"{name} {gap:.0e}" for name, gap in gaps.items())
    filled = f"{len(results)} of {len(names)} cells are filled, {failed} fail, {refused} are refused rightly; "
    filled += f"the largest difference is {worst:.1e}. Sources "
    counts = Counter(found["source"] for found in results.values())
    filled += ", ".join(f"{source} ({count})" for source, count in counts.most_common()) + ","
    return TEXT.format(
        allowed=f"{TOLERANCE[torch.float64]:.0e}", floor=f"{FLOOR:g}", filled=filled,
        table=_table(results, cases.every(), cases.MESHES, "variant"), stages=_table(results, stages.every(), stages.MESHES, "schedule"),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}", gaps=told or "no such cell is filled",
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--only", default="", help="only cases whose name has this text: model / mesh / variant")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--page", action="store_true", help="run nothing; the page of what is kept")
    options = parser.parse_args(arguments)
    source = source_hash()
    results: dict[str, dict[str, Any]] = {}
    if RESULTS.exists() and not options.fresh:
        results = json.loads(RESULTS.read_text())
    wanted = [str(c) for c in everything() if options.only in str(c)]
    missing = [name for name in wanted if name not in results or not results[name]["ok"]]
    older = [name for name in wanted if name in results and results[name]["ok"] and results[name]["source"] != source]
    todo = [] if options.page else missing + older
    print(f"{len(wanted)} cases, {len(wanted) - len(missing) - len(older)} known for sources {source}", flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    begun = time.monotonic()
    for number, (name, result) in enumerate(results_of(todo, options.jobs), 1):
        results[name] = {**result, "source": source}
        RESULTS.write_text(json.dumps(results, indent=1))
        left = (time.monotonic() - begun) / number * (len(todo) - number)
        told = f"{result['worst']:.1e}" if "worst" in result else "raised"
        print(
            f"{number}/{len(todo)} {name}: {'equal' if result['ok'] else 'NOT EQUAL'} {told} {result['seconds']} s, {left:.0f} s left",
            flush=True,
        )
        if not result["ok"]:
            print(result["error"], flush=True)
    PAGE.write_text(page(results))
    failed = [name for name in wanted if name in results and not results[name]["ok"]]
    print(f"{len(wanted)} cases, {len(failed)} not equal; {PAGE.relative_to(ROOT)} written")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
