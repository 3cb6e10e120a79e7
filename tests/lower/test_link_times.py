"""Predicted times of collectives, beside measurements that others have published, and what holds for any links."""

from __future__ import annotations

import random

import pytest

from foreplan.lower.links import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    KINDS,
    REDUCE_SCATTER,
    SEND,
    Cluster,
    Link,
    link_named,
    links,
    nanoseconds,
    sent_bytes,
)

MIB, GIB = 1 << 20, 1 << 30
# NVIDIA/dgxc-benchmarking, nccl/README.md: all_reduce_perf on 8 × H100 SXM, bytes and microseconds, out of place.
H100 = [(8, 13.67), (1024, 16.94), (64 << 10, 19.54), (MIB, 27.37), (8 * MIB, 83.04), (16 * MIB, 123.8)]
H100 += [(64 * MIB, 324.7), (256 * MIB, 1112.5), (GIB, 4029.4), (8 * GIB, 31307), (16 * GIB, 62648)]
# Azure/AI-benchmarking-guide, Azure_Results/ND_A100_v4_results.md: 8 × A100 SXM, bus bandwidth in GB/s.
A100 = [(16 * MIB, 109.2), (64 * MIB, 166.6), (256 * MIB, 213.9), (GIB, 228.1), (4 * GIB, 230.5), (8 * GIB, 231.6)]
# dstackai/dstack, examples/clusters/crusoe/README.md: two nodes of 8 × H100, InfiniBand, microseconds.
TWO_NODES = [(8, 29.78), (64 << 10, 37.85), (MIB, 87.08), (8 * MIB, 154.48), (64 * MIB, 472.43), (256 * MIB, 1305.66)]
TWO_NODES += [(GIB, 4511.97), (8 * GIB, 34448.4)]
# "B200 / Vultr POC — cluster test summary", 18 May 2026, section 10: 8 × B200, microseconds.
B200 = {
    ALL_REDUCE: [(16 * MIB, 106.99), (256 * MIB, 712.6), (GIB, 2601.84), (4 * GIB, 9026.71), (16 * GIB, 35667.8)],
    ALL_GATHER: [(16 * MIB, 49.04), (256 * MIB, 393.96), (GIB, 1486.06), (4 * GIB, 5723.35), (16 * GIB, 22357)],
    REDUCE_SCATTER: [(16 * MIB, 52.3), (256 * MIB, 388.79), (GIB, 1451.69), (4 * GIB, 5552.57), (16 * GIB, 21629.9)],
}


def cluster(ranks: int, inside: str, between: str = "infiniband-ndr", per_node: int = 8) -> Cluster:
    return Cluster(ranks, per_node, link_named(inside), link_named(between))


def microseconds(kind: str, nbytes: int, where: Cluster) -> float:
    return nanoseconds(kind, nbytes, where) / 1000


def bus_bandwidth(kind: str, nbytes: int, where: Cluster) -> float:
    """GB/s, as nccl-tests reports it (doc/PERFORMANCE.md)."""
    factor = {ALL_REDUCE: 2 * (where.ranks - 1) / where.ranks, BROADCAST: 1, SEND: 1}
    return nbytes * factor.get(kind, (where.ranks - 1) / where.ranks) / nanoseconds(kind, nbytes, where)


@pytest.mark.parametrize("nbytes, measured", H100)
def test_all_reduce_on_eight_h100(nbytes: int, measured: float) -> None:
    assert microseconds(ALL_REDUCE, nbytes, cluster(8, "nvlink4")) == pytest.approx(measured, rel=0.21)
    if nbytes >= GIB:
        assert bus_bandwidth(ALL_REDUCE, nbytes, cluster(8, "nvlink4")) == pytest.approx(480, rel=0.05)


@pytest.mark.parametrize("nbytes, measured", A100)
def test_all_reduce_on_eight_a100(nbytes: int, measured: float) -> None:
    """Rings reach their bandwidth later than the model says: below 256 MiB it is up to half faster."""
    within = 0.05 if nbytes >= GIB else 0.5
    assert bus_bandwidth(ALL_REDUCE, nbytes, cluster(8, "nvlink3")) == pytest.approx(measured, rel=within)


