"""Ranks that are processes of an MPI job, as users start them.

A process takes a second of processor time to begin, so two ranks that stay run the commands of most tests, and threads
try all else.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

import foreplan as fp
from foreplan.cli import cli
from tests.profile import few
from tests.ranks import stage_of_job
from tests.ranks.samples import assert_checkpoints_close, learnable
from tests.ranks.serving import Job, ranks_of

MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'foreplan[mpi]'")
if MPIEXEC is None:
    pytest.skip("no MPI launcher is installed: pip install 'foreplan[mpi]'", allow_module_level=True)

MODEL = "mlp:width=32,layers=1,batch={batch}"


def command(ranks: int, *words: str) -> list[str]:
    """A command of foreplan on so many ranks."""
    start = [] if ranks == 1 else [str(MPIEXEC), "-n", str(ranks)]
    return [*start, sys.executable, "-m", "foreplan", *words]


def started(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end, in this process if there is one rank."""
    if ranks == 1:
        done = CliRunner().invoke(cli, words)
        return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)
    return subprocess.run(command(ranks, *words), capture_output=True, text=True, timeout=120)


def run(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """As `started`; by two ranks that stay, if there are two, of a command that none of them may fail to end."""
    return _staying[0].run(words) if ranks == 2 else started(ranks, *words)


_staying: list[Job] = []


@pytest.fixture(scope="module", autouse=True)
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start them."""
    _staying.append(Job([str(MPIEXEC), "-n", "2"], 2, tmp_path_factory.mktemp("job")))
    try:
        yield
    finally:
        _staying.pop().end()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Samples that can be learned."""
    return learnable(tmp_path_factory.mktemp("data"))


def train(ranks: int, data: str, out: Path, *words: str, target: str = "numpy", tensor: int = 1) -> dict[str, Any]:
    """Train with 12 samples a step, whatever the ranks; what `--json` prints, by one rank alone."""
    model = MODEL.format(batch=12 * tensor // ranks)
    done = run(ranks, "train", model, "--data", data, "-o", str(out), "--target", target, "--json", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


ADAM = ("--optimizer", "adamw", "--lr", "0.01", "--steps", "5")
TRAINED = [
    (2, "parameters", "numpy"),
    (2, "none", "numpy"),
    (4, "none", "cpu:threads=1"),
    (2, "state", "cpu:threads=1"),
]
TRAINED += [(3, "gradients", "numpy"), (4, "parameters", "numpy"), (4, "parameters", "cpu:threads=1")]
TRAINED += [
    (2, "none", "cpu:threads=1"),
    (4, "none", "numpy"),
    (2, "state", "numpy"),
    (3, "gradients", "cpu:threads=1"),
]


@pytest.mark.parametrize(("ranks", "shard", "target"), few(TRAINED))
def test_ranks_train_as_one_process(tmp_path: Path, data: str, ranks: int, shard: str, target: str) -> None:
    alone = train(1, data, tmp_path / "one", *ADAM, target=target)
    found = train(ranks, data, tmp_path / "many", *ADAM, "--shard", shard, target=target)
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=2e-5)
    assert_checkpoints_close(tmp_path / "many", tmp_path / "one")


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "shard", "target"), TRAINED)
def test_runs_give_the_same_bits(tmp_path: Path, data: str, ranks: int, shard: str, target: str) -> None:
    one, other = (
        train(ranks, data, tmp_path / name, *ADAM, "--shard", shard, target=target) for name in ("one", "other")
    )
    assert one["losses"] == other["losses"]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


@pytest.mark.parametrize(("ranks", "more"), few([(2, ()), (4, ("--shard", "parameters"))]))
def test_groups_train_as_one_process(tmp_path: Path, data: str, ranks: int, more: tuple[str, ...]) -> None:
    """Two ranks with parts of the products take the same samples, and measure the same validation."""
    words = ("--steps", "5", "--validation", data, "--metrics", "accuracy")
    alone = train(1, data, tmp_path / "one", *words)
    found = train(ranks, data, tmp_path / "many", *words, "--tensor", "2", *more, tensor=2)
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=2e-5)
    assert found["validations"][0] == pytest.approx(alone["validations"][0], rel=1e-4)
    assert_checkpoints_close(tmp_path / "many", tmp_path / "one")


