"""Links by name, clusters, and the bytes that collectives send, beside algorithms that are carried out step by step."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import foreplan as fp
from foreplan.base.calibration import Calibration, record
from foreplan.base.errors import TargetError, UsageError
from foreplan.lower import target_named
from foreplan.lower.exchanges import Exchanges, cluster_from
from foreplan.lower.links import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    KINDS,
    LINKS,
    RECV,
    REDUCE_SCATTER,
    SEND,
    Cluster,
    Link,
    cluster_of,
    link_named,
    links,
    nanoseconds,
    sent_bytes,
)
from foreplan.ops.collective import Begin, Finish
from foreplan.passes.ranks import setting
from foreplan.runtime.cuda.device import devices

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "links.md").read_text()
NDR = link_named("infiniband-ndr")
# NCCL's kinds of hardware: NVIDIA/nccl, src/graph/topo.h, in GB/s a link or a port.
NCCL = {"nvlink3": 12 * 20.0, "nvlink4": 18 * 20.6, "nvlink5": 18 * 40.1, "pcie3": 12.0}


@pytest.mark.parametrize("link", links().values(), ids=lambda link: link.name)
def test_every_figure_of_a_link_is_one_and_has_a_source(link: Link) -> None:
    figures = {"bytes_per_second": link.bytes_per_second, "ring_bytes_per_second": link.ring_bytes_per_second}
    if link.switch_bytes_per_second:
        figures |= {"switch_bytes_per_second": link.switch_bytes_per_second}
        figures |= {"switch_nanoseconds": link.switch_nanoseconds}
    assert all(type(value) is int and value > 0 for value in figures.values())
    assert link.ring_bytes_per_second <= link.bytes_per_second and link.switch_bytes_per_second < link.bytes_per_second
    assert link.start_nanoseconds >= 0 and 0 < link.hop_nanoseconds <= link.bulk_hop_nanoseconds
    assert link.title and [name for name, _ in link.sources] == [*figures, "latency"]
    assert all(len(source) > 9 for _, source in link.sources)
    assert link_named(link.name) == link_named(f" {link.name.upper()}") == link
    if link.name in NCCL:
        assert link.ring_bytes_per_second == pytest.approx(NCCL[link.name] * 10**9, rel=0.06)


def test_a_better_generation_is_faster() -> None:
    generations = (["nvlink3", "nvlink4", "nvlink5"], ["pcie3", "pcie4", "pcie5"])
    generations += (["infiniband-hdr", "infiniband-ndr", "infiniband-xdr"],)
    for names in (*generations, ["ethernet-10g", "ethernet-25g", "ethernet-100g"]):
        rates = [link_named(name).ring_bytes_per_second for name in names]
        assert rates == sorted(set(rates))


def test_which_links_cards_and_hosts_have() -> None:
    found = {name: (device.link, device.per_node) for name, device in devices().items()}
    assert {found[name] for name in ("h100", "h200")} == {("nvlink4", 8)}
    assert {found[name] for name in ("a100", "a100-40gb")} == {("nvlink3", 8)}
    assert found["b200"] == ("nvlink5", 8)
    assert all(
        link.startswith("pcie") for name, (link, _) in found.items() if name[:4] not in ("h100", "h200", "a100", "b200")
    )
    h100 = target_named("cuda:h100").profile
    assert cluster_of(h100, 16) == Cluster(16, 8, link_named("nvlink4"), NDR)
    assert cluster_of(h100, 8, link="pcie5", between="efa", per_node=4) == Cluster(
        8, 4, link_named("pcie5"), link_named("efa")
    )
    for target in ("numpy", "cpu:threads=1"):
        assert cluster_of(target_named(target).profile, 6) == Cluster(6, 6, link_named("memory"), NDR)


@pytest.mark.parametrize("device", devices().values(), ids=lambda device: device.name)
def test_a_cards_link_is_no_slower_than_its_bus(device) -> None:
    link = link_named(device.link)
    assert link.bytes_per_second >= 0.9 * device.bus_bytes_per_second
    if link.name.startswith("pcie"):
        assert link.bytes_per_second == pytest.approx(device.bus_bytes_per_second, rel=0.02)
        assert link.name.endswith("-host") == ("GeForce" in device.title)


def test_an_unknown_link_is_told_the_known_ones() -> None:
    with pytest.raises(UsageError, match="did you mean nvlink5") as told:
        link_named("nvlink55")
    assert all(name in str(told.value) for name in links()) and "12.5GB/s,5us" in str(told.value)
    for text in ("", "x" * 10**6, "zero\0byte", "12.5GB/s"):
        with pytest.raises(UsageError) as told:
            link_named(text)
        assert len(str(told.value)) < 500
    with pytest.raises(UsageError, match="is None"):
        link_named(None)  # type: ignore[arg-type]


def test_a_link_of_ones_own() -> None:
    mine = link_named("100Gbit/s, 5us")
    assert (mine.ring_bytes_per_second, mine.hop_nanoseconds, mine.name) == (12_500_000_000, 5000, "100Gbit/s, 5us")
    two = Cluster(2, 2, mine, NDR)
    assert nanoseconds(SEND, 12_500_000, two) == 1_005_000  # Hockney: the latency, and the bytes by the bandwidth
    for text in ("fast,5us", "12GB/s,soon", "12Gb/s,5us", ",", "0GB/s,1us"):
        with pytest.raises(UsageError, match="such as"):
            link_named(text)


def test_a_cluster_has_full_nodes() -> None:
    assert [(c.nodes, c.devices) for c in (Cluster(n, 8, NDR, NDR) for n in (1, 5, 8, 24))] == [
        (1, 1),
        (1, 5),
        (1, 8),
        (3, 8),
    ]
    with pytest.raises(UsageError, match="choose 8 or 16 ranks"):
        Cluster(12, 8, NDR, NDR)
    for ranks, per_node in ((0, 8), (8, 0), (-1, 8), (2.0, 8), (True, 8)):
        with pytest.raises(UsageError, match="must be a whole number"):
            Cluster(ranks, per_node, NDR, NDR)  # type: ignore[arg-type]


def chunks(nbytes: int, ranks: int) -> list[int]:
    """As equal as they can be."""
    return [nbytes * (i + 1) // ranks - nbytes * i // ranks for i in range(ranks)]


class Ranks:
    """Ranks in a ring. Each holds, of every chunk, a set of those whose data is summed up in it."""

    def __init__(self, nbytes: int, ranks: int) -> None:
        self.sizes = chunks(nbytes, ranks)
        self.holds = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
        self.sent = [0] * ranks

    def step(self, which: Callable[[int], int], adds: bool) -> None:
        """Every rank sends one chunk to the next rank, which adds it to its own, or takes it instead."""
        ranks = len(self.sizes)
        moving = [(rank, which(rank) % ranks, set(self.holds[rank][which(rank) % ranks])) for rank in range(ranks)]
        for rank, chunk, content in moving:
            self.sent[rank] += self.sizes[chunk]
            there = self.holds[(rank + 1) % ranks]
            assert not (adds and there[chunk] & content), "nothing is added twice"
            there[chunk] = there[chunk] | content if adds else content

    def reduce_scatter(self) -> None:
        for k in range(len(self.sizes) - 1):
            self.step(lambda rank, k=k: rank - k, adds=True)

    def all_gather(self, own: int) -> None:
        for k in range(len(self.sizes) - 1):
            self.step(lambda rank, k=k: rank + own - k, adds=False)


def check_sent(kind: str, ring: Ranks, nbytes: int) -> None:
    """The mean over ranks, rounded up; and each rank is as near to it as chunks are equal."""
    ranks = len(ring.sizes)
    assert sent_bytes(kind, nbytes, ranks) == -(-sum(ring.sent) // ranks)
    assert max(ring.sent) - min(ring.sent) <= 2 and max(ring.sent) - sent_bytes(kind, nbytes, ranks) <= 2


@pytest.mark.parametrize("ranks", range(1, 18))
def test_rings_send_these_bytes_step_by_step(ranks: int) -> None:
    rng = random.Random(ranks)
    everyone = set(range(ranks))
    for nbytes in (0, 1, ranks, 1000, *(rng.randrange(1, 10**9) for _ in range(20))):
        ring = Ranks(nbytes, ranks)
        ring.reduce_scatter()
        check_sent(REDUCE_SCATTER, ring, nbytes)
        assert all(ring.holds[rank][(rank + 1) % ranks] == everyone for rank in range(ranks))
        ring.all_gather(own=1)
        check_sent(ALL_REDUCE, ring, nbytes)
        assert all(chunk == everyone for holds in ring.holds for chunk in holds)
        gathering = Ranks(nbytes, ranks)
        gathering.all_gather(own=0)
        check_sent(ALL_GATHER, gathering, nbytes)
        assert all(chunk == {i} for holds in gathering.holds for i, chunk in enumerate(holds))
        for kind in (BROADCAST, SEND, RECV):  # to the next rank, in a pipeline
            assert sent_bytes(kind, nbytes, ranks) == (nbytes if ranks > 1 else 0)


@pytest.mark.parametrize("ranks", [2, 8, 64, 400])
def test_zeros_volumes(ranks: int) -> None:
    """Rajbhandari et al., "ZeRO", 2020, section 7: of Ψ elements, 2 Ψ are moved in data parallel steps, 2 Ψ with
    gradients in shards, and 3 Ψ with parameters in shards, where (n - 1) / n counts as 1."""
    nbytes = 2 * 7_500_000_000  # of parameters, and of gradients, in float16
    share = nbytes * (ranks - 1) // ranks
    assert sent_bytes(ALL_REDUCE, nbytes, ranks) == pytest.approx(2 * share, abs=1)
    stage_2 = sent_bytes(REDUCE_SCATTER, nbytes, ranks) + sent_bytes(ALL_GATHER, nbytes, ranks)
    assert stage_2 == pytest.approx(2 * share, abs=2)
    stage_3 = 2 * sent_bytes(ALL_GATHER, nbytes, ranks) + sent_bytes(REDUCE_SCATTER, nbytes, ranks)
    assert stage_3 == pytest.approx(3 * share, abs=3)


def test_what_is_no_collective() -> None:
    with pytest.raises(UsageError, match="choose one of all_reduce"):
        sent_bytes("reduce_all", 8, 2)
    with pytest.raises(UsageError, match="choose one of all_reduce"):
        nanoseconds("reduce_all", 8, Cluster(2, 2, NDR, NDR))
    assert len(set(KINDS)) == 6


def test_a_cards_profile_names_a_link() -> None:
    profile = target_named("cuda:h100").profile
    assert isinstance(profile, fp.lower.DeviceProfile) and (profile.link, profile.per_node) == ("nvlink4", 8)


def row(link: Link) -> str:
    """Of the table in docs/links.md."""
    rates = [f"{rate / 10**9:,.4g}" for rate in (link.bytes_per_second, link.ring_bytes_per_second)]
    hops = [f"{hop / 1000:,.4g}" for hop in (link.hop_nanoseconds, link.bulk_hop_nanoseconds)]
    source = dict(link.sources)["ring_bytes_per_second"]
    return f"| {' | '.join((f'`{link.name}`', link.title, *rates, *hops, source))} |"


def test_the_page_shows_every_link() -> None:
    table = re.findall(r"^\| link \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.M)
    assert table == ["".join(f"{row(link)}\n" for link in links().values())]


def test_the_page_s_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(compile(code, "links.md", "exec"), {})
    sent, time = capsys.readouterr().out.splitlines()
    assert sent == "29.53125 GB sent by each rank"  # 2 · 63 / 64 of 15 GB
    assert 70 < float(time.split()[0]) < 90


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's file of measured links, in a folder of settings of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    cluster_from.cache_clear()
    yield tmp_path / "foreplan" / "links.toml"
    cluster_from.cache_clear()


def recorded(rate: int, node: int, hop: int, library: str = "MPICH") -> None:
    """Write a measurement of the link of ranks on one machine."""
    figures = dict(zip(LINKS.always, (rate, node, hop)))
    record(Calibration(LINKS, "memory", {"library": library}, figures))


def test_a_measured_link_is_believed(measured: Path) -> None:
    """Hockney's time, of two ranks, and of four that share what the machine reaches; the latest measurement counts."""
    recorded(1, 1, 1, "another")
    recorded(8_000_000_000, 16_000_000_000, 9_000)
    profile = target_named("numpy").profile
    two, four = (cluster_of(profile, ranks) for ranks in (2, 4))
    assert nanoseconds(ALL_GATHER, 16_000_000, two) == 9_000 + 1_000_000
    assert nanoseconds(ALL_GATHER, 16_000_000, four) == 3 * 9_000 + 3_000_000
    assert link_named("gloo") is links()["gloo"] and link_named("nvlink4") is links()["nvlink4"]


def test_a_broken_measurement_is_told(measured: Path) -> None:
    measured.parent.mkdir()
    measured.write_text("[[calibrated]]")
    with pytest.raises(TargetError, match=r"needs a link and versions.*--calibrate"):
        cluster_of(target_named("numpy").profile, 2)


def test_what_ranks_on_a_machine_exchange_takes_the_time_of_computing(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processors move the bytes. Over links of other kinds exchanges go on beside what is computed."""
    monkeypatch.setattr(setting, "LEAST", 1 << 16)
    model = fp.models.build("mlp:width=256,layers=4,batch=64")
    for link, beside in (("", False), ("5GB/s,6us", True)):
        step = fp.compile(model, fp.losses.cross_entropy, fp.optim.SGD(0.1), target="numpy", ranks=2, links=link)
        computing = sum(
            step.program.actions[each.action].nanoseconds
            for each in step.plan.steps
            if not isinstance(step.program.calls[each.action].op, Begin | Finish)
        )
        found = Exchanges.of(step.program, step.plan)
        assert found.nanoseconds > 0 and (found.step < computing + found.nanoseconds) == beside
        assert beside or found.step == computing + found.nanoseconds
