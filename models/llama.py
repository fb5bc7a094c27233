"""A Llama: RMS norms, rotary positions, grouped-query attention, SwiGLU, no biases, a head of its own.

Plain single-device PyTorch. The batch is a dict, and the output can be one as well (``outputs="dict"``).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100  # a label that counts neither in the loss nor in its mean


@dataclass(frozen=True)
class Config:
    vocab: int = 256
    sequence: int = 16  # only for ``batch``: rotary positions have no longest input
    hidden: int = 64
    heads: int = 8
    kv_heads: int = 4  # each is shared by heads / kv_heads query heads
    layers: int = 2
    mlp_hidden: int = 128
    rope_base: float = 10000.0
    eps: float = 1e-5
    fused_gate_up: bool = False  # one projection for gate and up
    native_gqa: bool = False  # leave the sharing of kv heads to scaled_dot_product_attention
    outputs: str = "loss"  # or "dict": {"loss": ..., "logits": ...}


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "demo": dict(sequence=128, hidden=128, heads=4, kv_heads=2, layers=4, mlp_hidden=384),
    "8b": dict(vocab=128256, sequence=8192, hidden=4096, heads=32, kv_heads=8, layers=32, mlp_hidden=14336, rope_base=500000.0),
}


class RMSNorm(nn.Module):
    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotary(sequence: int, size: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each ``(sequence, size)``, of the angle by which every pair of a head's channels is turned."""
    precise = torch.promote_types(like.dtype, torch.float32)
    speed = base ** (-torch.arange(0, size, 2, device=like.device, dtype=precise) / size)
    angle = torch.arange(sequence, device=like.device, dtype=precise)[:, None] * speed
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.hidden // config.heads
        self.group = config.heads // config.kv_heads
        self.native_gqa = config.native_gqa
        self.q = nn.Linear(config.hidden, config.heads * self.size, bias=False)
        self.k = nn.Linear(config.hidden, config.kv_heads * self.size, bias=False)
        self.v = nn.Linear(config.hidden, config.kv_heads * self.size, bias=False)
        self.out = nn.Linear(config.heads * self.size, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (project(x).view(batch, sequence, -1, self.size).transpose(1, 2) for project in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if not self.native_gqa:
            k, v = (part.repeat_interleave(self.group, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.native_gqa)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, -1))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.up = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FusedMLP(nn.Module):
    """The same function as ``MLP``; gate and up are the two halves of one projection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden, 2 * config.mlp_hidden, bias=False)
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden, config.eps)
        self.attention = Attention(config)
        self.norm2 = RMSNorm(config.hidden, config.eps)
        self.mlp = FusedMLP(config) if config.fused_gate_up else MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """The mean cross-entropy over the labels that count, alone or in a dict with the logits; without labels, the logits."""
        config = self.config
        x = self.tokens(ids)
        cos, sin = rotary(ids.shape[1], config.hidden // config.heads, config.rope_base, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        return {"loss": loss, "logits": logits} if config.outputs == "dict" else loss


def build(preset: str = "tiny", **overrides: Any) -> Llama:
    """The model of a preset, with any field of ``Config`` overridden. Weights come from torch's global generator."""
    return Llama(Config(**{**PRESETS[preset], **overrides}))


def batch(size: int, generator: torch.Generator, preset: str = "tiny", **overrides: Any) -> dict[str, Tensor]:
    """Random ids and labels. Each row begins with a stretch without labels, of a length of its own, as a prompt would."""
    config = Config(**{**PRESETS[preset], **overrides})
    text = torch.randint(config.vocab, (size, config.sequence + 1), generator=generator)
    ids, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    prompt = torch.randint(config.sequence, (size, 1), generator=generator)
    return {"ids": ids, "labels": labels.masked_fill(torch.arange(config.sequence) < prompt, IGNORE)}
