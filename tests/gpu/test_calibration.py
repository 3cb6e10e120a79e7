"""Calibrations: measured on a card that is not there, whose memory is counted as a driver might; kept in a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

import foreplan as fp
from foreplan.base import calibration
from foreplan.base.calibration import Calibration, own_file, read_entries, record
from foreplan.base.errors import TargetError, UsageError
from foreplan.base.units import align_up
from foreplan.calibration import cards as calibrating
from foreplan.calibration.cards import calibrate
from foreplan.lower.outside import Use
from foreplan.runtime.cuda.calibration import CARDS, calibrations
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.launch import Launch, Multiply
from foreplan.runtime.cuda.libraries import capture
from foreplan.runtime.cuda.libraries.driver import Run
from foreplan.runtime.cuda.outside import PAGE, outside
from foreplan.runtime.cuda.target import CudaTarget
from tests.gpu.card import FakeBlock, FakeCard
from tests.gpu.check import with_cudnn
from tests.gpu.compiled import needs_gcc

CARD = device_named("b200")  # of which no calibration comes with foreplan
SHIPPED = read_entries(
    (Path(calibration.__file__).parents[1] / "runtime" / "cuda" / CARDS.file).read_text(), CARDS.file, CARDS
)
VERSIONS = {"driver": "580.105.08", "cuda": "13.0", "cupy": "14.2.0"}
FOUND = Calibration(
    CARDS,
    CARD.title,
    VERSIONS,
    {"context_bytes": 500 << 20, "code_bytes": 7, "graph_bytes_per_launch": 11, "cudnn_bytes": 3},
)


class CountedCard(FakeCard):
    """Memory is taken as on a card: a context, pages of code and of graphs, a library at its first call, and the arena.

    Attributes:
        taken: bytes that are not given back.
    """

    title, capability = CARD.title, CARD.capability
    CONTEXT, CODE, CUDNN, CUBLASLT, NODE = 533 << 20, 2 << 20, 70 << 20, 36 << 20, 9_000

    def __init__(self) -> None:
        super().__init__()
        self.taken = self.CONTEXT
        self.kinds: set[str] = set()

    @property
    def used(self) -> int:
        return self.taken + self.live

    def allocate(self, nbytes: int) -> FakeBlock:
        return super().allocate(align_up(nbytes, PAGE))

    def once(self, kind: str, nbytes: int) -> None:
        if kind not in self.kinds:
            self.kinds.add(kind)
            self.taken += nbytes

    def launching(self, launch: Launch, arguments: bytes, code: bytes | None = None) -> Run:
        self.once("code", self.CODE)
        return super().launching(launch, arguments, code)

    def multiplying(self, product: Multiply, places: tuple[int, ...], workspace: int) -> Run:
        self.once("cublaslt", self.CUBLASLT)
        return super().multiplying(product, places, workspace)

    def executing(self, blob: bytes, tensors: Mapping[int, int], workspace: int, nbytes: int) -> Run:
        self.once("cudnn", self.CUDNN)
        return lambda: None

    def captured(self, calls: Iterable[Run]) -> Run:
        calls = list(calls)
        self.taken += align_up(self.NODE * len(calls), PAGE)
        return super().captured(calls)


class Machine:
    """Two cards, of which the second is ours: what the driver says of them."""

    IDLE = [17 << 20, 3 << 20]

    def __init__(self) -> None:
        self.card: CountedCard | None = None
        self.others = 0

    def open(self) -> CountedCard:
        self.card = CountedCard()
        return self.card

    def used(self) -> Sequence[int]:
        return [self.IDLE[0], self.IDLE[1] + self.others + (self.card.used if self.card else 0)]

    def place_of(self, bus: str) -> int:
        assert bus == FakeCard.bus
        return 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(calibrating, "MODEL", "mlp:batch=4,width=40,layers=2")
    monkeypatch.setattr(calibrating, "NODES", 1000)
    monkeypatch.setattr(calibrating, "STEPS", 3)
    monkeypatch.setattr(capture, "captured", lambda: CARD)
    return Machine()


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's, empty at first."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    return tmp_path / "settings"


@pytest.mark.thorough
@needs_gcc
def test_every_figure_is_what_the_card_took(machine: Machine) -> None:
    found = calibrate(machine, machine.open, VERSIONS)
    assert found.name == CARD.title and found.versions == VERSIONS
    per_launch = found.figures["graph_bytes_per_launch"]
    assert dict(found.figures) == {
        "context_bytes": CountedCard.CONTEXT,
        "code_bytes": CountedCard.CODE,
        "cublaslt_bytes": CountedCard.CUBLASLT,
        "graph_bytes_per_launch": per_launch,
    }
    assert 0 <= per_launch - CountedCard.NODE <= PAGE // 1000 + 1


@pytest.mark.thorough
@with_cudnn
@needs_gcc
def test_cudnn_is_measured_where_it_is_installed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "MODEL", "conv_chain:size=8")
    found = calibrate(machine, machine.open, VERSIONS).figures
    assert found["cudnn_bytes"] == CountedCard.CUDNN and found["code_bytes"] == CountedCard.CODE


@pytest.mark.thorough
@needs_gcc
def test_a_library_that_is_not_installed_is_left_out(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> Run:
        raise TargetError("cuBLASLt is not installed")

    monkeypatch.setattr(CountedCard, "multiplying", missing)
    assert set(calibrate(machine, machine.open, {}).figures) == {*CARDS.always}


@pytest.mark.thorough
@needs_gcc
def test_a_card_that_others_use_cannot_be_calibrated(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = calibrating._run

    def busy(step: object, times: int) -> None:
        run(step, times)  # type: ignore[arg-type]
        machine.others += PAGE * (times == 3)

    monkeypatch.setattr(calibrating, "_run", busy)
    with pytest.raises(TargetError, match=rf"anything else uses it.* changed by {PAGE} bytes in 3 steps"):
        calibrate(machine, machine.open, {})


@pytest.mark.thorough
@needs_gcc
def test_a_card_that_this_process_has_opened_cannot_be_calibrated(machine: Machine) -> None:
    card = machine.open()
    with pytest.raises(TargetError, match=r"this process included.*context_bytes = 0"):
        calibrate(machine, lambda: card, {})


def test_what_is_recorded_is_read_back(settings: Path) -> None:
    assert calibrations().calibrated == SHIPPED
    other = Calibration(CARDS, 'A "card" \\ of one’s own', {}, dict.fromkeys(CARDS.always, 1))
    newer = Calibration(CARDS, FOUND.name, VERSIONS | {"driver": "590.1"}, FOUND.figures)
    for each in (FOUND, other, newer, FOUND):  # the last takes the place of the first
        assert record(each) == own_file(CARDS) == settings / "foreplan" / "calibration.toml"
    assert calibrations().calibrated == (*SHIPPED, other, newer, FOUND)
    assert read_entries(FOUND.as_toml(), "here", CARDS) == (FOUND,)


def test_estimates_go_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    step = fp.compile(fp.models.build("mlp:batch=4,width=40,layers=2"), target=CudaTarget("b200"))

    def told() -> dict[str, tuple[int, str]]:
        return {part.name: (part.nbytes, part.basis) for part in outside(step.program, step.plan, Use())[1:]}

    before = told()
    assert {basis for _, basis in before.values()} == {"assumed"}
    record(FOUND)
    after = told()
    assert after["context"] == (500 << 20, "calibrated") and after["code of kernels"] == (7, "calibrated")
    assert after["cublaslt"] == before["cublaslt"]  # which was not measured
    assert after["captured graph"] == (PAGE, "calibrated")
    # The card is in this machine, and its driver another one by now.
    for versions, basis in ((VERSIONS, "calibrated"), (VERSIONS | {"driver": "590.1"}, "assumed")):
        monkeypatch.setattr("foreplan.runtime.cuda.outside.versions_beside", lambda title, versions=versions: versions)
        assert told()["context"] == (500 << 20, basis)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[calibrated", "no table"),
        ("calibrated = 3", "needs entries"),
        (FOUND.as_toml().replace("code_bytes = 7", ""), "1 needs code_bytes as a whole number, and has None"),
        (FOUND.as_toml().replace("code_bytes = 7", "code_bytes = -7"), "1 needs code_bytes"),
        (FOUND.as_toml().replace("cudnn_bytes", "cudnn_byte"), "unknown key 'cudnn_byte'"),
        (FOUND.as_toml().replace("code_bytes = 7", f"code_bytes = {2**62}"), "1 needs code_bytes"),
        (FOUND.as_toml().replace("code_bytes = 7", f"code_bytes = {'7' * 400}"), "no table"),
        (FOUND.as_toml().replace("code_bytes = 7", f"code_bytes = {'7' * 5000}"), "no table"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_broken_file_is_told_and_left_as_it_is(text: str | bytes, told: str) -> None:
    content, path = text if isinstance(text, bytes) else text.encode(), own_file(CARDS)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for use in (calibrations, lambda: record(FOUND), lambda: _estimate()):
        with pytest.raises(TargetError, match=rf"calibration\.toml.*{told}"):
            use()
    assert path.read_bytes() == content


def _estimate() -> None:
    fp.compile(fp.models.build("mlp:batch=4,width=40,layers=2"), target="cuda:b200").estimate()


@pytest.mark.parametrize("home", ["~", "", "here"])
def test_a_user_without_a_home_has_no_calibrations(home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor does the current folder stand in for it, nor settings that are named from there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "here")
    monkeypatch.setenv("HOME", home)
    assert own_file(CARDS) is None and calibrations().calibrated == SHIPPED
    _estimate()
    with pytest.raises(UsageError, match="let XDG_CONFIG_HOME name a folder"):
        record(FOUND)
    assert not list(tmp_path.iterdir())


def test_a_home_of_another_user_has_no_calibrations(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, **how: str) -> str:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", denied)
        assert calibration.own_calibrations(CARDS) == ()


def test_settings_that_cannot_be_written(settings: Path) -> None:
    settings.write_text("a file, and no folder")
    with pytest.raises(UsageError, match="XDG_CONFIG_HOME names another folder"):
        record(FOUND)