@pytest.mark.parametrize("kind", B200)
def test_collectives_on_eight_b200(kind: str) -> None:
    for nbytes, measured in B200[kind]:
        within = 0.05 if nbytes > GIB else 0.12
        assert microseconds(kind, nbytes, cluster(8, "nvlink5")) == pytest.approx(measured, rel=within), nbytes


def test_gathering_on_eight_h100() -> None:
    """NVIDIA/nccl issue 1281: reduce_scatter 360 GB/s, all_gather 350; nccl-tests issue 212: 370 by rings."""
    for kind, measured in ((REDUCE_SCATTER, 360), (ALL_GATHER, 350), (BROADCAST, 370)):
        assert bus_bandwidth(kind, 4 * GIB, cluster(8, "nvlink4")) == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(
    "where, nbytes, measured, within",
    [
        # NVIDIA/nccl issue 812: two DGX A100, "8x200Gbit/s IB cards and we measure 192GB/s AllReduce BusBW".
        (cluster(16, "nvlink3", "infiniband-hdr"), 8 * GIB, 192, 0.05),
        # aws-samples/awsome-distributed-training, micro-benchmarks/nccl-tests: two p5.48xlarge.
        (cluster(16, "nvlink4", "efa"), 16 * GIB, 487, 0.15),
        # The summary of B200 above: two nodes, NDR.
        (cluster(16, "nvlink5"), 16 * GIB, 717.9, 0.05),
        # NVIDIA/nccl-tests issue 283: 248 nodes of 8 × H200, "typically measuring around 350G".
        (cluster(1984, "nvlink4"), 512 * MIB, 350, 0.15),
        # NVIDIA/nccl-tests issue 119: three nodes of 8 × A100, four HDR adapters each, so 12 GB/s a device; "96GB/s is
        # the target, which you seem to reach".
        (cluster(24, "nvlink3", "12GB/s,5us"), 128 * MIB, 96, 0.1),
        # coreweave/nccl-tests, 2022: 16 nodes of 8 × A100, some 50 GB/s a node.
        (cluster(128, "nvlink3", "6.25GB/s,5us"), GIB, 45.4, 0.15),
    ],
)
def test_all_reduce_over_nodes(where: Cluster, nbytes: int, measured: float, within: float) -> None:
    assert bus_bandwidth(ALL_REDUCE, nbytes, where) == pytest.approx(measured, rel=within)


def test_cards_without_nvlink() -> None:
    """tinygrad/open-gpu-kernel-modules, README.md: 33.5 MB on six RTX 4090 in 2275 µs, with peer-to-peer copies. The
    article "RTX4090 GPUDirect P2P Unlocked!": eight of them without, 16 MiB in 1973 µs and 8 bytes in 39 µs.
    NVIDIA/nccl issue 1639: eight RTX 5090, 28 GB/s."""
    assert microseconds(ALL_REDUCE, 33_554_432, cluster(6, "pcie4")) == pytest.approx(2275, rel=0.05)
    assert microseconds(ALL_REDUCE, 16 * MIB, cluster(8, "pcie4-host")) == pytest.approx(1973, rel=0.1)
    assert microseconds(ALL_REDUCE, 8, cluster(8, "pcie4-host")) == pytest.approx(39, rel=0.1)
    assert bus_bandwidth(ALL_REDUCE, 8 * GIB, cluster(8, "pcie5-host")) == pytest.approx(28, rel=0.02)


@pytest.mark.parametrize("nbytes, measured", TWO_NODES)
def test_all_reduce_on_two_nodes_of_eight_h100(nbytes: int, measured: float) -> None:
    """Between 64 KiB and 256 MiB it is up to 44 % faster than measured."""
    within = 0.12 if nbytes >= GIB else 0.45
    assert microseconds(ALL_REDUCE, nbytes, cluster(16, "nvlink4")) == pytest.approx(measured, rel=within)


