"""A small vision transformer: patches embedded by a convolution, a class token, and a classifier on top of it.

Plain single-device PyTorch. Its attention takes q, k and v out of one reshaped tensor, where ``gpt.py`` splits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    height: int = 12
    width: int = 20  # with patches of 4: 3 x 5 patches and the class token make a sequence of 16
    channels: int = 3
    patch: int = 4
    hidden: int = 32
    heads: int = 4
    layers: int = 2
    mlp_ratio: int = 4
    classes: int = 16
    dropout: float = 0.0


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "base": dict(height=224, width=224, patch=16, hidden=768, heads=12, layers=12, classes=1000),
}


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = self.qkv(x).reshape(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        inner = config.mlp_ratio * config.hidden
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = nn.Sequential(nn.Linear(config.hidden, inner), nn.GELU(), nn.Linear(inner, config.hidden))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        sequence = (config.height // config.patch) * (config.width // config.patch) + 1
        self.patches = nn.Conv2d(config.channels, config.hidden, kernel_size=config.patch, stride=config.patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, config.hidden))
        self.positions = nn.Parameter(0.02 * torch.randn(1, sequence, config.hidden))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean cross-entropy of the classes; without labels, the logits."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)[:, 0])
        return logits if labels is None else F.cross_entropy(logits, labels)


def build(preset: str = "tiny", **overrides: Any) -> ViT:
    """The model of a preset, with any field of ``Config`` overridden. Weights come from torch's global generator."""
    return ViT(Config(**{**PRESETS[preset], **overrides}))


def batch(size: int, generator: torch.Generator, preset: str = "tiny", **overrides: Any) -> tuple[Tensor, Tensor]:
    """Random images and classes."""
    config = Config(**{**PRESETS[preset], **overrides})
    images = torch.randn(size, config.channels, config.height, config.width, generator=generator)
    return images, torch.randint(config.classes, (size,), generator=generator)
