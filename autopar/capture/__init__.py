"""Capture: an unmodified PyTorch training step as one Program, forward and backward."""

from autopar.capture.trace import capture, copied, find_loss
from autopar.capture.tree import OutputTree, rebuild_output

__all__ = ["OutputTree", "capture", "copied", "find_loss", "rebuild_output"]
