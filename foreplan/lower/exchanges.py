"""What a step exchanges with other ranks: how long it takes, beside what the step computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from foreplan.base.errors import PlanError, UsageError
from foreplan.graph.op import Types
from foreplan.lower.links import ALL_GATHER, BROADCAST, REDUCE_SCATTER, SEND, Cluster, cluster_of, nanoseconds
from foreplan.lower.program import Program
from foreplan.lower.target import DeviceProfile
from foreplan.ops.collective import Begin, Finish
from foreplan.ops.point_to_point import BeginReceive, BeginSend
from foreplan.passes.ranks import Beside
from foreplan.planner import Plan

# Of exchanges by name, the collective whose traffic is the same. Each rank sends another piece to each, as rings do.
_AS = {"all_gather": ALL_GATHER, "all_to_all": REDUCE_SCATTER, "broadcast": BROADCAST, "shift": SEND}


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of one rank in a step.

    Attributes:
        ranks: how many take part.
        count: how many exchanges there are.
        sent: bytes that a rank sends; as many arrive.
        nanoseconds: predicted, of all of them by themselves.
        step: predicted, of the step with them beside what it computes.
    """

    ranks: int = 1
    count: int = 0
    sent: int = 0
    nanoseconds: int = 0
    step: int = 0

    @staticmethod
    def of(program: Program, plan: Plan) -> Exchanges:
        """Of one run of a plan. Two things go on at a time: what the step computes, and exchanges, one after the other.
        What waits for an exchange stands still until it is done. Where processors move the bytes themselves, exchanges
        take their time in what waits, and nothing is computed meanwhile.
        """
        count = sent = taken = now = free = 0  # `now` for what computes, `free` for the links
        done: dict[int, int] = {}
        for step in plan.steps:
            action, call = program.actions[step.action], program.calls[step.action]
            if begin := call.of(Begin):
                count, sent, taken = count + 1, sent + begin.op.sent(begin.inputs[0].type), taken + action.nanoseconds
                free = max(now, free) + action.nanoseconds
                done[action.writes[0]] = free
                now = free if begin.op.wait else now
            elif call.of(Finish):
                now = max(now, done.get(call.inputs[0].value, 0)) + action.nanoseconds
                taken += action.nanoseconds
            else:
                now += action.nanoseconds
        return Exchanges(program.ranks, count, sent, taken, max(now, free))

    def __add__(self, other: Exchanges) -> Exchanges:
        """Of one and then the other."""
        return Exchanges(
            max(self.ranks, other.ranks),
            self.count + other.count,
            self.sent + other.sent,
            self.nanoseconds + other.nanoseconds,
            self.step + other.step,
        )

    def __mul__(self, times: int) -> Exchanges:
        """Of several."""
        return Exchanges(self.ranks, self.count * times, self.sent * times, self.nanoseconds * times, self.step * times)


def check_waits(program: Program) -> None:
    """Check that each wait names what its exchange has begun with, so that this stays as it is until then.

    Raises:
        PlanError: one does not; names it.
    """
    given = {call.outputs[0].value: call.inputs[0] for call in program.calls_of(Begin)}
    for wait in program.calls_of(Finish):
        if given.get(wait.inputs[0].value) != wait.inputs[1]:
            raise PlanError(f"node {wait.node!r} waits for an exchange, and names another tensor than what is sent")


@lru_cache(maxsize=64)
def cluster_from(text: str, profile: DeviceProfile, ranks: int) -> Cluster:
    """The cluster that a text tells of, such as "nvlink4*8+infiniband-ndr": the link within a node, how many devices
    each has, and the link between nodes. What it leaves out is as the device is known for.

    Raises:
        UsageError: there is no such link, or the ranks do not fill their nodes.
    """
    first, _, between = text.partition("+")
    inside, star, count = first.partition("*")
    if star:
        try:
            return cluster_of(profile, ranks, link=inside, between=between, per_node=int(count))
        except (UsageError, ValueError) as error:
            raise UsageError(f"links {text!r}: {error}") from None
    return cluster_of(profile, ranks, link=inside, between=between)


def cluster_for(op: Begin, links: str, profile: DeviceProfile) -> Cluster:
    """The ranks of a group in which an exchange takes place."""
    return cluster_from(links, profile, op.ranks * op.stride).group(op.stride)


def goes_on_beside(links: str, profile: DeviceProfile) -> Beside:
    """Whether an exchange goes on while a device computes: not where processors of the ranks move the bytes."""
    return lambda op: not cluster_for(op, links, profile).by_processor


def exchange_nanoseconds(op: Begin, inputs: Types, cluster: Cluster) -> int:
    """The predicted time of an exchange; of a message over the link that it crosses, its sender's side has it."""
    if isinstance(op, BeginReceive):
        return 0
    if isinstance(op, BeginSend):
        return nanoseconds(SEND, inputs[0].nbytes, cluster.between_two(op.own, op.peer))
    whole = op.infer(inputs)[0].nbytes
    return nanoseconds(_AS[op.kind], whole, cluster)
