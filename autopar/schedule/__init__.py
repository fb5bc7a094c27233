"""Pipeline schedules: what each rank computes, in which order; checked, drawn, timed, and lowered to sends and receives."""

from autopar.schedule.action import KINDS, Action, Schedule
from autopar.schedule.build import SCHEDULES, build
from autopar.schedule.clock import Span, Times
from autopar.schedule.edge import Edge, chain, needs
from autopar.schedule.lower import Channel, Compute, Flow, Instruction, Message, Programs, Receive, Send, flow, lower
from autopar.schedule.search import lower_bound, search
from autopar.schedule.simulate import Result, simulate
from autopar.schedule.transport import channels, check_transport
from autopar.schedule.validate import Peak, peak_live, validate

__all__ = [
    "KINDS", "SCHEDULES", "Action", "Channel", "Compute", "Edge", "Flow", "Instruction", "Message", "Peak", "Programs", "Receive",
    "Result", "Schedule", "Send", "Span", "Times", "build", "chain", "channels", "check_transport", "flow", "lower", "lower_bound",
    "needs", "peak_live", "search", "simulate", "validate",
]  # fmt: skip
