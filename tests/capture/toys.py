"""Small models for the tests of capture, each with one trait, and the comparison with plain eager torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.interpret import run
from autopar.capture.tree import take_batch
from autopar.ir.program import Program

FLOOR = 1e-13


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 with weights that don't depend on what ran before."""
    model = model.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def values_of(program: Program, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The model's and batch's tensors by input name."""
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    tree, tensors = take_batch(batch)
    held.update({f"batch {path}": t for path, t in zip(tree.paths, tensors, strict=True)})
    paths = {i.name: f"batch {i.path}" if i.kind == "batch" else i.path for i in program.inputs if i.kind in ("param", "buffer", "batch")}
    return {name: held[path].detach().clone() for name, path in paths.items()}


def eager(model: nn.Module, batch: Any, loss: Any = None) -> tuple[Tensor, nn.Module, Any]:
    """Loss, a copy of the model after forward and backward, and the output."""
    model = copy.deepcopy(model)
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if loss is not None:
        value = loss(output, batch)
    elif isinstance(output, Tensor):
        value = output
    else:
        value = output["loss"] if isinstance(output, Mapping) else output.loss
    value.sum().backward()
    return value.detach(), model, output


def assert_close(got: Tensor, want: Tensor, what: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, what
    if not want.is_floating_point():
        assert torch.equal(got, want), what
        return
    error = (got - want).abs().max() if want.numel() else torch.zeros(())
    assert error <= 1e-11 * want.abs().max() + FLOOR, f"{what}: {error}"


def check(model: nn.Module, batch: Any, loss: Any = None) -> Program:
    """Capture, run the program, and compare loss, every gradient, every buffer and every output with plain eager."""
    program = capture(model, batch, loss=loss)
    results = run(program, values_of(program, model, batch))
    value, after, output = eager(model, batch, loss)
    assert_close(results["loss"], value.reshape(()), "loss")
    named = dict(after.named_parameters())
    for name, parameter in named.items():
        if parameter.grad is None:
            assert f"grad {name}" not in results
        else:
            assert_close(results[f"grad {name}"], parameter.grad, f"grad of {name}")
    assert set(program.unreached) == {n for n, p in named.items() if p.grad is None and p.requires_grad}
    for name, buffer in after.named_buffers():
        written = results.get(f"buffer {name}")
        before = dict(model.named_buffers())[name]
        assert_close(before if written is None else written, buffer, f"buffer {name}")
    well_formed(program)
    return program


def well_formed(program: Program) -> None:
    """Every value is defined once and before its use, has a type, and its name is an identifier."""
    seen: set[str] = set()
    for made in program.inputs:
        assert made.name not in seen
        seen.add(made.name)
    for node in program.nodes:
        assert seen.issuperset(node.refs()), node
        for out in node.outs:
            assert out not in seen or not out
            seen.add(out)
        assert "getitem" not in node.op and "detach" not in node.op
        assert not {"device", "layout", "pin_memory", "memory_format"} & dict(node.kwargs).keys()
        assert node.where.file and node.where.line and node.where.code, node
    seen.discard("")
    assert seen == set(program.types)
    assert all(name.isidentifier() for name in seen)
    assert seen.issuperset(o.value for o in program.outputs)


# -- models --------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(b, s, c)), self.dropout, self.training)
        return x + self.mlp(x)


class TinyGPT(nn.Module):
    """``repeat``: how often each block is used; ``tied``: whether head and embedding are one."""

    def __init__(self, layers: int = 2, repeat: int = 1, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.repeat = repeat
        self.tokens, self.positions = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 20, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            for _ in range(self.repeat):
                x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)


def text_batch() -> tuple[Tensor, Tensor]:
    ids = integers(20, 3, 8)
    return ids, torch.where(integers(3, 3, 8, seed=1) == 0, -100, ids)


class Surrogate(torch.autograd.Function):
    """A step function with the gradient of a fast sigmoid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (1 + 10 * x.abs()) ** 2


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Surrogate.apply(self.a(x))).square().mean()


class Normed(nn.Module):
    """BatchNorm buffers, a counter written in place, and a running mean that is assigned anew."""

    counter: Tensor
    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        y = self.norm(self.conv(x)).relu()
        self.running = 0.9 * self.running + 0.1 * y.detach().mean((0, 2, 3))
        return (y * y).mean() / self.counter


class Pair(NamedTuple):
    loss: Tensor
    hidden: tuple[Tensor, ...]
    scale: float


class Nested(nn.Module):
    """A batch that is a tree with numbers in it, an output that is one too."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, aux: dict[str, Any], scale: float = 1.0, flag: bool = False) -> Pair:
        y = self.lin(x) * aux["mask"] + aux["more"][0]
        z = y.tanh() if flag else y
        return Pair((z * scale).square().mean(), (y, z, x), scale)


class Partial(nn.Module):
    """A part frozen, a parameter that isn't used, a tensor in a plain attribute and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.lin = nn.Linear(4, 4), nn.Linear(4, 2)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = torch.tensor([2.0, 3.0], dtype=torch.float64)
        self.listed = [torch.tensor([0.5, -0.5], dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        literal = torch.tensor([1.0, 4.0], dtype=x.dtype)
        return (self.lin(self.frozen(x).relu()) * self.scale + self.listed[0] * literal).square().mean()


class InPlace(nn.Module):
    """Writes into parts of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        y[:, 0] = y[:, 1] * 2
        y[:, 2:].mul_(x[:, 2:])
        y.relu_()
        z = torch.zeros_like(y)
        z[1:] = y[:-1]
        return (y * z).sum()
