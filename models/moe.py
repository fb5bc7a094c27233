"""A GPT whose MLPs are mixtures of experts: a router sends every token to its best few, and a second loss keeps the experts busy.

Plain single-device PyTorch. Two ways to dispatch tokens compute the same: ``dense`` runs every expert on every token and weighs
most of it by zero; ``sorted`` orders copies of the tokens by expert and multiplies each stretch of them by its expert's matrix.
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
    experts: int = 4
    chosen: int = 2  # experts for each token
    inner: int = 32  # of every expert
    auxiliary: float = 0.01  # weight of the loss for even use
    dispatch: str = "dense"  # or sorted
    dropout: float = 0.0


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "demo": dict(sequence=128, hidden=192, heads=6, experts=8, inner=384),
}


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = (part.view(batch, sequence, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(hidden, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))


def grouped(rows: Tensor, matrices: Tensor, experts: Tensor) -> Tensor:
    """Each row [n, i] by the matrix [experts, i, o] of its expert, rows being in the order of their experts [n]."""
    if rows.dtype != torch.bfloat16:  # the one type that torch's grouped product takes everywhere
        return torch.bmm(rows[:, None], matrices[experts])[:, 0]
    ends = F.one_hot(experts, matrices.shape[0]).sum(0).cumsum(0)
    return F.grouped_mm(rows, matrices, offs=ends.to(torch.int32))


class Experts(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.experts, config.hidden, config.inner))
        self.down = nn.Parameter(torch.empty(config.experts, config.inner, config.hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts' output and the auxiliary loss: it is least where tokens and probabilities spread evenly."""
        probabilities = self.router(x).softmax(-1)
        weights, experts = probabilities.topk(self.config.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        y = (self.sorted if self.config.dispatch == "sorted" else self.dense)(x, weights, experts)
        share = F.one_hot(experts, self.config.experts).to(x.dtype).mean((0, 1, 2))
        return y, self.config.experts * (share * probabilities.mean((0, 1))).sum()

    def dense(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        gates = x.new_zeros(*x.shape[:2], self.config.experts).scatter(-1, experts, weights)
        y = F.silu(torch.einsum("bsh,ehf->bsef", x, self.up))
        return torch.einsum("bsef,efh->bsh", y * gates[..., None], self.down)

    def sorted(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, chosen = x.flatten(0, 1), self.config.chosen
        experts, order = experts.flatten().sort(stable=True)
        y = F.silu(grouped(tokens[order // chosen], self.up, experts))
        y = grouped(y, self.down, experts) * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // chosen, y).view_as(x)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.experts = Experts(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.dropout(self.attention(self.norm1(x)))
        y, auxiliary = self.experts(self.norm2(x))
        return x + self.dropout(y), auxiliary


class MoE(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small normal weights and zero biases, and routers that prefer some experts from the beginning."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.2 if "router" in name else 0.05)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean cross-entropy over the labels that count, and the layers' auxiliary losses; without labels, the logits."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        auxiliary = x.new_zeros(())
        for block in self.blocks:
            x, more = block(x)
            auxiliary = auxiliary + more
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE) + self.config.auxiliary * auxiliary


def build(preset: str = "tiny", **overrides: Any) -> MoE:
    """The model of a preset, with any field of ``Config`` overridden. Weights come from torch's global generator."""
    return MoE(Config(**{**PRESETS[preset], **overrides}))


def batch(size: int, generator: torch.Generator, preset: str = "tiny", **overrides: Any) -> tuple[Tensor, Tensor]:
    """Random ``(ids, labels)``. Each row ends in a stretch without labels, of a length of its own, as padding would."""
    config = Config(**{**PRESETS[preset], **overrides})
    text = torch.randint(config.vocab, (size, config.sequence + 1), generator=generator)
    ids, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    kept = torch.randint(1, config.sequence + 1, (size, 1), generator=generator)
    return ids, labels.masked_fill(torch.arange(config.sequence) >= kept, IGNORE)
