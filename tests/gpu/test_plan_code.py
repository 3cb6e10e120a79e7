"""Machine code in plan files: with it, binding compiles nothing; what is damaged is refused."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import foreplan as fp
from foreplan.base.errors import PlanError, TargetError, UsageError
from foreplan.runtime.cuda.launch import Launch
from foreplan.runtime.cuda.libraries import driver, nvrtc
from foreplan.runtime.cuda.libraries.driver import Run
from foreplan.runtime.cuda.libraries.nvrtc import Compiler, cubin, figures
from tests.cli.shell import MODEL, foreplan
from tests.gpu.card import FakeCard, OwnTarget
from tests.gpu.compiled import needs_gcc
from tests.gpu.test_nvrtc import needs_compiler
from tests.runtime.micro_batches import compiled, data_for, perceptron, same
from tests.runtime.test_planfile import reseal

pytestmark = [pytest.mark.cuda_wheels, needs_compiler, needs_gcc]


class LoadingCard(FakeCard):
    """It takes machine code as a card does, which is made where none is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def launching(self, launch: Launch, arguments: bytes, code: bytes | None = None) -> Run:
        assert launch.entry in figures(cubin(launch.source, "sm_90") if code is None else code)
        self.given += code is not None
        return super().launching(launch, arguments)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> LoadingCard:
    made = LoadingCard()
    monkeypatch.setattr(driver, "card", lambda: made)
    return made


