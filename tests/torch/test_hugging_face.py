"""docs/from-hugging-face.md: each loop before and after, run as they stand there, has the same losses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
for needed in ("transformers", "accelerate", "peft"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: make setup-torch")

from foreplan.cli.main import cli  # noqa: E402

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from-hugging-face.md").read_text()
MODEL, *PAIRS, READ, MAKE = re.findall(r"```python\n(.*?)```", PAGE, re.S)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*blocks: str) -> dict[str, Any]:
    """What blocks of the page give, on a model of its own."""
    names: dict[str, Any] = {}
    for block in (MODEL, *blocks):
        exec(compile(block, "from-hugging-face.md", "exec"), names)
    return names


def both(before: str, after: str) -> tuple[dict[str, Any], dict[str, Any]]:
    theirs, ours = run(before), run(after)
    assert len(theirs["losses"]) == len(ours["losses"]) == 10
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=2e-4)
    return theirs, ours


def test_the_loss_that_the_model_computes() -> None:
    theirs, ours = both(*PAIRS[:2])
    assert list(ours["graph"].outputs) == ["loss", "logits"] and ours["losses"][-1] < ours["losses"][0]
    for name, weight in theirs["model"].state_dict().items():
        np.testing.assert_allclose(ours["model"].state_dict()[name], weight, rtol=1e-2, atol=2e-4, err_msg=name)


def test_in_the_place_of_trainer() -> None:
    theirs, ours = both(*PAIRS[2:4])
    assert ours["held_out"] == pytest.approx(theirs["held_out"], rel=2e-4)
    assert 0 < ours["found"].metrics["accuracy"] < 1 and ours["losses"][-1] < ours["losses"][0]
    again = ours["AutoModelForCausalLM"].from_pretrained("trained")
    for name, weight in theirs["model"].state_dict().items():
        np.testing.assert_allclose(again.state_dict()[name], weight, rtol=1e-2, atol=2e-4, err_msg=name)


def test_lora_with_the_files_of_peft() -> None:
    theirs, ours = both(*PAIRS[4:6])
    found = {name: array for name, array in ours["session"].state_dict().items() if "lora_" in name}
    of_peft = {name.replace(".default", ""): weight for name, weight in theirs["tuned"].named_parameters()}
    for name, array in found.items():
        wanted = of_peft[f"base_model.model.{name}"].detach()
        np.testing.assert_allclose(array, wanted, rtol=1e-2, atol=5e-4, err_msg=name)
    assert len(found) == 8 and all(np.abs(array).max() > 0.01 for array in found.values())
    read = run(READ)
    rest = ours["words"][40:], ours["following"][40:]
    held_out = ours["session"].evaluate({"input_ids": rest[0], "target": rest[1]}).loss
    with torch.no_grad():
        wanted = theirs["tuned"](input_ids=theirs["texts"][40:], labels=theirs["texts"][40:]).loss.item()
    assert (held_out, read["held_out"]) == pytest.approx((wanted, wanted), rel=2e-4)


def test_a_function_that_makes_the_model_is_a_model_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "nets_of_the_page.py").write_text(MAKE)
    done = CliRunner().invoke(cli, ["graph", "nets_of_the_page:make", "--infer", "--batch", "8"])
    assert done.exit_code == 0 and "input %input_ids: int64[8,16]" in done.output


def test_every_block_is_run() -> None:
    assert len(PAIRS) == 6


def test_what_the_page_says_of_padding_and_of_checkpoints() -> None:
    import foreplan as fp

    names = run()
    model, texts = names["model"], names["texts"][:4, :-1]
    mask, labels = torch.ones_like(texts), names["texts"][:4, 1:].clone()
    mask[1, 9:], labels[1, 8:] = 0, -100
    graph = fp.from_torch(model, kwargs={"input_ids": texts, "attention_mask": mask})
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), checkpoint=["model.layers.*"])
    given = {"input_ids": texts.numpy(), "attention_mask": mask.numpy(), "target": labels.numpy()}
    logits = model(input_ids=texts, attention_mask=mask).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 64), labels.reshape(-1))
    assert step.bind().step(given).loss == pytest.approx(loss.item(), rel=1e-5)
