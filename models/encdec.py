"""An encoder-decoder transformer: the encoder reads the source both ways, the decoder writes the target and looks at what was read.

Plain single-device PyTorch. Sources are padded; a mask keeps padding out of every attention over them. Norms come before what they
norm, as in most models of this kind.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100  # a label that counts neither in the loss nor in its mean


@dataclass(frozen=True)
class Config:
    vocab: int = 256  # shared by both sides
    source: int = 12  # the longest source
    target: int = 8  # the longest target
    hidden: int = 32
    heads: int = 4
    encoder: int = 2  # layers
    decoder: int = 2
    mlp_ratio: int = 4
    dropout: float = 0.0


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "base": dict(vocab=32000, source=512, target=512, hidden=512, heads=8, encoder=6, decoder=6),
}


class Attention(nn.Module):
    """Of queries over a memory, which for self-attention is what the queries are made of."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.q = nn.Linear(config.hidden, config.hidden)
        self.kv = nn.Linear(config.hidden, 2 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """``mask`` [batch, 1, 1, length of the memory] is true where the memory may be looked at."""
        k, v = self.kv(memory).chunk(2, dim=-1)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            self.split(self.q(x)), self.split(k), self.split(v), attn_mask=mask, dropout_p=dropout, is_causal=causal
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of either side; only the decoder's looks at a memory."""

    def __init__(self, config: Config, decoder: bool) -> None:
        super().__init__()
        inner = config.mlp_ratio * config.hidden
        self.norm1, self.attention = nn.LayerNorm(config.hidden), Attention(config)
        if decoder:
            self.norm2, self.cross = nn.LayerNorm(config.hidden), Attention(config)
        self.norm3 = nn.LayerNorm(config.hidden)
        self.mlp = nn.Sequential(nn.Linear(config.hidden, inner), nn.ReLU(), nn.Linear(inner, config.hidden))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        if memory is None:
            x = x + self.dropout(self.attention(y, y, mask))
        else:
            x = x + self.dropout(self.attention(y, y, causal=True))
            x = x + self.dropout(self.cross(self.norm2(x), memory, mask))
        return x + self.dropout(self.mlp(self.norm3(x)))


class EncoderDecoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.source_positions = nn.Parameter(torch.zeros(config.source, config.hidden))
        self.target_positions = nn.Parameter(torch.zeros(config.target, config.hidden))
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(Block(config, decoder=False) for _ in range(config.encoder))
        self.decoder = nn.ModuleList(Block(config, decoder=True) for _ in range(config.decoder))
        self.norm_memory, self.norm = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, source: Tensor, kept: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean cross-entropy over the labels that count; without labels, the logits. ``kept`` is true where a source is no padding."""
        mask = kept[:, None, None, :]
        memory = self.dropout(self.tokens(source) + self.source_positions[: source.shape[1]])
        for block in self.encoder:
            memory = block(memory, mask)
        memory = self.norm_memory(memory)
        x = self.dropout(self.tokens(target) + self.target_positions[: target.shape[1]])
        for block in self.decoder:
            x = block(x, mask, memory)
        logits = F.linear(self.norm(x), self.tokens.weight)  # the head is the embedding
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def build(preset: str = "tiny", **overrides: Any) -> EncoderDecoder:
    """The model of a preset, with any field of ``Config`` overridden. Weights come from torch's global generator."""
    return EncoderDecoder(Config(**{**PRESETS[preset], **overrides}))


def batch(size: int, generator: torch.Generator, preset: str = "tiny", **overrides: Any) -> dict[str, Tensor]:
    """Random sources of unequal lengths, and targets whose labels end somewhere, too."""
    config = Config(**{**PRESETS[preset], **overrides})
    source = torch.randint(config.vocab, (size, config.source), generator=generator)
    text = torch.randint(config.vocab, (size, config.target + 1), generator=generator)
    lengths, counted = (torch.randint(1, n + 1, (size, 1), generator=generator) for n in (config.source, config.target))
    labels = text[:, 1:].masked_fill(torch.arange(config.target) >= counted, IGNORE)
    return {"source": source, "kept": torch.arange(config.source) < lengths, "target": text[:, :-1].contiguous(), "labels": labels}