def test_short_messages_over_efa() -> None:
    """aws-samples/awsome-distributed-training, micro-benchmarks/nccl-tests: 256 bytes on two p5 in 66 µs."""
    assert microseconds(ALL_REDUCE, 256, cluster(16, "nvlink4", "efa")) == pytest.approx(66, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_and_no_bytes_cost_nothing(kind: str) -> None:
    for name in links():
        assert nanoseconds(kind, 10**9, cluster(1, name)) == sent_bytes(kind, 10**9, 1) == 0
        assert nanoseconds(kind, 0, cluster(16, name)) == 0
        assert nanoseconds(kind, 1, cluster(2, name)) > 0


def shapes(inside: Link, between: Link) -> list[Cluster]:
    return [Cluster(ranks, 8, inside, between) for ranks in (1, 2, 3, 5, 8, 16, 24, 64, 1024)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", links().values(), ids=lambda link: link.name)
def test_more_bytes_and_more_ranks_take_longer(kind: str, inside: Link) -> None:
    rng = random.Random(kind)
    for between in links().values():
        sizes = sorted(rng.randrange(1, 2 ** rng.randrange(1, 40)) for _ in range(12))
        for where in shapes(inside, between):
            times = [nanoseconds(kind, nbytes, where) for nbytes in sizes]
            assert times == sorted(times)
        if not inside.switch_bytes_per_second:  # a switch that adds up sends less to each of more devices
            for nbytes in sizes:
                times = [nanoseconds(kind, nbytes, where) for where in shapes(inside, between)]
                assert times == sorted(times)


@pytest.mark.parametrize("kind", KINDS)
def test_no_time_is_below_what_the_wires_allow(kind: str) -> None:
    """The bytes of a rank at the data sheet's figure; but for switches that add up, which send fewer."""
    for inside in links().values():
        for where in shapes(inside, link_named("infiniband-ndr")):
            bound = sent_bytes(kind, GIB, where.ranks) * 10**9 // inside.bytes_per_second
            if kind == ALL_REDUCE and inside.switch_bytes_per_second:
                bound = GIB * 10**9 // inside.bytes_per_second if where.ranks > 1 else 0
            assert nanoseconds(kind, GIB, where) >= bound


def test_the_slowest_link_bounds_a_ring() -> None:
    """Eight adapters a node carry what eight devices send on, so that NVLink waits for them; PCIe does not."""
    slow = 8 * link_named("infiniband-ndr").ring_bytes_per_second
    assert slow > link_named("nvlink4").ring_bytes_per_second  # so here it is NVLink that bounds
    assert bus_bandwidth(ALL_GATHER, 8 * GIB, cluster(64, "nvlink4")) == pytest.approx(365, rel=0.02)
    assert bus_bandwidth(ALL_GATHER, 8 * GIB, cluster(64, "nvlink5")) == pytest.approx(slow / 10**9, rel=0.02)
    assert bus_bandwidth(ALL_GATHER, 8 * GIB, cluster(64, "pcie4")) == pytest.approx(24.5, rel=0.02)


def test_a_port_that_a_node_shares() -> None:
    """The whole node leaves through it: a ring at its bandwidth, and eight sends at once in eight times the time."""
    ten = link_named("ethernet-10g").ring_bytes_per_second / 10**9
    assert bus_bandwidth(ALL_GATHER, GIB, cluster(16, "nvlink4", "ethernet-10g")) == pytest.approx(ten, rel=0.01)
    assert bus_bandwidth(SEND, GIB, cluster(16, "nvlink4", "ethernet-10g")) == pytest.approx(ten / 8, rel=0.01)
    assert bus_bandwidth(SEND, GIB, cluster(16, "nvlink4")) == pytest.approx(48, rel=0.01)
    assert bus_bandwidth(SEND, GIB, cluster(8, "nvlink4")) == pytest.approx(365, rel=0.01)


def test_a_node_of_one_device_knows_the_link_between_alone() -> None:
    alone = [cluster(8, inside, per_node=1) for inside in ("memory", "nvlink5")]
    for kind in KINDS:
        slow, fast = (nanoseconds(kind, 10 * MIB, where) for where in alone)
        assert slow == fast
