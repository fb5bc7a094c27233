"""A ResNet: residual blocks of two convolutions with batch norm, in stages that halve the picture and double the channels.

Plain single-device PyTorch. Batch norm takes its statistics over the whole batch and keeps running ones in buffers.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    size: int = 16  # height and width of a picture
    channels: int = 3
    width: int = 8  # channels of the first stage
    stages: tuple[int, ...] = (1, 2)  # blocks of every stage
    classes: int = 16
    stem: int = 3  # the first convolution's kernel
    pool: bool = False  # a max pooling after it


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "resnet18": dict(size=224, width=64, stages=(2, 2, 2, 2), classes=1000, stem=7, pool=True),
}


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.pool = config.pool
        self.stem, self.norm = conv(config.channels, config.width, config.stem, 2 if config.pool else 1), nn.BatchNorm2d(config.width)
        blocks, inputs = [], config.width
        for number, count in enumerate(config.stages):
            outputs = config.width * 2**number
            for index in range(count):
                blocks.append(Block(inputs, outputs, 2 if number and not index else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, config.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights by the fan out of every convolution; each block begins as its shortcut, almost."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Block):
                nn.init.constant_(module.norm2.weight, 0.25)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean cross-entropy over the images; without labels, the logits."""
        x = F.relu(self.norm(self.stem(images)))
        if self.pool:
            x = F.max_pool2d(x, 3, 2, padding=1)
        logits = self.head(torch.flatten(F.adaptive_avg_pool2d(self.blocks(x), 1), 1))
        return logits if labels is None else F.cross_entropy(logits, labels)


def build(preset: str = "tiny", **overrides: Any) -> ResNet:
    """The model of a preset, with any field of ``Config`` overridden. Weights come from torch's global generator."""
    return ResNet(Config(**{**PRESETS[preset], **overrides}))


def batch(size: int, generator: torch.Generator, preset: str = "tiny", **overrides: Any) -> tuple[Tensor, Tensor]:
    """Random ``(images, labels)``."""
    config = Config(**{**PRESETS[preset], **overrides})
    images = torch.randn(size, config.channels, config.size, config.size, generator=generator)
    return images, torch.randint(config.classes, (size,), generator=generator)
