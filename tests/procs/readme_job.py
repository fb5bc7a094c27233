"""Runs the Python blocks of the README on one of four ranks."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch

from models import gpt


def blocks() -> list[str]:
    """The README's Python blocks, in order."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_blocks() -> tuple[float, bool, str]:
    """The loss of the last step, whether verify found all equal, and what was printed."""
    torch.manual_seed(0)
    model, batch = gpt.build(), gpt.batch(8, torch.Generator().manual_seed(1))
    names: dict[str, object] = {"model": model, "batch": batch}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        first, *rest = blocks()
        # a rank's own rows, as the comment in the block says
        setup, loop = first.split("for batch in batches:")
        exec(setup, names)  # noqa: S102
        names["batches"] = [names["step"].shard(batch)] * 2  # type: ignore[attr-defined]
        exec("for batch in batches:" + loop, names)  # noqa: S102
        loss = float(names["loss"])  # type: ignore[arg-type]
        names["batch"] = batch
        for block in rest:
            exec(block, names)  # noqa: S102
            if "plan = " in block:
                names["step"].compile(names["batches"][0])  # type: ignore[attr-defined, index]
    return loss, bool(names["report"].ok), out.getvalue()  # type: ignore[attr-defined]
