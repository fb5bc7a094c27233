"""Capture: an unmodified PyTorch training step as one Program, forward and backward."""

from autopar.capture.copies import copied, filled, without_values
from autopar.capture.trace import capture, find_loss
from autopar.capture.tree import OutputTree, rebuild_output

__all__ = ["OutputTree", "capture", "copied", "filled", "find_loss", "rebuild_output", "without_values"]
