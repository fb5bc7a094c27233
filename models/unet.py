"""A U-Net that takes noise out of pictures: it halves the picture, doubles it again, and joins each size to what it was on the way down.

Plain single-device PyTorch. The long skips are joined by concatenation of channels; one way up is a transposed convolution, the
other an upsampling and a convolution.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    size: int = 8  # height and width of a picture
    channels: int = 4
    width: int = 8  # channels at full size
    levels: int = 2  # how often the picture is halved
    groups: int = 4  # of every group norm
    upsample: str = "transposed"  # or nearest, bilinear: an upsampling and a convolution
    dropout: float = 0.0


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "base": dict(size=256, width=64, levels=4, groups=8),
}


class Double(nn.Module):
    """Two convolutions, each with group norm, and a way around both."""

    def __init__(self, inputs: int, outputs: int, config: Config) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(config.groups, outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(config.groups, outputs)
        self.around = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(self.dropout(y)))
        return F.silu(y + self.around(x))


class Up(nn.Module):
    """Twice the size, half the channels."""

    def __init__(self, inputs: int, config: Config) -> None:
        super().__init__()
        self.mode = config.upsample
        if self.mode == "transposed":
            self.conv: nn.Module = nn.ConvTranspose2d(inputs, inputs // 2, 2, stride=2)
        else:
            self.conv = nn.Conv2d(inputs, inputs // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode != "transposed":
            x = F.interpolate(x, scale_factor=2, mode=self.mode)
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = [config.width * 2**level for level in range(config.levels + 1)]
        self.inlet = nn.Conv2d(config.channels, config.width, 3, padding=1)
        self.down = nn.ModuleList(Double(widths[max(i - 1, 0)], widths[i], config) for i in range(config.levels + 1))
        self.up = nn.ModuleList(Up(width, config) for width in widths[:0:-1])
        self.join = nn.ModuleList(Double(width, width // 2, config) for width in widths[:0:-1])
        self.outlet = nn.Conv2d(config.width, config.channels, 1)

    def forward(self, noisy: Tensor, clean: Tensor | None = None) -> Tensor:
        """The mean square of what is left of the noise; without the clean pictures, the estimate of them."""
        x, skips = self.inlet(noisy), []
        for level, block in enumerate(self.down):
            x = block(F.avg_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join):
            x = join(torch.cat((skips.pop(), up(x)), dim=1))
        estimate = noisy - self.outlet(x)
        return estimate if clean is None else F.mse_loss(estimate, clean)


def build(preset: str = "tiny", **overrides: Any) -> UNet:
    """The model of a preset, with any field of ``Config`` overridden. Weights come from torch's global generator."""
    return UNet(Config(**{**PRESETS[preset], **overrides}))


def batch(size: int, generator: torch.Generator, preset: str = "tiny", **overrides: Any) -> tuple[Tensor, Tensor]:
    """Random ``(noisy, clean)`` pictures: smooth ones, and noise over them."""
    config = Config(**{**PRESETS[preset], **overrides})
    small = torch.randn(size, config.channels, 2, 2, generator=generator)
    clean = F.interpolate(small, size=(config.size, config.size), mode="bilinear")
    return clean + 0.5 * torch.randn(clean.shape, generator=generator), clean
