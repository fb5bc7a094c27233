"""Torch's own layers and functions, each on data and tensor ranks against one process: those with rows or rewritings of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from autopar.api import verify
from autopar.capture import capture
from autopar.errors import AutoparError, CaptureError, UnsupportedError
from autopar.layout.mesh import Mesh
from autopar.passes.canonicalize import canonicalize


class Use(nn.Module):
    """A layer or function of an input that a parameter scales; the loss weighs every element of every output."""

    def __init__(self, layer: Callable[..., Any], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(shape[1:]))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for t in torch.utils._pytree.tree_leaves(self.layer(x * self.scale)):
            t = torch.view_as_real(t) if t.is_complex() else t
            if t.is_floating_point():
                total = total + (t.square() * torch.linspace(0.5, 1.5, t.shape[-1] if t.dim() else 1, dtype=t.dtype)).mean()
        return total


class Bilinear(nn.Bilinear):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x.tanh())


def rope(x: Tensor) -> Tensor:
    """Rotary positions as complex numbers."""
    turned = torch.polar(torch.ones(6, 4, dtype=x.dtype), torch.arange(24, dtype=x.dtype).view(6, 4))
    return torch.view_as_real(torch.view_as_complex(x.view(*x.shape[:-1], 4, 2)) * turned).flatten(-2)


def warped(x: Tensor) -> Tensor:
    turn = 0.8 * torch.eye(2, 3, dtype=x.dtype).expand(x.shape[0], 2, 3) + 0.1 * x.mean((1, 2, 3))[:, None, None]
    return F.grid_sample(x, F.affine_grid(turn, x.shape, align_corners=False), align_corners=False)


def spd(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


LINE, TEXT, PICTURE, CUBE, SQUARE = (8, 8), (4, 6, 8), (4, 8, 8, 8), (4, 8, 4, 4, 4), (4, 4, 4)
LAYERS: dict[str, tuple[tuple[int, ...], Callable[[], Callable[..., Any]]]] = {
    "LSTMCell": (LINE, lambda: nn.LSTMCell(8, 8)),
    "GRUCell": (LINE, lambda: nn.GRUCell(8, 8)),
    "LSTM": (TEXT, lambda: nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True, dropout=0.3)),
    "GRU": (TEXT, lambda: nn.GRU(8, 8, 2, batch_first=True, dropout=0.3)),
    "RNN": (TEXT, lambda: nn.RNN(8, 8, nonlinearity="relu", batch_first=True)),
    "Bilinear": (LINE, lambda: Bilinear(8, 8, 8)),
    "MaxPool3d": (CUBE, lambda: nn.MaxPool3d(3, 1, 1)),
    "AvgPool3d": (CUBE, lambda: nn.AvgPool3d(2)),
    "AdaptiveMaxPool2d": (PICTURE, lambda: nn.AdaptiveMaxPool2d(3)),
    "AdaptiveMaxPool3d": (CUBE, lambda: nn.AdaptiveMaxPool3d(3)),
    "AdaptiveAvgPool3d": (CUBE, lambda: nn.AdaptiveAvgPool3d(3)),
    "FractionalMaxPool2d": (PICTURE, lambda: nn.FractionalMaxPool2d(2, output_size=3)),
    "MaxUnpool2d": (PICTURE, lambda: lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
    "LocalResponseNorm": (PICTURE, lambda: nn.LocalResponseNorm(3)),
    "ChannelShuffle": (PICTURE, lambda: nn.ChannelShuffle(4)),
    "antialias": (PICTURE, lambda: lambda x: F.interpolate(x, size=(5, 5), mode="bicubic", antialias=True)),
    "grid_sample": (PICTURE, lambda: warped),
    "weight_norm": (PICTURE, lambda: parametrizations.weight_norm(nn.ConvTranspose2d(8, 8, 3), dim=1)),
    "weight_norm of all": (LINE, lambda: parametrizations.weight_norm(nn.Linear(8, 8), dim=None)),
    "older weight_norm": (LINE, lambda: weight_norm(nn.Linear(8, 8))),
    "spectral_norm": (PICTURE, lambda: parametrizations.spectral_norm(nn.Conv2d(8, 8, 3))),
    "older spectral_norm": (LINE, lambda: nn.utils.spectral_norm(nn.Linear(8, 8))),
    **{f"orthogonal {o}": (LINE, lambda o=o: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map=o))
       for o in ("matrix_exp", "cayley", "householder")},
    "rfft": (TEXT, lambda: lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2)),
    "fft2": (TEXT, lambda: lambda x: torch.fft.fft2(x).abs()),
    "fft of samples": (TEXT, lambda: lambda x: torch.fft.fft(x, dim=0)),
    "rope": (TEXT, lambda: rope),
    "inv": (SQUARE, lambda: lambda x: torch.linalg.inv(spd(x))),
    "cholesky": (SQUARE, lambda: lambda x: torch.linalg.cholesky(spd(x))),
    "solve": (SQUARE, lambda: lambda x: torch.linalg.solve(spd(x), x)),
    "svd": (SQUARE, lambda: lambda x: torch.linalg.svdvals(x)),
    "eigh": (SQUARE, lambda: lambda x: torch.linalg.eigvalsh(spd(x))),
    "qr": (SQUARE, lambda: lambda x: torch.linalg.qr(x)[1]),
    "logdet": (SQUARE, lambda: lambda x: torch.logdet(spd(x))),
    "norm": (TEXT, lambda: lambda x: (x.norm(p=1, dim=1), x.norm(dim=-1, keepdim=True), x.norm())),
    "unfold": (TEXT, lambda: lambda x: x.unfold(1, 3, 1)),
    "rot90": (TEXT, lambda: lambda x: (x.rot90(1, (1, 2)), x.rot90(2, (1, 2)), x.rot90(3, (1, 2)))),
    "addr": (LINE, lambda: lambda x: torch.addr(x, x[:, 0], x[0], beta=0.5, alpha=2)),
    "addmv": (LINE, lambda: lambda x: torch.addmv(x[:, 0], x, x[0], alpha=2)),
    "addbmm": (TEXT, lambda: lambda x: torch.addbmm(x[0] @ x[0].T, x, x.mT, beta=0.5)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    torch.manual_seed(0)
    shape, make = LAYERS[name]
    report = verify(Use(make(), shape), Mesh(dp=2, tp=2), torch.randn(shape))
    assert report.ok, report.table()


def test_embedding_bags_are_cut_by_bag() -> None:
    torch.manual_seed(0)
    report = verify(nn.EmbeddingBag(16, 8), Mesh(dp=2, tp=2), torch.randint(16, (4, 6)), loss=lambda y, _: y.pow(3).mean())
    assert report.ok, report.table()


class Margin(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.multilabel_margin_loss(self.inner(x), labels)


def test_multilabel_margin_loss() -> None:
    torch.manual_seed(0)
    labels = torch.tensor([[3, 0, -1, 1], [1, -1, 2, 3], [-1, 0, 1, 2], [0, 1, 2, 3]])
    report = verify(Margin(nn.Linear(4, 4)), Mesh(dp=2), (torch.randn(4, 4), labels))
    assert report.ok, report.table()


REFUSED: list[tuple[Callable[[Tensor], Any], type[AutoparError], str]] = [
    (lambda x: x.as_strided((2, 3), (8, 1)), UnsupportedError, "as_strided.default can't be split over ranks"),
    (lambda x: F.rrelu(x, training=True), UnsupportedError, "the random op aten.rrelu_with_noise_functional.default can't be split"),
    (lambda x: F.gumbel_softmax(x), UnsupportedError, "the random op aten.exponential.default can't be split"),
    (lambda x: x[x > 0], CaptureError, "The shape of aten.nonzero.default depends on data"),
]


@pytest.mark.parametrize(("use", "kind", "text"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_refused(use: Callable[[Tensor], Any], kind: type[AutoparError], text: str) -> None:
    with pytest.raises(kind) as caught:
        canonicalize(capture(Use(use, LINE), torch.randn(LINE)))
    assert text in str(caught.value) and "test_layers.py" in str(caught.value) and "try:" in str(caught.value)
