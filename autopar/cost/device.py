"""Devices and links as records of what they can do. No choices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What one rank computes with and how it reaches the others.

    Attributes:
        flops: dense multiply-adds times two, per second.
        memory_bandwidth: bytes per second.
        link_bandwidth: bytes per second that a rank can send.
        latency: seconds of a collective beyond its bytes.
    """

    name: str = "generic"
    flops: float = 1e14
    memory_bandwidth: float = 1e12
    link_bandwidth: float = 5e10
    latency: float = 1e-5

    def seconds(self, flops: float, nbytes: float) -> float:
        """Time of a node that does so many flops and touches so many bytes: whichever is slower."""
        return max(flops / self.flops, nbytes / self.memory_bandwidth)

    def comm_seconds(self, nbytes: float) -> float:
        """Time of one collective in which a rank sends so many bytes."""
        return self.latency + nbytes / self.link_bandwidth


GENERIC = Device()
