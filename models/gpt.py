"""A GPT: decoder-only transformer with learned positions, pre-layer-norm blocks and one fused projection for q, k and v.

Plain single-device PyTorch. The reading order is that of the data: Config, Attention, MLP, Block, GPT; then what
``autopar`` asks of a model file: ``build`` and ``batch``.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100  # a label that counts neither in the loss nor in its mean


@dataclass(frozen=True)
class Config:
    vocab: int = 256  # one id for each byte
    sequence: int = 16  # the longest input
    hidden: int = 32
    heads: int = 4
    layers: int = 2
    mlp_ratio: int = 4
    dropout: float = 0.0
    tied: bool = False  # the output head is the token embedding


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "demo": dict(sequence=128, hidden=192),  # held-out loss under 2.3 nats a byte after 400 steps of 16 rows, AdamW at 1.5e-3
    "bench": dict(vocab=8192, sequence=256, hidden=512, heads=8, layers=6),
}


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = (part.view(batch, sequence, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(hidden, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.mlp_ratio * config.hidden)
        self.down = nn.Linear(config.mlp_ratio * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.reset_parameters()
        if config.tied:
            self.head.weight = self.tokens.weight

    def reset_parameters(self) -> None:
        """Small normal weights, zero biases; what writes into the residual stream is scaled down by its depth."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean cross-entropy over the labels that count; without labels, the logits."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def build(preset: str = "tiny", **overrides: Any) -> GPT:
    """The model of a preset, with any field of ``Config`` overridden. Weights come from torch's global generator."""
    return GPT(Config(**{**PRESETS[preset], **overrides}))


def batch(size: int, generator: torch.Generator, preset: str = "tiny", **overrides: Any) -> tuple[Tensor, Tensor]:
    """Random ``(ids, labels)``. Each row ends in a stretch without labels, of a length of its own, as padding would."""
    config = Config(**{**PRESETS[preset], **overrides})
    text = torch.randint(config.vocab, (size, config.sequence + 1), generator=generator)
    ids, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    kept = torch.randint(1, config.sequence + 1, (size, 1), generator=generator)
    return ids, labels.masked_fill(torch.arange(config.sequence) >= kept, IGNORE)