STAGES = {"2": (2, ()), "3": (3, ()), "2 of 2, in parts": (4, ("--shard", "parameters"))}
STAGES["2 of 4, products in parts"] = (8, ("--shard", "state", "--tensor", "2"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", STAGES)
def test_stages_train_from_the_command_line(tmp_path: Path, data: str, name: str) -> None:
    """As one process with as many micro-batches, to one file, from which others go on."""
    stages, (ranks_of_all, more_of_all) = name[0], STAGES[name]
    accumulate = ("--accumulate", "4")
    replicas = ranks_of_all // int(stages) // (2 if "--tensor" in more_of_all else 1)
    losses = {}
    for name, ranks, more in [("one", 1, ()), ("many", ranks_of_all, ("--stages", stages, *more_of_all))]:
        model = f"mlp:width=32,layers=3,batch={replicas * 2 if name == 'one' else 2}"
        for steps, resume in [("2", ()), ("4", ("--resume", str(tmp_path / name)))]:
            words = ("--data", data, "-o", str(tmp_path / name), "--target", "numpy", "--json", "--steps", steps)
            done = run(ranks, "train", model, *words, *accumulate, *more, *resume)
            assert done.returncode == 0, done.stderr
            losses[name, steps] = json.loads(done.stdout)["losses"]
    for steps in ("2", "4"):
        np.testing.assert_allclose(losses["many", steps], losses["one", steps], rtol=2e-5)
    assert_checkpoints_close(tmp_path / "many", tmp_path / "one")


@pytest.mark.thorough
def test_other_ranks_resume(tmp_path: Path, data: str) -> None:
    path = tmp_path / "w.safetensors"
    whole = train(1, data, tmp_path / "whole", "--steps", "6")
    train(2, data, path, "--steps", "3", "--shard", "state")
    rest = train(4, data, path, "--steps", "6", "--shard", "parameters", "--resume", str(path))
    np.testing.assert_allclose(rest["losses"], whole["losses"][3:], rtol=2e-5)


def first_samples(tmp_path: Path, data: str) -> str:
    """A file with 23 of the samples: the last step of a validation is short."""
    path, arrays = str(tmp_path / "held_out.npz"), np.load(data)
    np.savez(path, **{name: arrays[name][:23] for name in arrays.files})
    return path


@pytest.mark.parametrize("optimizer", few(["adamw:ema=0.5", "momentum"]))
@pytest.mark.parametrize(("ranks", "shard"), few([(2, "state"), (2, "none"), (3, "gradients"), (4, "parameters")]))
def test_validation_beside_parts(tmp_path: Path, data: str, ranks: int, shard: str, optimizer: str) -> None:
    """Ranks share the steps of the validation, which do not divide by them; the last one is short."""
    held_out = first_samples(tmp_path, data)
    words = ("--steps", "4", "--validation", held_out, "--metrics", "accuracy", "--optimizer", optimizer)
    alone = train(1, data, tmp_path / "w", *words)
    many = train(ranks, data, tmp_path / "w", *words, "--shard", shard)
    for found, wanted in zip(many["validations"], alone["validations"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


IN_STAGES = [(2, ("--stages", "2")), (3, ("--stages", "3")), (4, ("--stages", "2", "--shard", "parameters"))]


@pytest.mark.parametrize(("ranks", "more"), few(IN_STAGES))
def test_validation_and_averages_in_stages(tmp_path: Path, data: str, ranks: int, more: tuple[str, ...]) -> None:
    """The last stage measures, and tells all; the last step of the validation is short."""
    held_out = first_samples(tmp_path, data)
    words = ("--data", data, "--target", "numpy", "--json", "--steps", "3", "--accumulate", "3", "--optimizer")
    words = (*words, "momentum:ema=0.5", "--validation", held_out, "--metrics", "accuracy")
    found = {}
    for name, count, own in [("one", 1, ()), ("many", ranks, more)]:
        batch = 2 * ranks // int(more[1]) if name == "one" else 2
        averages = ("-o", str(tmp_path / name), "--save-averages", str(tmp_path / f"{name} averages"))
        done = run(count, "train", f"mlp:width=32,layers=3,batch={batch}", *words, *averages, *own)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout)["validations"]
    assert len(found["one"]) and found["one"][0]["accuracy"] > 0
    for one, many in zip(found["one"], found["many"], strict=True):
        assert many == pytest.approx(one, rel=1e-4)
    assert_checkpoints_close(tmp_path / "many averages", tmp_path / "one averages")


def test_validation_takes_the_statistics_of_the_checkpoint(tmp_path: Path) -> None:
    """Batch normalisation follows each rank's own samples, and a checkpoint has what the first rank came to."""
    rng = np.random.default_rng(0)

    def net(x: Any) -> Any:
        return fp.nn.linear(fp.nn.relu(fp.nn.batch_norm(fp.nn.linear(x, 8, name="in"), name="norm")), 3, name="out")

    fp.compile(fp.trace(net, fp.spec((4, 5)))).bind(seed=1).to_onnx(tmp_path / "m.onnx", "graph")
    x, target = rng.standard_normal((20, 5), np.float32), rng.integers(0, 3, 20)
    np.savez(tmp_path / "d.npz", x=x, target=target)
    words = ("--data", str(tmp_path / "d.npz"), "--validation", str(tmp_path / "d.npz"), "--steps", "2", "--json")
    out = tmp_path / "w.safetensors"
    done = run(2, "train", str(tmp_path / "m.onnx"), *words, "--target", "numpy", "-o", str(out))
    assert done.returncode == 0, done.stderr
    whole = fp.evaluation(fp.trace(net, fp.spec((20, 5))), fp.losses.cross_entropy)
    session = fp.compile(whole, target="numpy").bind(weights=out)
    wanted = float(session.step({"x": x, "target": target}).outputs["loss"])
    assert json.loads(done.stdout)["validations"][-1]["loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("target", few(["numpy", "cpu:threads=1"]))
@pytest.mark.parametrize(
    ("ranks", "options"), few([(2, "shard='parameters'"), (4, "shard='parameters', tensor=2"), (4, "tensor=4")])
)
def test_inference(tmp_path: Path, ranks: int, options: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script of one's own runs it: the outputs of one process."""
    script = tmp_path / "job.py"
    script.write_text(
        "import json, sys\n"
        "import numpy as np\n"
        "import foreplan as fp\n"
        "from foreplan.runtime.ranks import current\n"
        "text = 'gpt2_small:layers=2,width=32,heads=4,seq=8,vocabulary=60,batch=2'\n"
        f"options = dict({options}) if current().size > 1 else {{}}\n"
        f"step = fp.compile(fp.models.build(text), target={target!r}, ranks=current().size, **options)\n"
        "tokens = np.arange(16).reshape(2, 8) * 7 % 60\n"
        "outputs = step.bind(seed=1).step({step.program.inputs[0].name: tokens}).outputs\n"
        "with open(f'{sys.argv[1]}.{current().rank}', 'w') as file:\n"
        "    json.dump([array.tolist() for array in outputs.values()], file)\n"
    )

    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "one")])
    runpy.run_path(str(script))
    words = [str(MPIEXEC), "-n", str(ranks), sys.executable, str(script), str(tmp_path / "many")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    alone = json.loads((tmp_path / "one.0").read_text())
    for rank in range(ranks):
        outputs = json.loads((tmp_path / f"many.{rank}").read_text())
        np.testing.assert_allclose(outputs, alone, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("ranks", few([2, 4]))
def test_a_plan_of_ranks_is_run(tmp_path: Path, data: str, ranks: int) -> None:
    """By all of them, with the weights of a checkpoint; the first one writes."""
    model, weights = MODEL.format(batch=12), tmp_path / "w.safetensors"
    train(1, data, weights, "--steps", "2")
    samples = tmp_path / "x.npz"
    np.savez(samples, x=np.load(data)["x"][:20])
    words = ("--data", str(samples), "--weights", str(weights))
    assert run(1, "run", model, *words, "--target", "numpy", "-o", str(tmp_path / "one.npz")).returncode == 0
    options = ("--infer", "--ranks", str(ranks), "--tensor", "2", "--shard", "parameters", "--target", "numpy")
    assert run(1, "plan", model, *options, "-o", str(tmp_path / "m.plan")).returncode == 0
    done = run(ranks, "run", str(tmp_path / "m.plan"), *words, "-o", str(tmp_path / "many.npz"), "--json")
    assert done.returncode == 0 and len(json.loads(done.stdout)) == 1, done.stderr
    many, one = np.load(tmp_path / "many.npz"), np.load(tmp_path / "one.npz")
    for name in one.files:
        np.testing.assert_allclose(many[name], one[name], rtol=2e-4, atol=2e-5)
    alone = run(1, "run", str(tmp_path / "m.plan"), *words)
    assert alone.returncode != 0 and f"planned for {ranks} ranks, and this job has 1" in alone.stderr


def test_a_killed_rank_ends_the_job(tmp_path: Path, data: str) -> None:
    """The others do not wait for it for ever, somebody says so, and the last checkpoint is whole."""
    path, log = tmp_path / "w.safetensors", tmp_path / "log.csv"
    words = ("train", MODEL.format(batch=6), "--data", data, "--steps", "1000000", "-o", str(path), "--save-every", "5")
    job = subprocess.Popen(
        command(2, *words, "--target", "numpy", "--log", str(log)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        deadline = time.monotonic() + 60
        while not (path.exists() and log.read_text().count("\n") > 20):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(ranks_of(job.pid)[-1], signal.SIGKILL)
        told, _ = job.communicate(timeout=60)
        assert job.returncode != 0 and (b"KILLED" in told or b"signal" in told), told
    finally:
        job.kill()
    assert load_file(path)["step"] % 5 == 0
    resumed = train(1, data, path, "--resume", str(path), "--steps", str(int(load_file(path)["step"]) + 1))
    assert resumed["steps"] == 1


@pytest.mark.parametrize(
    ("ranks", "words", "said"),
    few(
        [
            (
                2,
                ["train", "mlp:batch=30", "--data", "{data}"],
                "48 samples, and a step takes 60 (30 on each of 2 ranks)",
            ),
            (1, ["train", "mlp:batch=2", "--data", "{data}", "--ranks", "2"], "mpirun -n 2 foreplan train"),
            (2, ["train", "mlp:batch=2", "--data", "{data}", "--ranks", "3"], "2 processes run this command"),
            (2, ["train", "mlp:batch=2", "--data", "nowhere.npz"], "cannot read 'nowhere.npz'"),
            (1, ["train", "mlp:batch=2", "--data", "{data}", "--stages", "2"], "mpirun -n 2 foreplan train"),
            (
                2,
                ["train", "mlp:batch=99", "--data", "{data}", "--stages", "2"],
                "48 samples, and a step takes 99: give",
            ),
            (
                2,
                ["train", "mlp:batch=2", "--data", "{data}", "--stages", "2", "--save-averages", "averages"],
                "needs an optimizer that keeps averages",
            ),
            (
                2,
                ["train", "mlp:batch=2", "--data", "{data}", "--optimizer", "muon", "--shard", "state"],
                "whole tensors",
            ),
        ],
        (0, 1, 4),
    ),
)
def test_what_is_wrong_is_said_once(data: str, ranks: int, words: list[str], said: str) -> None:
    done = started(ranks, *(word.format(data=data) for word in words))
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr


def test_usage_is_told_once() -> None:
    """By the first rank; with --json there is one object."""
    done = started(2, "train", "mlp:batch=2", "--data", "x.npz", "--nosuch", "--json")
    assert done.returncode == 2
    assert done.stderr.count("Usage: ") == 1 and done.stderr.count("rror: No such option '--nosuch'") == 1
    assert json.loads(done.stdout)["exit_code"] == 2


def test_a_file_of_options_that_is_wrong_is_told_once() -> None:
    done = started(2, "train", "mlp:batch=2", "--data", "x.npz", "--config", "/no/such.toml", "--json")
    assert done.returncode == 2 and done.stderr.count("error: ") == 1
    assert json.loads(done.stdout)["message"] == "cannot read '/no/such.toml': No such file or directory"


@pytest.mark.thorough
def test_usage_that_is_wrong_on_another_rank(data: str) -> None:
    """It is told, and ends the job."""
    commands = [
        command(1, "train", "mlp:batch=2", "--data", data, *more) for more in (["--steps", "100000"], ["--nosuch"])
    ]
    words = [str(MPIEXEC), "-n", "1", *commands[0], ":", "-n", "1", *commands[1]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "rank 1: error: No such option '--nosuch'" in done.stderr


@pytest.mark.parametrize(("first", "codes"), few([("elsewhere.npz", {2}), ("{data}", {2})]))
def test_ranks_that_fail_otherwise_say_so(data: str, first: str, codes: set[int]) -> None:
    """Both, each with its own error; or one alone, which is told once. They end by themselves."""
    commands = [command(1, "train", "mlp:batch=2", "--data", name) for name in (first.format(data=data), "nowhere.npz")]
    words = [str(MPIEXEC), "-n", "1", *commands[0], ":", "-n", "1", *commands[1]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    of = "rank 1: error:" if first == "elsewhere.npz" else "error: rank 1 failed:"
    assert f"{of} cannot read 'nowhere.npz'" in done.stderr
    assert ("\nerror: cannot read 'elsewhere.npz'" in "\n" + done.stderr) == (first == "elsewhere.npz")
    assert done.returncode in codes


@pytest.mark.parametrize("who", few(["rank == 1", "True"]))
def test_an_error_of_a_script_ends_the_job(tmp_path: Path, who: str) -> None:
    """On one rank, whose step the others would wait for, or on all."""
    script = tmp_path / "job.py"
    script.write_text(
        "import numpy as np\n"
        "import foreplan as fp\n"
        "from foreplan.runtime.ranks import current\n"
        "rank = current().rank\n"
        "model, loss = fp.models.build('mlp:width=8,layers=1,batch=2'), fp.losses.cross_entropy\n"
        "session = fp.compile(model, loss, fp.optim.SGD(0.1), target='numpy', ranks=2).bind()\n"
        f"batch = {{'x': np.zeros((2, 784)), 'target': np.zeros(2, int) + 99 * ({who})}}\n"
        "session.step(batch)\n"
    )
    words = [str(MPIEXEC), "-n", "2", sys.executable, str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and done.stderr.count("InputError: 'target' holds 99") == (1 if "rank" in who else 2)


def test_a_launcher_without_ranks(data: str) -> None:
    """Its variables, and nothing else: there is no PyTorch, or it is not told where processes meet."""
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    words = command(1, "train", "mlp:batch=2", "--data", data)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "torchrun started 2 processes, and PyTorch" in done.stderr
    assert "cannot be loaded" in done.stderr or "cannot connect them" in done.stderr


def test_a_launcher_of_another_library(data: str) -> None:
    """Its variables, and no job of the library that mpi4py uses."""
    environment = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    words = command(1, "train", "mlp:batch=2", "--data", data)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Open MPI's mpirun started 2 processes" in done.stderr and "sees 1" in done.stderr


def test_ranks_with_other_steps_are_refused(tmp_path: Path) -> None:
    """By digest, before anything runs."""
    script = tmp_path / "job.py"
    script.write_text(
        "import sys\n"
        "import foreplan as fp\n"
        "from foreplan.runtime.ranks import current\n"
        "rank = current().rank\n"
        "width = 8 + 8 * (rank == 1)\n"
        "model = fp.models.build(f'mlp:width={width},layers=1,batch=2')\n"
        "step = fp.compile(model, fp.losses.cross_entropy, fp.optim.SGD(0.1), target='numpy', ranks=2)\n"
        "try:\n"
        "    step.bind()\n"
        "except fp.SessionError as error:\n"
        "    print(rank, error)\n"
    )
    done = subprocess.run(
        [str(MPIEXEC), "-n", "2", sys.executable, str(script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the step is ") == 2 and done.stdout.count(" on rank 0, and ") == 2, done.stdout


@pytest.mark.parametrize("stages", few([2, 3]))
def test_stages_train_as_one_process(stages: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages of MPI, on each link in both directions at the same time."""

    stage_of_job.main()
    ((losses, weights),) = json.loads(capsys.readouterr().out)
    words = [str(MPIEXEC), "-n", str(stages), sys.executable, "-m", "tests.ranks.stage_of_job"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    many = json.loads(done.stdout)
    assert {name for _, each in many for name in each} == weights.keys()
    for own_losses, own in many:
        np.testing.assert_allclose(own_losses, losses, rtol=2e-5)
        for name, value in own.items():
            np.testing.assert_allclose(value, weights[name], rtol=2e-5)
