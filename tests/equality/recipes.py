"""Random models under random plans: a recipe, what it builds, and the comparison with the plain model.

``python -m tests.equality.recipes --examples 200 --seed 3`` looks for faults for as long as one likes.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture
from autopar.capture.trace import Loss
from autopar.capture.tree import take_batch
from autopar.compare import TOLERANCE, difference, first_difference
from autopar.compiler import Compiled, compile_program
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.reference import Trace, plain_steps
from autopar.rules import DEFAULT
from autopar.runtime.comm import Comm
from autopar.runtime.executor import Executable, cut, gather, make_state
from autopar.runtime.random import step_key
from autopar.runtime.sim import SimComm, run_simulated
from tests.equality.blocks import BLOCKS, CROSS_SAMPLE, LOSSES, SEQUENCE, VOCABULARY, WIDTH

MESHES = ("dp=2", "tp=2", "dp=2,tp=2", "tp=2,dp=2", "tp=3", "tp=4", "dp=3,tp=2", "tp=1,dp=2", "dp=1,tp=2", "tp=4,dp=2", "dp=4")
SEED = 11


@dataclass(frozen=True)
class Block:
    """``residual``: added to its input; ``again``: the module of an earlier place once more; ``region``: under torch's checkpoint."""

    name: str
    residual: bool = True
    again: bool = False
    frozen: bool = False
    region: bool = False


@dataclass(frozen=True)
class Recipe:
    """A model, a mesh and a plan. ``draw`` is the seed of a random layout; None: the layout that autopar chooses.

    ``interleave``: microbatches run side by side.
    """

    blocks: tuple[Block, ...]
    loss: str
    tied: bool
    mesh: str
    microbatches: int
    zero: int
    draw: int | None
    interleave: bool = False
    recompute: str | None = None
    zero_ranks: int | None = None
    decompose: int | None = None

    def cross_sample(self) -> bool:
        return any(b.name in CROSS_SAMPLE for b in self.blocks)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    block = st.builds(
        Block, st.sampled_from(list(BLOCKS)), residual=st.booleans(), again=st.integers(0, 7).map(lambda n: n == 7),
        frozen=st.integers(0, 7).map(lambda n: n == 7), region=st.integers(0, 3).map(lambda n: n == 3),
    )  # fmt: skip
    found = Recipe(
        blocks=tuple(draw(st.lists(block, min_size=1, max_size=4))),
        loss=draw(st.sampled_from(list(LOSSES))),
        tied=draw(st.booleans()),
        mesh=draw(st.sampled_from(MESHES)),
        microbatches=draw(st.sampled_from((1, 2))),
        zero=draw(st.sampled_from((1, 0, 2, 3))),
        draw=draw(st.one_of(st.integers(0, 999), st.integers(0, 999), st.integers(0, 999), st.none())),
        interleave=draw(st.booleans()),
        recompute=draw(st.sampled_from((None, "full", "selective"))),
        zero_ranks=draw(st.sampled_from((None, 1, 2))),
        decompose=draw(st.sampled_from((None, 2, 4))),
    )
    if not found.zero or Mesh.parse(found.mesh)["dp"] % (found.zero_ranks or 1):
        found = replace(found, zero_ranks=None)
    return replace(found, microbatches=1) if found.cross_sample() else found


class Composed(nn.Module):
    """Embedding, the blocks, head and loss."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks, made = nn.ModuleList(), {}
        for b in recipe.blocks:
            module = made[b.name] if b.again and b.name in made else BLOCKS[b.name]()
            if b.frozen:
                module.requires_grad_(False)
            made[b.name] = module
            self.blocks.append(module)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not recipe.tied)
        if recipe.tied:
            self.head.weight = self.tokens.weight
        self.recipe = recipe

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for b, block in zip(self.recipe.blocks, self.blocks, strict=True):
            # buffers that a region writes are written twice by torch itself
            region = b.region and not any(True for _ in block.buffers())
            y = checkpoint(block, x, use_reentrant=False) if region else block(x)
            x = x + y if b.residual else y
        return LOSSES[self.recipe.loss](self.head(x), labels)


def material(recipe: Recipe) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model in float64, every parameter random, and a global batch whose rows have different numbers of labels."""
    generator = torch.Generator().manual_seed(SEED)
    model = Composed(recipe).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3 + (p.dim() < 2))
    rows = Mesh.parse(recipe.mesh)["dp"] * recipe.microbatches * 2
    ids = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=generator)
    kept = torch.randint(1, SEQUENCE + 1, (rows, 1), generator=generator)
    labels = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=generator)
    return model, (ids, labels.masked_fill(torch.arange(SEQUENCE) >= kept, -100))


