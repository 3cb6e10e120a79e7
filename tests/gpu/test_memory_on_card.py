"""Memory of a card, of which no other process may take any meanwhile. `make gpu-check` runs it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import foreplan as fp
from foreplan.base.units import align_up
from tests.cpu.test_engine import MODELS, compiled, data_for
from tests.gpu.on_card import opened_or_skipped
from tests.profile import cases

CARD = opened_or_skipped()
pytestmark = pytest.mark.cuda
PAGE = 2 << 20


@pytest.mark.parametrize("name", cases(MODELS))
def test_steps_allocate_nothing(name: str) -> None:
    """Free memory of the card is the same before and after 100 steps, once the first two are done."""
    session = compiled(name, "cuda", training=True).bind()
    data = data_for(session)  # type: ignore[arg-type]
    for _ in range(2):
        session.step(data)
    before = CARD.memory()
    for _ in range(100):
        session.step(data)
    assert CARD.memory() == before


def test_the_arena_is_one_allocation_of_its_own_size() -> None:
    step = compiled("mlp:width=2048,batch=8", "cuda", training=True)
    step.bind().step(data_for(step))  # loads kernels
    gc.collect()
    before, _ = CARD.memory()
    session = step.bind()
    assert before - CARD.memory()[0] == align_up(step.arena_bytes, PAGE)
    del session
    gc.collect()
    assert CARD.memory()[0] == before


def test_an_arena_larger_than_the_card_is_refused() -> None:
    _, total = CARD.memory()
    width = int((total / 16) ** 0.5) + 1  # two square matrices of float32, with velocities, are more than there is
    step = compiled(f"mlp:width={width},batch=1,layers=3", "cuda", training=True)
    assert step.arena_bytes > total
    with pytest.raises(fp.DoesNotFitError, match=r"the arena takes .* are free"):
        step.bind()


def test_the_whole_card_is_as_estimated_once_it_is_calibrated(tmp_path: Path) -> None:
    """Within a page, of a step that was not what was measured; each in a process of its own."""
    settings = os.environ | {"XDG_CONFIG_HOME": str(tmp_path)}
    calibrate = [sys.executable, "-m", "foreplan", "devices", "--calibrate", "--json"]
    _, found = json.loads(said_by(calibrate, settings))
    assert found["card"] == CARD.title and found["figures"]["context_bytes"] > PAGE
    code = (
        "import json\n"
        "from foreplan.runtime.cuda.libraries import driver\n"
        "from foreplan.runtime.cuda.libraries.nvml import Nvml\n"
        "from tests.cpu.test_engine import compiled, data_for\n"
        "nvml = Nvml()\n"
        "before = nvml.used()\n"
        "step = compiled('resnet50:batch=8,size=64', 'cuda', training=True)\n"
        "session = step.bind()\n"
        "for _ in range(3): session.step(data_for(session))\n"
        "card = driver.card()\n"
        "card.synchronize()\n"
        "place = nvml.place_of(card.bus)\n"
        "parts = step.memory.outside\n"
        "told = [(part.name, part.nbytes, part.basis) for part in parts]\n"
        "print(json.dumps([nvml.used()[place] - before[place], step.memory.peak, told]))\n"
    )
    taken, estimated, parts = json.loads(said_by([sys.executable, "-c", code], settings))
    assert {basis for _, _, basis in parts} == {"exact", "calibrated"}
    assert abs(taken - estimated) <= PAGE, f"{taken} bytes were taken, and {estimated} estimated: {parts}, {found}"


def said_by(command: list[str], settings: dict[str, str]) -> str:
    """What a process prints, which must not fail."""
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout
