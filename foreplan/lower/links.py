"""Communication between ranks: the bytes that a rank sends, and the time that this takes, from figures of links.

`nbytes` is the size of the whole tensor: what an `all_reduce`, a `broadcast`, a `send` or a `recv` has on every rank,
what a `reduce_scatter` begins with, and what an `all_gather` ends with.
"""

from __future__ import annotations

import difflib
import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from foreplan.base.arguments import choice, shown, whole
from foreplan.base.calibration import Kind, own_calibrations
from foreplan.base.errors import UsageError
from foreplan.base.units import ceil_div, parse_nanoseconds, parse_rate
from foreplan.lower.target import DeviceProfile

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST = "all_reduce", "reduce_scatter", "all_gather", "broadcast"
SEND, RECV = "send", "recv"
KINDS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECV)
MOST_RANKS = 1 << 20
_TREE = (92, 100)  # of a link's bandwidth, which trees reach: NCCL's src/graph/tuning.cc
_FLAGS = 2  # short messages have a flag beside each word
_ACROSS = 8  # and reach an eighth of the bandwidth between nodes: NCCL's llMaxBws beside eight adapters
_SECOND = 1_000_000_000
LINKS = Kind(
    file="links.toml",
    package="",
    key="link",
    always=("ring_bytes_per_second", "node_bytes_per_second", "hop_nanoseconds"),
    perhaps=(),
    assumed=(),
    what="How fast ranks on this machine exchange bytes",
    page="docs/links.md",
)


@dataclass(frozen=True)
class Link:
    """What joins devices in a node, or nodes. `runtime/links.toml` has those that have names, and the sources.

    Attributes:
        name: as people type it.
        title: for people.
        bytes_per_second: of one device in one direction, by the data sheet.
        ring_bytes_per_second: what rings of many devices reach.
        start_nanoseconds: of any collective, before its first byte moves.
        hop_nanoseconds: from one device to the next, of short messages.
        bulk_hop_nanoseconds: the same, of long messages.
        switch_bytes_per_second: what a device sends in an all_reduce in which the switch adds up; 0: it cannot.
        switch_nanoseconds: what such an all_reduce takes besides those bytes.
        node_bytes_per_second: what all devices of a node reach together; 0: each reaches what one does.
        by_processor: the processors of the ranks move the bytes themselves, and compute nothing meanwhile.
        sources: pairs of a figure and where it comes from; "assumed" begins one that nobody has published.
    """

    name: str
    title: str
    bytes_per_second: int
    ring_bytes_per_second: int
    start_nanoseconds: int
    hop_nanoseconds: int
    bulk_hop_nanoseconds: int
    switch_bytes_per_second: int = 0
    switch_nanoseconds: int = 0
    node_bytes_per_second: int = 0
    by_processor: bool = False
    sources: tuple[tuple[str, str], ...] = ()

    def of_node(self, devices: int) -> int:
        """Bytes a second that leave a node through this link, by rings that all its devices take part in."""
        own = self.ring_bytes_per_second * devices
        return min(own, self.node_bytes_per_second or own)

    def of_device(self, devices: int) -> int:
        """Bytes a second for each device of a node, all at once."""
        return max(1, self.of_node(devices) // devices)


@dataclass(frozen=True)
class Cluster:
    """Ranks, a device each, in nodes that are alike.

    Attributes:
        ranks: of the whole cluster.
        per_node: devices in a node that is full; a cluster of fewer ranks is a part of one.
        inside: the link between devices of a node.
        between: the link between nodes.
    """

    ranks: int
    per_node: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            UsageError: there is no rank or no device, or the last node would not be full.
        """
        whole("the number of ranks", self.ranks, 1, MOST_RANKS)
        whole("the number of devices a node", self.per_node, 1, MOST_RANKS)
        if self.ranks > self.per_node and self.ranks % self.per_node:
            less = self.ranks - self.ranks % self.per_node
            raise UsageError(
                f"{self.ranks} ranks do not fill nodes of {self.per_node} devices: choose {less} or "
                f"{less + self.per_node} ranks, or say how many devices of a node take part"
            )

    def group(self, stride: int) -> Cluster:
        """Every `stride`-th of its ranks. Those between them, in groups of their own, have links of their own."""
        return Cluster(self.ranks // stride, max(1, self.per_node // stride), self.inside, self.between)

    def between_two(self, one: int, other: int) -> Cluster:
        """What lies between two ranks: one node, whose devices all send at once, or the link between two nodes."""
        if one // self.per_node == other // self.per_node:
            return Cluster(self.devices, self.devices, self.inside, self.between)
        return Cluster(2, 1, self.inside, self.between)

    @property
    def devices(self) -> int:
        """In each node."""
        return min(self.ranks, self.per_node)

    @property
    def nodes(self) -> int:
        """Their number."""
        return self.ranks // self.devices

    @property
    def by_processor(self) -> bool:
        """Whether the processors of the ranks move all bytes themselves."""
        return self.nodes == 1 and self.inside.by_processor


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    file = importlib.resources.files("foreplan.runtime") / "links.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def links() -> Mapping[str, Link]:
    """Every link that has a name."""
    table = _table()
    return MappingProxyType({name: _link(name, entry, table["latencies"]) for name, entry in table["links"].items()})


def _link(name: str, entry: Mapping[str, Any], latencies: Mapping[str, Any]) -> Link:
    """An entry of the table, with the latencies that it names."""
    figures = {key: value for key, value in entry.items() if key not in ("latency", "sources")}
    times = dict(latencies[entry["latency"]])
    sources = entry["sources"] | {"latency": times.pop("source")}
    in_nanoseconds = {f"{key}_nanoseconds": value for key, value in times.items()}
    return Link(name, **figures, **in_nanoseconds, sources=tuple(sources.items()))


def link_named(text: str) -> Link:
    """The link of that name, such as `nvlink4`, as it was measured on this machine, if it was; or the user's own, as
    bandwidth and latency: `12.5GB/s,5us`. They are those that collectives reach, of one device in one direction, and of
    one hop.

    Raises:
        UsageError: there is no such link; lists those that there are.
        TargetError: the user's file of measured links is broken.
    """
    known = links()
    own = 'or your own as bandwidth and latency, such as "12.5GB/s,5us"'
    if not isinstance(text, str):
        raise UsageError(f"a link is one of {', '.join(known)}, {own}, and is {shown(text)}")
    if text.strip().lower() in known:
        return _as_measured(known[text.strip().lower()])
    bandwidth, comma, latency = text.partition(",")
    if comma:
        rate, hop = parse_rate(bandwidth), parse_nanoseconds(latency)
        return Link(text, text, rate, rate, 0, hop, hop)
    near = difflib.get_close_matches(text.strip().lower(), known, n=2)
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise UsageError(f"there is no link {text!r:.40}{meant}; choose one of {', '.join(known)}, {own}")


def _as_measured(link: Link) -> Link:
    """A link with the figures that were last measured, by `foreplan devices --calibrate`."""
    if not link.by_processor:
        return link
    figures = [each.figures for each in own_calibrations(LINKS) if each.name == link.name]
    if not figures:
        return link
    rate, node, hop = (figures[-1][name] for name in LINKS.always)
    return replace(
        link,
        bytes_per_second=max(rate, link.bytes_per_second),
        ring_bytes_per_second=rate,
        node_bytes_per_second=node,
        hop_nanoseconds=hop,
        bulk_hop_nanoseconds=hop,
    )


def cluster_of(
    profile: DeviceProfile, ranks: int, *, link: str = "", between: str = "", per_node: int | None = None
) -> Cluster:
    """A cluster of one kind of device.

    Args:
        profile: of the device: which link it has and how many of it a node holds.
        ranks: how many devices take part.
        link: the link inside a node; empty: the device's.
        between: the link between nodes; empty: that of `runtime/links.toml`.
        per_node: devices a node; None: as the profile says, or all ranks where it names no number.

    Raises:
        UsageError: there is no such link, or the ranks do not fill their nodes.
    """
    held = profile.per_node if per_node is None else per_node
    inside, outside = link_named(link or profile.link), link_named(between or _table()["between"])
    return Cluster(ranks, ranks if held is None else held, inside, outside)


def sent_bytes(kind: str, nbytes: int, ranks: int) -> int:
    """The bytes that a rank sends, by an algorithm that sends as few as possible; rounded up.

    Where chunks differ in size, since `ranks` does not divide `nbytes`, this is the mean over ranks. In a `broadcast`
    the last rank of the pipeline sends nothing, and a `recv` receives that much.

    References: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, for
    2 (n - 1) / n; Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005,
    for the others.

    Args:
        kind: one of KINDS.
        nbytes: of the whole tensor.
        ranks: that take part.
    """
    choice("collective", kind, KINDS)
    if ranks == 1:
        return 0
    if kind in (BROADCAST, SEND, RECV):
        return nbytes
    passes = 2 if kind == ALL_REDUCE else 1
    return ceil_div(passes * (ranks - 1) * nbytes, ranks)


def nanoseconds(kind: str, nbytes: int, cluster: Cluster) -> int:
    """The predicted time of a collective with nothing else under way: that of the best way, as NCCL chooses.

    A way takes a latency, which depends on the hops, and a time for the bytes, at the bandwidth of the slowest link
    that they pass (Hockney 1994). Messages go in one of two forms: short ones have a flag beside every word, which
    saves waiting and costs bandwidth (NCCL's protocol LL); long ones go in large pieces (its protocol Simple).

    References: Hockney, "The communication challenge for MPP", 1994; Thakur, Rabenseifner and Gropp 2005; NCCL,
    src/graph/tuning.cc, for the latencies of rings and trees over nodes and for the choice of the least; Hu et al.,
    "Demystifying NCCL", 2025, for its protocols.

    Args:
        kind: one of KINDS.
        nbytes: of the whole tensor.
        cluster: all of its ranks take part, and in a `send` they all send at once.
    """
    choice("collective", kind, KINDS)
    if cluster.ranks == 1 or nbytes == 0:
        return 0
    if kind in (SEND, RECV):
        return min(_message(nbytes, cluster, short) for short in (True, False))
    ways = [_ring(kind, nbytes, cluster, short) for short in (True, False)]
    if kind == ALL_REDUCE:
        ways += [_tree(nbytes, cluster, short) for short in (True, False)]
        if cluster.inside.switch_bytes_per_second and cluster.devices > 1:
            ways.append(_switch(nbytes, cluster))
    return min(ways)


def _message(nbytes: int, cluster: Cluster, short: bool) -> int:
    """From each rank to one other, all at once: over the slower link, of those that there are."""
    devices, times = cluster.devices, []
    if devices > 1:
        rate = _rate(cluster.inside.of_device(devices), short, _FLAGS)
        times.append(_hop(cluster.inside, short) + _time(nbytes, rate))
    if cluster.nodes > 1:
        rate = _rate(cluster.between.of_device(devices), short, _ACROSS)
        times.append(_hop(cluster.between, short) + _time(nbytes, rate))
    return _start(cluster) + max(times)


def _ring(kind: str, nbytes: int, cluster: Cluster, short: bool) -> int:
    """Around all ranks, node by node: every rank sends to the next one, and so every node to the next node."""
    passes = 2 if kind == ALL_REDUCE else 1
    hops, crossings = passes * (cluster.ranks - 1), passes * (cluster.nodes - 1)
    sent = sent_bytes(kind, nbytes, cluster.ranks)
    return _start(cluster) + _waits(hops - crossings, crossings, cluster, short) + _streams(sent, sent, cluster, short)


def _tree(nbytes: int, cluster: Cluster, short: bool) -> int:
    """Sums go up a tree and down again: a chain in each node, and two binary trees over nodes, of half the bytes each
    (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009)."""
    waits = _waits(2 * (cluster.devices - 1), 2 * _levels(cluster.nodes), cluster, short)
    streams = _streams(2 * nbytes, _over_trees(nbytes, cluster), cluster, short)
    share, of = _TREE
    return _start(cluster) + waits + ceil_div(streams * of, share)


def _switch(nbytes: int, cluster: Cluster) -> int:
    """Switches add up in each node, and trees over nodes (NCCL's NVLS and NVLSTree): a device sends all that it has
    once, and its share of the sums, which the switch gives to all others."""
    inside, between = cluster.inside, cluster.between
    sent, leaving = nbytes + ceil_div(nbytes, cluster.devices), _over_trees(nbytes, cluster)
    streams = max(_time(sent, inside.switch_bytes_per_second), _time(leaving, between.of_node(cluster.devices)))
    waits = 2 * _levels(cluster.nodes) * between.bulk_hop_nanoseconds
    return _start(cluster) + inside.switch_nanoseconds + waits + streams


def _over_trees(nbytes: int, cluster: Cluster) -> int:
    """What leaves a node that is in the middle of a tree: everything on its way up, and everything on its way down. Of
    two nodes each is at an end."""
    return min(2, cluster.nodes - 1) * nbytes


def _start(cluster: Cluster) -> int:
    return max(cluster.inside.start_nanoseconds, cluster.between.start_nanoseconds if cluster.nodes > 1 else 0)


def _waits(inside: int, between: int, cluster: Cluster, short: bool) -> int:
    """The time of that many hops of the two links."""
    return inside * _hop(cluster.inside, short) + between * _hop(cluster.between, short)


def _hop(link: Link, short: bool) -> int:
    return link.hop_nanoseconds if short else link.bulk_hop_nanoseconds


def _streams(sent: int, leaving: int, cluster: Cluster, short: bool) -> int:
    """The time of the bytes that each device sends in its node, and of those that leave each node, at the same time."""
    devices, within, across = cluster.devices, 0, 0
    if devices > 1:
        within = _time(sent, _rate(cluster.inside.of_device(devices), short, _FLAGS))
    if cluster.nodes > 1:
        across = _time(leaving, _rate(cluster.between.of_node(devices), short, _ACROSS))
    return max(within, across)


def _rate(bytes_per_second: int, short: bool, factor: int) -> int:
    return max(1, bytes_per_second // factor) if short else bytes_per_second


def _time(nbytes: int, bytes_per_second: int) -> int:
    return ceil_div(nbytes * _SECOND, bytes_per_second)


def _levels(nodes: int) -> int:
    """Of a binary tree with that many nodes, besides the root: the logarithm, rounded up."""
    return (nodes - 1).bit_length()