def compiled_for(
    model: nn.Module, batch: Any, mesh: Mesh, plan: Plan, draw: int | None, precision: str | None = None, loss: Loss | None = None
) -> Compiled:
    """The training step of a model, under a random layout where ``draw`` is its seed."""
    captured = capture(model, batch, loss=loss)
    captured = replace(captured, outputs=tuple(o for o in captured.outputs if o.kind != "output"))
    dims = {i.name: 0 for i in captured.inputs_of("batch")}
    return compile_program(captured, mesh, plan, DEFAULT, dims, precision=precision, draw=None if draw is None else random.Random(draw))


def run_ranks(compiled: Compiled, model: nn.Module, batch: Any, mesh: Mesh) -> list[Trace]:
    """One step without update on simulated ranks."""
    spec = compiled.spec
    named = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors = take_batch(batch)[1]

    def rank(comm: Comm) -> Trace:
        run = Executable(compiled.module.source, spec, comm, compiled.final.consts)
        state = make_state(spec, named.__getitem__, buffers, comm)
        rows = [cut(t, sharding, mesh, comm.coords) for t, (_, sharding) in zip(tensors, spec.batch.values(), strict=True)]
        loss, grads, fresh, _ = run.run(state, rows, step_key(SEED, 0))
        assert loss is not None
        return Trace([loss], gather(state, grads, mesh, comm), fresh)

    return run_simulated(mesh, rank)


def differences(traces: list[Trace], reference: Trace) -> list[str]:
    """What isn't equal: losses and buffers of every rank, gradients, which also have to be the same ones."""
    wrong = []

    def compare(what: str, mine: Tensor, theirs: Tensor, scale: float = 0.0) -> None:
        apart = difference(mine, theirs, scale)
        if mine.dtype != theirs.dtype or not apart <= TOLERANCE[torch.float64]:
            wrong.append(f"{what}: {apart:.1e}, {mine.dtype}")

    for rank, trace in enumerate(traces):
        compare(f"loss of rank {rank}", trace.losses[0], reference.losses[0])
        for name, value in trace.state.items():
            compare(f"buffer {name} of rank {rank}", value, reference.state[name])
    scale = max(g.abs().max().item() for g in reference.gradients.values())
    mine = traces[0].gradients
    if set(mine) != set(reference.gradients):
        wrong.append(f"gradients of {set(mine) ^ set(reference.gradients)} on one side only")
    for name in set(mine) & set(reference.gradients):
        compare(f"gradient of {name}", mine[name], reference.gradients[name], scale)
    return wrong


def check(recipe: Recipe) -> None:
    """Loss, gradients and buffers of the first step equal the plain model's, or the first value that differs is named."""
    model, batch = material(recipe)
    mesh, ways = Mesh.parse(recipe.mesh), recipe.microbatches if recipe.interleave else 1
    plan = Plan(
        microbatches=recipe.microbatches, interleave=ways, zero=recipe.zero, zero_ranks=recipe.zero_ranks, recompute=recipe.recompute,
        decompose=recipe.decompose, buckets=3000,
    )  # fmt: skip
    compiled = compiled_for(model, batch, mesh, plan, recipe.draw)
    traces = run_ranks(compiled, model, batch, mesh)
    start = material(recipe)[0]
    wrong = differences(traces, plain_steps(model, [batch], seed=SEED))
    if wrong:
        first = first_difference(compiled, start, batch, mesh, SEED, SimComm)
        raise AssertionError("\n".join([*wrong[:12], f"first: {first}", f"to reproduce: check({recipe!r})"]))


def search(examples: int, number: int) -> None:
    """Looks for a recipe that fails, and for the smallest one like it."""

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False,
        phases=(Phase.generate, Phase.shrink), report_multiple_bugs=True,
    )  # fmt: skip
    @given(recipes())
    def test(recipe: Recipe) -> None:
        check(recipe)

    test()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.equality.recipes", description=__doc__)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    search(options.examples, options.seed)
    print(f"{options.examples} recipes, all equal")
