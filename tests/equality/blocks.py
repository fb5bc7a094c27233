"""Pieces from which random models are put together. Each block maps (batch, sequence, width) to the same shape and has one trait."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: divided by 2, 3, 4 and 6, as are the heads' sizes and the sequence.
WIDTH = 24
SEQUENCE = 12
VOCABULARY = 36


class Apply(nn.Module):
    """A function of the activations alone."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Attention(nn.Module):
    """``fused``: how q, k and v come out of one projection; ``written``: softmax and masks written out instead of the one function."""

    def __init__(
        self, heads: int, kv_heads: int, fused: str = "", written: bool = False, causal: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, WIDTH // heads
        self.fused, self.written, self.causal, self.dropout = fused, written, causal, dropout
        inner = self.size * kv_heads
        if fused:
            self.qkv = nn.Linear(WIDTH, WIDTH + 2 * inner)
        else:
            self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, s, _ = x.shape
        if self.fused == "reshape" and self.heads == self.kv_heads:
            q, k, v = self.qkv(x).reshape(b, s, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
            return q, k, v
        if self.fused == "heads" and self.heads == self.kv_heads:  # q, k and v of a head lie side by side
            q, k, v = self.qkv(x).view(b, s, self.heads, 3 * self.size).chunk(3, dim=-1)
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.fused:
            inner = self.size * self.kv_heads
            q, k, v = self.qkv(x).split([WIDTH, inner, inner], dim=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        return (
            q.view(b, s, self.heads, self.size).transpose(1, 2),
            k.view(b, s, self.kv_heads, self.size).transpose(1, 2),
            v.view(b, s, self.kv_heads, self.size).transpose(1, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.parts(x)
        if self.kv_heads != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        rate = self.dropout if self.training else 0.0
        if self.written:
            scores = q @ k.transpose(-1, -2) / self.size**0.5
            if self.causal:
                mask = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
                scores = scores.masked_fill(~mask, float("-inf"))
            y = F.dropout(scores.softmax(-1), rate, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=rate)
        return self.out(y.transpose(1, 2).reshape(b, s, WIDTH))


class MLP(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor], bias: bool = True, inner: int = 2 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner, bias=bias), nn.Linear(inner, WIDTH, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Gated(nn.Module):
    """Gate and up in one projection, taken apart by ``chunk`` or by a reshape."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.both, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "chunk":
            a, b = self.both(x).chunk(2, dim=-1)
        elif self.how == "halves":
            a, b = self.both(x).unflatten(-1, (2, 2 * WIDTH)).unbind(-2)
        else:  # gate and up take turns
            a, b = self.both(x).unflatten(-1, (2 * WIDTH, 2)).unbind(-1)
        return self.down(F.silu(a) * b)


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Cat(nn.Module):
    """Joins a projection with its input along ``dim``, and takes the rest away again."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.project, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH if dim == 2 else WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.back(torch.cat((self.project(x), x), dim=self.dim))
        return y if self.dim == 2 else y[:, : x.shape[1]] + y[:, x.shape[1] :].flip(1)


class Token(nn.Module):
    """A learned token in front of the sequence, which is cut off at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1)
        return self.project(y)[:, :-1]


class Convolution(nn.Module):
    """Over the sequence; ``groups`` of channels."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Mixer(nn.Module):
    """A matrix over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(SEQUENCE, SEQUENCE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ts,bsd->btd", self.mix, x)


class Running(nn.Module):
    """A running mean over the whole batch, updated and used, and a counter."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = (x - self.mean) * self.scale / self.count
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return y


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Unused(nn.Module):
    """One parameter that nothing reads, one that is frozen, and one whose gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.nothing = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.frozen + 0 * self.nothing


class Scalar(nn.Module):
    """Parameters of no dims and of fewer elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift.repeat_interleave(WIDTH // 3)


def rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * 0.8 + torch.cat((-b, a), dim=-1) * 0.6


def split_unevenly(x: Tensor) -> Tensor:
    a, b, c = x.split((4, 12, 8), dim=-1)
    return torch.cat((c, a * 2, b), dim=-1)


def masked(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1], device=x.device)
    return torch.where(places[:, None] % 3 == 0, x, -x).masked_fill(places[:, None] == 5, 0.25)


def written_into(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] += x[:, :-1]
    y[..., 0] = 0.5
    return y


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "centred on features": lambda x: x - x.mean(-1, keepdim=True),
    "centred on sequence": lambda x: x - x.mean(1, keepdim=True),
    "scaled by largest": lambda x: x / (1 + x.abs().amax((1, 2), keepdim=True)),
    "scaled by deviation": lambda x: x / (1 + x.std(-1, keepdim=True)),
    "less logsumexp": lambda x: x - x.logsumexp(1, keepdim=True),
    "softmax of features": lambda x: x.softmax(-1) * x,
    "softmax of sequence": lambda x: x.softmax(1) + x,
    "log softmax": lambda x: x.log_softmax(-1),
    "softplus": F.softplus,
    "cumulated": lambda x: x.cumsum(1) * 0.2,
    "rotated": rotated,
    "split unevenly": split_unevenly,
    "masked": masked,
    "written into": written_into,
    "rolled": lambda x: x.roll(1, 1) + x.flip(2),
    "padded": lambda x: F.pad(x, (0, 0, 2, 0))[:, :-2],
    "by itself": lambda x: torch.bmm(x, x.transpose(1, 2)) @ x * 0.05,
    "outer": lambda x: (x.unsqueeze(-1) * x.mean(1)[:, None, None, :]).sum(-1) * 0.1,
    "halves": lambda x: x[:, ::2].repeat_interleave(2, dim=1),
    "clamped": lambda x: x.clamp(-1.0, 1.5) * x.sign(),
    "norm": lambda x: x / (1 + x.norm(dim=-1, keepdim=True)),
    "turned": lambda x: x.reshape(x.shape[0], WIDTH, SEQUENCE).transpose(1, 2),
}

#: over the samples of the batch: a plan may not split them into microbatches, and says so.
CROSS_SAMPLE: dict[str, Callable[[], nn.Module]] = {
    "centred on samples": lambda: Apply(lambda x: x - x.mean(0, keepdim=True)),
    "largest of samples": lambda: Apply(lambda x: x / (1 + x.abs().amax((0, 2), keepdim=True))),
    "batch norm": BatchNorm,
}

BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm of two dims": lambda: nn.LayerNorm((SEQUENCE, WIDTH)),
    "bare layer norm": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "rms norm": RMSNorm,
    "torch rms norm": lambda: nn.RMSNorm(WIDTH),
    "group norm": lambda: nn.Sequential(Apply(lambda x: x.transpose(1, 2)), nn.GroupNorm(4, WIDTH), Apply(lambda x: x.transpose(1, 2))),
    "attention": lambda: Attention(4, 4),
    "attention of 6 heads, fused": lambda: Attention(6, 6, "split"),
    "attention, fused by reshape": lambda: Attention(4, 4, "reshape"),
    "attention, fused by head": lambda: Attention(4, 4, "heads", causal=False),
    "attention of 2 kv heads": lambda: Attention(4, 2),
    "attention of 1 kv head, fused": lambda: Attention(4, 1, "split", causal=False),
    "attention written out": lambda: Attention(4, 2, "split", written=True),
    "attention with dropout": lambda: Attention(4, 4, "split", dropout=0.2),
    "attention written out with dropout": lambda: Attention(6, 3, written=True, dropout=0.2),
    "gelu mlp": lambda: MLP(F.gelu),
    "tanh mlp": lambda: MLP(torch.tanh, bias=False),
    "softplus mlp": lambda: MLP(F.softplus, inner=30),
    "relu mlp": lambda: MLP(F.relu, inner=18),
    "gated by chunk": lambda: Gated("chunk"),
    "gated by halves": lambda: Gated("halves"),
    "gated in turns": lambda: Gated("turns"),
    "cat of features": lambda: Cat(2),
    "cat of sequence": lambda: Cat(1),
    "token": Token,
    "convolution": Convolution,
    "convolution of groups": lambda: Convolution(4),
    "depthwise convolution": lambda: Convolution(WIDTH),
    "mixer": Mixer,
    "running mean": Running,
    "unused": Unused,
    "scalar": Scalar,
    "dropout": lambda: nn.Dropout(0.25),
    "noise": lambda: Apply(lambda x: x + 0.1 * torch.randn_like(x)),
    "drop path": lambda: Apply(lambda x: x * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype, device=x.device) < 0.7)),
    **{name: (lambda f=f: Apply(f)) for name, f in FUNCTIONS.items()},
    **CROSS_SAMPLE,
}  # fmt: skip


def lots_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def one_hot_distance(logits: Tensor, labels: Tensor) -> Tensor:
    wanted = F.one_hot(labels.clamp(min=0), logits.shape[-1]).to(logits.dtype)
    return F.mse_loss(logits, wanted)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lots_of_labels,
    "summed": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, ignore_index=-100, reduction="sum"),
    "smoothed": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=-100, label_smoothing=0.1),
    "by sample": lambda x, y: (F.cross_entropy(x.transpose(1, 2), y, ignore_index=-100, reduction="none").sum(1) / (y >= 0).sum(1)).mean(),
    "distance": one_hot_distance,
    "gathered": lambda x, y: -(x.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * (y >= 0)).sum() / (y >= 0).sum(),
    "with z": lambda x, y: lots_of_labels(x, y) + 1e-2 * x.logsumexp(-1).square().mean(),
}
