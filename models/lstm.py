"""A recurrent language model: an embedding, recurrent layers over the sequence, and a head.

Plain single-device PyTorch. ``kind`` says what runs over the sequence: ``lstm``, ``gru`` and ``rnn`` are torch's layers,
``lstm cells`` and ``gru cells`` are cells in a loop of this file.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100  # a label that counts neither in the loss nor in its mean
LAYERS: dict[str, type[nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
CELLS: dict[str, type[nn.RNNCellBase]] = {"lstm cells": nn.LSTMCell, "gru cells": nn.GRUCell}


@dataclass(frozen=True)
class Config:
    kind: str = "lstm"
    vocab: int = 256  # one id for each byte
    sequence: int = 8
    hidden: int = 32
    layers: int = 2
    dropout: float = 0.0  # between the layers


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "demo": dict(sequence=64, hidden=256),
}


class Cells(nn.Module):
    """Layers of cells, one step of the sequence after the other."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.cells = nn.ModuleList(CELLS[config.kind](config.hidden, config.hidden) for _ in range(config.layers))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        states: list[Any] = [None] * len(self.cells)
        outputs = []
        for y in x.unbind(1):
            for number, cell in enumerate(self.cells):
                states[number] = cell(self.dropout(y) if number else y, states[number])
                y = states[number][0] if isinstance(states[number], tuple) else states[number]
            outputs.append(y)
        return torch.stack(outputs, 1), None


class LanguageModel(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        if config.kind in LAYERS:
            self.recurrent: nn.Module = LAYERS[config.kind](
                config.hidden, config.hidden, config.layers, batch_first=True, dropout=config.dropout
            )
        else:
            self.recurrent = Cells(config)
        self.head = nn.Linear(config.hidden, config.vocab)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean cross-entropy over the labels that count; without labels, the logits."""
        logits = self.head(self.recurrent(self.tokens(ids))[0])
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def build(preset: str = "tiny", **overrides: Any) -> LanguageModel:
    """The model of a preset, with any field of ``Config`` overridden. Weights come from torch's global generator."""
    return LanguageModel(Config(**{**PRESETS[preset], **overrides}))


def batch(size: int, generator: torch.Generator, preset: str = "tiny", **overrides: Any) -> tuple[Tensor, Tensor]:
    """Random ``(ids, labels)``. Each row ends in a stretch without labels, of a length of its own, as padding would."""
    config = Config(**{**PRESETS[preset], **overrides})
    text = torch.randint(config.vocab, (size, config.sequence + 1), generator=generator)
    ids, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    kept = torch.randint(1, config.sequence + 1, (size, 1), generator=generator)
    return ids, labels.masked_fill(torch.arange(config.sequence) >= kept, IGNORE)
