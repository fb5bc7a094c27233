"""An autoencoder of plain linear layers: the smallest example, and one whose loss is a callable beside the model.

The model's output is the reconstruction; ``loss`` compares it with the batch it was made from.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    features: int = 32
    hidden: int = 64
    code: int = 16
    bias: bool = True


PRESETS: dict[str, dict[str, Any]] = {"tiny": {}, "wide": dict(features=512, hidden=2048, code=64)}


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        sizes = (config.features, config.hidden, config.code, config.hidden, config.features)
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=config.bias) for i, o in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        *inner, last = self.layers
        for layer in inner:
            x = torch.tanh(layer(x))
        return last(x)


def build(preset: str = "tiny", **overrides: Any) -> MLP:
    """The model of a preset, with any field of ``Config`` overridden. Weights come from torch's global generator."""
    return MLP(Config(**{**PRESETS[preset], **overrides}))


def batch(size: int, generator: torch.Generator, preset: str = "tiny", **overrides: Any) -> tuple[Tensor]:
    """Random samples, all of them the model's one argument."""
    config = Config(**{**PRESETS[preset], **overrides})
    return (torch.randn(size, config.features, generator=generator),)


def loss(output: Tensor, batch: tuple[Tensor]) -> Tensor:
    """The mean squared error of the reconstruction."""
    return F.mse_loss(output, batch[0])