def no_compiler() -> Compiler:
    raise TargetError("there is no CUDA compiler")


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on there is none."""

    def leave() -> None:
        monkeypatch.setattr(nvrtc, "compiler", no_compiler)
        cubin.cache_clear()

    return leave


@pytest.fixture(scope="module")
def step() -> fp.Compiled:
    return compiled(perceptron(8), fp.optim.Adam(1e-2), target=OwnTarget("h100"))


@pytest.fixture(scope="module")
def text(step: fp.Compiled, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plans") / "step.plan"
    step.save(path, kernels=True)
    return path.read_text()


def test_binding_compiles_nothing(
    step: fp.Compiled, text: str, card: LoadingCard, without_compiler: Callable[[], None], tmp_path: Path
) -> None:
    wanted, data = step.bind(seed=1), data_for(step, 0)
    wanted.step(data)
    assert card.given == 0
    (tmp_path / "with.plan").write_text(text)
    step.save(tmp_path / "without.plan")
    without_compiler()
    session = fp.load_plan(tmp_path / "with.plan", trust_code=True).bind(seed=1)
    assert card.given > 5
    session.step(data)
    assert same(session, wanted)
    with pytest.raises(TargetError, match="no CUDA compiler"):
        fp.load_plan(tmp_path / "without.plan").bind()


def test_code_is_kept_when_a_plan_is_saved_again(text: str, tmp_path: Path) -> None:
    (tmp_path / "first.plan").write_text(text)
    fp.load_plan(tmp_path / "first.plan").save(tmp_path / "second.plan")
    assert (tmp_path / "second.plan").read_text() == text


def test_both_halves_of_a_step_have_their_own(
    card: LoadingCard, without_compiler: Callable[[], None], tmp_path: Path
) -> None:
    target = OwnTarget("h100")
    step = compiled(perceptron(4), fp.optim.AdamW(1e-2), accumulate=3, target=target)
    step.save(tmp_path / "step.plan", kernels=True)
    wanted, data = step.bind(seed=1), data_for(step, 0, (3,))
    wanted.step(data)
    without_compiler()
    session = fp.load_plan(tmp_path / "step.plan", trust_code=True).bind(seed=1)
    session.step(data)
    assert same(session, wanted)


@pytest.mark.parametrize("count", [1, 2])
def test_without_trust_machine_code_is_made_anew(
    card: LoadingCard, without_compiler: Callable[[], None], tmp_path: Path, count: int
) -> None:
    step = compiled(perceptron(4), fp.optim.AdamW(1e-2), accumulate=count, target=OwnTarget("h100"))
    step.save(tmp_path / "step.plan", kernels=True)
    wanted, data = step.bind(seed=1), data_for(step, 0, (count,) if count > 1 else ())
    wanted.step(data)
    read = fp.load_plan(tmp_path / "step.plan")
    session = read.bind(seed=1)
    session.step(data)
    assert card.given == 0 and same(session, wanted)
    without_compiler()
    with pytest.raises(TargetError, match="no CUDA compiler"):
        read.bind()


def changed(text: str, change: Callable[[list[list[str]]], None]) -> str:
    """A plan whose records of code are changed, sealed again."""
    lines = text.split("\n")
    first = lines.index('"code": [') + 1
    last = lines.index("],", first)
    records = [json.loads(line.removesuffix(",")) for line in lines[first:last]]
    change(records)
    made = ",\n".join(json.dumps(record, separators=(",", ":")) for record in records)
    return reseal("\n".join([*lines[:first], made, *lines[last:]]))


def _cut(records: list[list[str]]) -> None:
    records[0][1] = records[0][1][:-3]


def _short(records: list[list[str]]) -> None:
    records[0][1] = base64.b64encode(base64.b64decode(records[0][1])[:200]).decode()


def _text(records: list[list[str]]) -> None:
    records[0][1] = base64.b64encode(b"machine code").decode()


def _none(records: list[list[str]]) -> None:
    records[0][1] = ""


@pytest.mark.parametrize("change", [_cut, _short, _text, _none])
def test_what_is_no_machine_code_is_refused(change: Callable[..., None], text: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.plan"
    path.write_text(changed(text, change))
    with pytest.raises(PlanError, match=r"damaged\.plan' is damaged.*plan the model again"):
        fp.load_plan(path)


def test_a_file_that_was_damaged_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.plan"
    at = text.index('"code": [') + 200
    path.write_text(text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :])
    with pytest.raises(PlanError, match="edited or damaged"):
        fp.load_plan(path)


def test_code_of_another_kernel_is_refused(text: str, card: LoadingCard, tmp_path: Path) -> None:
    def turn(records: list[list[str]]) -> None:
        codes = [code for _, code in records]
        for record, code in zip(records, [*codes[1:], codes[0]]):
            record[1] = code

    path = tmp_path / "turned.plan"
    path.write_text(changed(text, turn))
    with pytest.raises(PlanError, match="machine code in the plan has no kernel"):
        fp.load_plan(path, trust_code=True).bind()
    fp.load_plan(path).bind()  # which makes its own


def test_bytes_that_change_bring_about_no_other_error(text: str, tmp_path: Path) -> None:
    rng, path, refused = random.Random(0), tmp_path / "damaged.plan", 0

    def damage(records: list[list[str]]) -> None:
        record = rng.choice(records)
        code = bytearray(base64.b64decode(record[1]))
        for _ in range(20):
            code[rng.choice([rng.randrange(64), rng.randrange(len(code))])] = rng.randrange(256)
        record[1] = base64.b64encode(code).decode()

    for _ in range(100):
        path.write_text(changed(text, damage))
        try:
            fp.load_plan(path)
        except PlanError:
            refused += 1
    assert refused > 50


def test_only_plans_for_cards_have_kernels(tmp_path: Path) -> None:
    path = tmp_path / "step.plan"
    with pytest.raises(UsageError, match="can hold kernels, and this one is for numpy"):
        compiled(perceptron(4)).save(path, kernels=True)
    assert not path.exists()


def test_kernels_need_a_compiler(step: fp.Compiled, without_compiler: Callable[[], None], tmp_path: Path) -> None:
    without_compiler()
    with pytest.raises(TargetError, match="no CUDA compiler"):
        step.save(tmp_path / "step.plan", kernels=True)
    assert not (tmp_path / "step.plan").exists()


def test_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "step.plan"
    foreplan("plan", MODEL, "--target", "cuda:h100", "--kernels", "-o", path)
    assert '"code": [' in path.read_text()
    foreplan("verify", path)
    foreplan("verify", path, "--trust-code")
    assert "'-o'" in foreplan("plan", MODEL, "--kernels", code=2).stderr
    assert "can hold kernels" in foreplan("plan", MODEL, "--kernels", "-o", path, code=2).stderr
