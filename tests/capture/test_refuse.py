"""What capture refuses: one error each, with the user's line where there is one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import AutoparError, CaptureError, InputError, UnsupportedError
from tests.capture.toys import Nested

X = torch.ones(3, 4)


def model_of(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    """A model with a Linear ``lin`` and any forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 2)
            for name, value in attributes.items():
                setattr(self, name, value)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

    return Model()


def mean(m: Any, x: Tensor) -> Tensor:
    return m.lin(x).mean()


def item(m: Any, x: Tensor) -> Tensor:
    y = m.lin(x)
    return y.mean() * y[0, 0].item()


def branch(m: Any, x: Tensor) -> Tensor:
    y = m.lin(x)
    if y.sum() > 0:
        y = -y
    return y.mean()


def nonzero(m: Any, x: Tensor) -> Tensor:
    return m.lin(x)[x[:, 0] > 0].mean()


def into_batch(m: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    return m.lin(x).mean()


def into_parameter(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.lin.weight.mul_(0.5)
    return m.lin(x).mean()


def counting(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.lin(x).mean()


def python_random(m: Any, x: Tensor) -> Tensor:
    return m.lin(x).mean() * random.random()


def recurrent(m: Any, x: Tensor) -> Tensor:
    y = m.lin(x) + m.state
    m.state = y.detach()
    return y.mean()


def memory(m: Any, x: Tensor) -> Tensor:
    y = m.lin(x) if m.last is None else m.lin(x) + m.last
    m.last = y.detach()
    return y.mean()


def history(m: Any, x: Tensor) -> Tensor:
    m.seen.append(m.lin(x).detach())
    return m.lin(x).mean() + torch.stack(m.seen).mean()


def hidden_parameter(m: Any, x: Tensor) -> Tensor:
    return (m.lin(x) * m.listed[0]).mean()


def sparse(m: Any, x: Tensor) -> Tensor:
    return F.embedding(torch.tensor([0, 1]), m.lin.weight, sparse=True).mean()


def buffer_with_gradient(m: Any, x: Tensor) -> Tensor:
    m.total.add_(m.lin(x).sum())
    return m.lin(x).mean()


def buffer_of_new_shape(m: Any, x: Tensor) -> Tensor:
    m.lin._buffers["seen"] = torch.cat([m.lin.seen, x[:1, 0]])
    return m.lin(x).mean()


def generator(m: Any, x: Tensor) -> Tensor:
    return (m.lin(x) * torch.rand(2, generator=m.generator)).mean()


def wrong_shape(m: Any, x: Tensor) -> Tensor:
    return m.lin(x[:, :2])


def autocast_elsewhere(m: Any, x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cuda", True)  # the context manager itself does nothing where there is no GPU
    try:
        return m.lin(x).mean()
    finally:
        torch.set_autocast_enabled("cuda", False)


LINES = [
    (item, CaptureError, "The model reads a tensor's value in Python (aten._local_scalar_dense.default)", "y[0, 0].item()"),
    (branch, CaptureError, "The model reads a tensor's value in Python", "if y.sum() > 0:"),
    (nonzero, CaptureError, "The shape of aten.nonzero.default depends on data", "x[:, 0] > 0"),
    (into_batch, CaptureError, "The model writes to its input '0' in place", ""),
    (into_parameter, CaptureError, "The model writes to its parameter lin.weight in place", ""),
    (counting, CaptureError, "The model changes its attribute calls in its forward, from 0 to 1", ""),
    (python_random, CaptureError, "The model draws from random in its forward", ""),
    (recurrent, CaptureError, "The model reads its tensor attribute state and replaces it", ""),
    (memory, CaptureError, "The model reads what an earlier step left in its attribute last", "m.lin(x) + m.last"),
    (history, CaptureError, "The model reads what an earlier step left in its attribute seen", "torch.stack(m.seen)"),
    (hidden_parameter, CaptureError, "The model uses a trainable tensor that isn't one of its parameters", "m.listed[0]"),
    (sparse, UnsupportedError, "sparse", ""),
    (buffer_with_gradient, CaptureError, "a buffer was overwritten by a value that depends on trainable parameters", ""),
    (buffer_of_new_shape, CaptureError, "The model replaces its buffer lin.seen by a torch.float32 tensor of shape (2,)", ""),
    (generator, UnsupportedError, "A random op with a generator of its own", "generator=m.generator"),
    (wrong_shape, CaptureError, "The model raised RuntimeError while it was captured", "m.lin(x[:, :2])"),
    (autocast_elsewhere, UnsupportedError, "The model runs under torch.autocast('cuda')", "return m.lin(x).mean()"),
]  # fmt: skip


@pytest.mark.parametrize(("forward", "kind", "text", "line"), LINES, ids=[case[0].__name__ for case in LINES])
def test_forward(forward: Callable[..., Any], kind: type[AutoparError], text: str, line: str) -> None:
    model = model_of(
        forward, calls=0, last=None, seen=[], state=torch.zeros(2), listed=[nn.Parameter(torch.ones(2))], generator=torch.Generator()
    )  # fmt: skip
    model.register_buffer("total", torch.zeros(()))
    model.lin.register_buffer("seen", torch.zeros(1))
    batch = X.clone()
    with pytest.raises(kind) as caught:
        capture(model, batch)
    message = str(caught.value)
    assert text in message, message
    if line:
        where = next(x for x in message.splitlines() if x.startswith("  where:"))
        assert "test_refuse.py:" in where and line in where, message
    assert torch.equal(batch, X) and "  try:" in message or forward is wrong_shape


LOSSES = [
    (lambda m, x: m.lin(x), None, "the output of Model has shape [3, 2], not a scalar"),
    (lambda m, x: (m.lin(x).mean(), 1), None, "Model returns no loss"),
    (lambda m, x: {"logits": m.lin(x)}, None, "it returns a dict, without a loss in it"),
    (lambda m, x: {"loss": None}, None, "the loss in its output is None: were labels passed?"),
    (lambda m, x: {"loss": 3.0}, None, "the loss in the output of Model is a float, not a tensor"),
    (lambda m, x: (m.lin(x) > 0).sum(), None, "the output of Model has dtype torch.int64"),
    (lambda m, x: m.lin(x), lambda output, batch: output.sum(1), "loss(output, batch) has shape [3], not a scalar"),
    (lambda m, x: m.lin(x), lambda output, batch: None, "loss(output, batch) is a NoneType, not a tensor"),
]


@pytest.mark.parametrize(("forward", "loss", "text"), LOSSES)
def test_loss(forward: Callable[..., Any], loss: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        capture(model_of(forward), X, loss=loss)
    assert text in str(caught.value)


def test_nothing_to_train() -> None:
    with pytest.raises(CaptureError, match="doesn't depend on any trainable parameter") as caught:
        capture(model_of(mean).requires_grad_(False), X)
    assert "no parameter has requires_grad" in str(caught.value)
    with pytest.raises(CaptureError, match="doesn't depend on any trainable parameter"):
        capture(model_of(lambda m, x: m.lin(x).detach().mean()), X)


def test_hooks_on_gradients() -> None:
    model = model_of(mean)
    handle = model.lin.weight.register_hook(lambda g: g * 2)
    with pytest.raises(CaptureError, match="The parameter lin.weight has gradient hooks"):
        capture(model, X)
    capture(model, X, grads=False)
    handle.remove()
    model.lin.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(CaptureError, match="The parameter lin.weight has gradient hooks"):
        capture(model, X)
    model = model_of(mean)
    model.lin.register_full_backward_hook(lambda m, i, o: None)
    with pytest.raises(CaptureError, match=r"A module has backward hooks\n  where: lin, a Linear"):
        capture(model, X)


def test_models() -> None:
    with pytest.raises(CaptureError, match="not an nn.Module"):
        capture(lambda x: x, X)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="has no shape yet"):
        capture(nn.LazyLinear(3), X)
    with pytest.raises(UnsupportedError, match="A sparse embedding gradient"):
        capture(nn.Embedding(3, 4, sparse=True), torch.tensor([1]))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(CaptureError, match=r"0.weight and 1.weight share memory"):
        capture(model, X, loss=lambda o, b: o.mean())
    model = model_of(lambda m, x: (m.lin(x) * m.scale).mean(), scale=torch.ones(2, device="meta"))
    with pytest.raises(CaptureError, match="its tensor attribute scale, which is on meta"):
        capture(model, X)


def test_batches() -> None:
    model = Nested()
    with pytest.raises(InputError, match="The batch holds no tensor"):
        capture(model, {"x": 1, "aux": None})
    with pytest.raises(InputError, match="The batch leaf 'aux.more' is a builtins.object"):
        capture(model, {"x": X, "aux": {"mask": X, "more": object()}})
    with pytest.raises(InputError, match="The batch leaf '0' requires grad"):
        capture(model_of(mean), X.clone().requires_grad_())
    with pytest.raises(InputError, match="is sparse"):
        capture(model_of(mean), X.to_sparse())
    with pytest.raises(InputError, match="The batch has the key 3"):
        capture(model_of(mean), {3: X})
    with pytest.raises(CaptureError, match="raised TypeError"):
        capture(model, {"x": X})


def test_compiled_and_wrapped() -> None:
    model = torch.compile(model_of(mean), backend="eager")
    with pytest.raises(UnsupportedError, match="The model is wrapped in OptimizedModule"):
        capture(model, X)  # type: ignore[arg-type]


def test_caches_and_records_are_no_state() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if m.cache is None:
            m.cache = torch.arange(2.0) * m.factor
        m.record = m.lin(x)
        m.records.append(m.record)
        return (m.record * m.cache).mean()

    model = model_of(forward, cache=None, records=[])
    model.register_buffer("factor", torch.ones(()))
    program = capture(model, X)
    assert "aten.arange.start" in {n.op for n in program.nodes} or "aten.arange.default" in {n.op for n in program.nodes}
    assert model.cache is None and not model.records and not hasattr(model, "record")


CALLS, SEEN, WARNED = 0, [0], False


def _count(kind: str) -> Callable[..., Any]:
    own, kept = 0, {"n": 0}

    def forward(m: Any, x: Tensor) -> Tensor:
        global CALLS, WARNED
        nonlocal own
        if kind == "global":
            CALLS += 1
        elif kind == "list":
            SEEN[0] += 1
        elif kind == "closure":
            own += 1
        elif kind == "dict in a closure":
            kept["n"] += 1
        elif kind == "class":
            type(m).made = getattr(type(m), "made", 0) + 1
        elif not WARNED:
            WARNED = True
        return m.l(x).mean()

    return forward


@pytest.mark.parametrize(
    ("kind", "text"),
    [("global", "test_refuse.CALLS"), ("list", "test_refuse.SEEN"), ("closure", "own of _count"), ("dict in a closure", "kept of _count"),
     ("class", "made"), ("once", "")],
)  # fmt: skip
def test_counters_outside_the_model(kind: str, text: str) -> None:
    """What a forward counts in globals, closures and classes would be lost; a flag that it sets once is none."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.f = nn.Linear(4, 2), _count(kind)

        def forward(self, x: Tensor) -> Tensor:
            return self.f(self, x)

    if not text:
        capture(Own(), torch.ones(2, 4))
        return
    with pytest.raises(CaptureError, match=f"The model changes .*{text}.* in its forward"):
        capture(Own(), torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore:Error detected in CheckpointFunctionBackward")  # torch's own, on the way to the refusal
def test_reentrant_checkpoint() -> None:
    model = model_of(lambda m, x: torch.utils.checkpoint.checkpoint(m.lin, x * m.lin.weight[0], use_reentrant=True).mean())
    with pytest.raises(UnsupportedError, match="use_reentrant=True"):
        capture(model, X)
