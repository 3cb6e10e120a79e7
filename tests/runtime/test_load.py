"""Weights from elsewhere: other names and types, matrices the other way round, files in parts, and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import foreplan as fp
from foreplan.graph.init import BLOCK

Arrays = dict[str, np.ndarray]


def session(hidden: int = 5, seed: int = 0, optimizer: object = None, inputs: int = 6) -> fp.runtime.session.Session:
    def network(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        x = fp.nn.relu(fp.nn.batch_norm(fp.nn.linear(x, hidden, name="hidden"), name="norm"))
        return fp.nn.linear(x, 3, name="head")

    graph = fp.trace(network, fp.spec((4, inputs)), name="model")
    return fp.compile(graph, fp.losses.cross_entropy, optimizer).bind(seed=seed)


def drawn(like: fp.runtime.session.Session, seed: int = 9) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=a.shape).astype(np.float32) for name, a in like.state_dict().items()}


def write(path: Path, arrays: Arrays) -> Path:
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    return path


def holds(one: fp.runtime.session.Session, arrays: Arrays) -> None:
    for name, array in arrays.items():
        np.testing.assert_array_equal(one.stored[name], array)


def test_counters_of_batch_normalisation_are_passed_over(tmp_path: Path) -> None:
    one = session()
    arrays = drawn(one)
    path = write(tmp_path / "w.safetensors", arrays | {"norm.num_batches_tracked": np.array(7)})
    loaded = one.load(path)
    holds(one, arrays)
    assert set(loaded.read) == set(arrays) and not loaded.unexpected
    path = write(tmp_path / "w.safetensors", arrays | {"other.num_batches_tracked": np.array(7)})
    with pytest.raises(fp.SessionError, match=r"its 'other\.num_batches_tracked' has no place"):
        one.load(path)


@pytest.mark.parametrize("prefix", ["module", "module.", "a.b.", "a/b/"])
def test_a_prefix_is_left_out(tmp_path: Path, prefix: str) -> None:
    one = session()
    arrays = drawn(one)
    start = prefix if prefix[-1] in "./" else f"{prefix}."
    path = write(tmp_path / "w.safetensors", {start + name: array for name, array in arrays.items()})
    if start.endswith("."):
        with pytest.raises(fp.SessionError, match=f"give prefix='{start.removesuffix('.')}'"):
            one.load(path)
    one.load(path, prefix=prefix)
    holds(one, arrays)
    with pytest.raises(fp.SessionError, match="no name that begins with 'elsewhere"):
        one.load(path, prefix="elsewhere")
    path = write(tmp_path / "w.safetensors", load_file(path) | {"lm_head": np.zeros(3, np.float32)})
    with pytest.raises(fp.SessionError, match="its 'lm_head' has no place"):
        one.load(path, prefix=prefix)
    assert one.load(path, prefix=prefix, strict=False).unexpected == ("lm_head",)


def test_parts_of_names_are_renamed_the_longest_first(tmp_path: Path) -> None:
    one = session()
    arrays = drawn(one)
    theirs = {"net/fc/w" if n == "head.weight" else "net/" + n.replace("head", "fc"): a for n, a in arrays.items()}
    path = write(tmp_path / "w.safetensors", theirs)
    one.load(path, rename={"net": "", "net/fc": "head", "net/fc/w": "head.weight"})
    holds(one, arrays)
    with pytest.raises(fp.SessionError, match="nothing called 'fd' to rename"):
        one.load(path, prefix="net/", rename={"fd": "head"})
    with pytest.raises(fp.SessionError, match="both renamed to 'head"):
        one.load(path, prefix="net/", rename={"fc/w": "head.weight", "hidden": "head"})


def test_a_beginning_is_put_before_every_name(tmp_path: Path) -> None:
    one = session()
    arrays = drawn(one)
    head = {name.removeprefix("head."): array for name, array in arrays.items() if name.startswith("head.")}
    path = write(tmp_path / "w.safetensors", head)
    before = dict(one.stored)
    loaded = one.load(path, rename={"": "head"}, strict=False)
    assert set(loaded.read) == {"head.weight", "head.bias"} and "hidden.weight" in loaded.missing
    holds(one, before | {name: arrays[name] for name in loaded.read})


def test_what_the_file_lacks_stays_and_what_it_has_besides_is_passed_over(tmp_path: Path) -> None:
    one = session(optimizer=fp.optim.Adam(0.1))
    one.step({"x": np.ones((4, 6), np.float32), "target": np.zeros(4, np.int64)})
    before, arrays = dict(one.stored), drawn(one)
    del arrays["head.bias"]
    path = write(tmp_path / "w.safetensors", arrays | {"extra": np.zeros(2, np.float32)})
    with pytest.raises(fp.SessionError, match=r"it has no 'head\.bias'"):
        one.load(path)
    holds(one, before)
    loaded = one.load(path, strict=False)
    assert (loaded.missing, loaded.unexpected) == (("head.bias",), ("extra",))
    holds(one, before | arrays)  # the state of the optimizer is as it was
    text = f"read {len(arrays)} tensors\n1 not in the file, left as they were: head.bias\n"
    assert str(loaded) == repr(loaded) == text + "1 in the file, and not in the model: extra"


def test_a_file_of_nothing_wanted_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", {"a.weight": np.zeros(2, np.float32)})
    with pytest.raises(fp.SessionError, match=r"it has no 'hidden\.weight'"):
        session().load(path, strict=False)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_other_floating_point_types_are_converted(tmp_path: Path, dtype: type) -> None:
    one = session()
    arrays = {name: array.astype(dtype) for name, array in drawn(one).items()}
    path = tmp_path / "w.safetensors"
    save_file(arrays, path)
    with pytest.raises(fp.SessionError, match="strict=False converts it"):
        one.load(path)
    loaded = one.load(path, strict=False)
    assert set(loaded.converted) == set(arrays)
    holds(one, {name: array.astype(np.float32) for name, array in arrays.items()})


def test_a_number_without_room_is_an_error(tmp_path: Path) -> None:
    one = session()
    arrays = {name: array.astype(np.float64) for name, array in drawn(one).items()}
    arrays["head.weight"][1, 2] = 1e39
    with pytest.raises(fp.SessionError, match="no room"):
        one.load(write(tmp_path / "w.safetensors", arrays), strict=False)
    with pytest.raises(fp.SessionError, match="a load was interrupted"):
        one.save(tmp_path / "again.safetensors")


def test_integers_are_no_weights(tmp_path: Path) -> None:
    arrays = drawn(session())
    arrays["head.bias"] = np.ones(3, np.int64)
    with pytest.raises(fp.SessionError, match=r"its 'head\.bias' is int64\[3\], and not float32\[3\]"):
        session().load(write(tmp_path / "w.safetensors", arrays), strict=False)


def test_matrices_the_other_way_round_are_found_by_shape_and_said(tmp_path: Path) -> None:
    one = session()
    arrays = drawn(one)
    theirs = {name: array.T if array.ndim == 2 else array for name, array in arrays.items()}
    path = write(tmp_path / "w.safetensors", theirs)
    with pytest.raises(fp.SessionError, match="give transpose="):
        one.load(path)
    loaded = one.load(path, strict=False)
    assert loaded.transposed == ("hidden.weight", "head.weight")
    holds(one, arrays)
    fresh = session()
    assert fresh.load(path, transpose=["*"]).transposed == loaded.transposed
    holds(fresh, arrays)


def test_a_square_matrix_among_transposed_ones_is_never_guessed(tmp_path: Path) -> None:
    one = session(hidden=6)
    arrays = drawn(one)
    theirs = {name: array.T if array.ndim == 2 else array for name, array in arrays.items()}
    path = write(tmp_path / "w.safetensors", theirs)
    with pytest.raises(fp.SessionError, match=r"'hidden\.weight' is square"):
        one.load(path, strict=False)
    one.load(path, strict=False, transpose=["head", "hidden"])
    holds(one, arrays)
    one.load(path, strict=False, transpose=["head"])
    holds(one, arrays | {"hidden.weight": arrays["hidden.weight"].T})
    with pytest.raises(fp.UsageError, match="no matrix"):
        one.load(path, transpose=["norm"])
    with pytest.raises(fp.UsageError, match="no value of the model is called 'heda'"):
        one.load(path, transpose=["heda"])


def test_matrices_of_many_blocks_are_transposed_with_little_memory(tmp_path: Path) -> None:
    one = session(hidden=1000, inputs=777)
    arrays = drawn(one)
    assert arrays["hidden.weight"].nbytes > 2 * BLOCK
    path = write(tmp_path / "w.safetensors", arrays | {"hidden.weight": arrays["hidden.weight"].T})
    one.load(path, transpose=["hidden"])
    holds(one, arrays)


def test_values_that_are_skipped_may_differ(tmp_path: Path) -> None:
    one = session()
    arrays = drawn(one)
    theirs = arrays | {"head.weight": np.zeros((10, 5), np.float32), "head.bias": np.zeros(10, np.float32)}
    path = write(tmp_path / "w.safetensors", theirs)
    for strict in (True, False):
        with pytest.raises(fp.SessionError, match=r"skip=\['head\.weight'\]"):
            one.load(path, strict=strict)
    before = dict(one.stored)
    one.load(path, skip=["head"])
    holds(one, arrays | {name: before[name] for name in ("head.weight", "head.bias")})
    with pytest.raises(fp.UsageError, match="skip: no value of the model is called 'body'"):
        one.load(path, skip=["body"])


def test_a_checkpoint_of_another_optimizer_gives_its_weights(tmp_path: Path) -> None:
    trained, other = session(optimizer=fp.optim.Adam(0.1)), session(seed=1, optimizer=fp.optim.Nesterov(0.1))
    trained.save(tmp_path / "w.safetensors")
    for how in ({"strict": False}, {"skip": ["head.bias"]}):
        loaded = other.load(tmp_path / "w.safetensors", **how)
        assert "hidden.weight" in loaded.read and not loaded.unexpected


def test_files_in_parts_are_read_by_their_index(tmp_path: Path) -> None:
    one = session()
    arrays = drawn(one)
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(arrays)}
    for part in sorted(set(places.values())):
        write(tmp_path / part, {name: array for name, array in arrays.items() if places[name] == part})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    one.load(index)
    holds(one, arrays)
    for wrong in ({"weight_map": 3}, [], {"weight_map": {"a": 3}}):
        index.write_text(json.dumps(wrong))
        with pytest.raises(fp.SessionError, match="weight_map"):
            one.load(index)
    for part in ("../part-0.safetensors", "/etc/passwd"):
        index.write_text(json.dumps({"weight_map": {"hidden.weight": part}}))
        with pytest.raises(fp.SessionError, match="beside it"):
            one.load(index)
    index.write_text(json.dumps({"weight_map": places | {"more": "part-0.safetensors"}}))
    with pytest.raises(fp.SessionError, match="has 'more', and it has not"):
        one.load(index)
    index.write_text(json.dumps({"weight_map": places | {"more": "part-7.safetensors"}}))
    with pytest.raises(fp.SessionError, match=r"there is no .*part-7.*index"):
        one.load(index)


@pytest.mark.parametrize("start", [b"PK\x03\x04rest of an archive", pickle.dumps({"a": 1})])
def test_pytorchs_own_files_are_never_opened(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(start)
    with pytest.raises(fp.SessionError, match=r"a pickle[\s\S]*torch\.load[\s\S]*w\.safetensors"):
        session().load(path)


@pytest.mark.parametrize("how", [{"prefix": 3}, {"rename": ["a"]}, {"rename": {"a": None}}, {"skip": "a"}])
def test_wrong_arguments_are_told(tmp_path: Path, how: dict[str, object]) -> None:
    with pytest.raises(fp.UsageError):
        session().load(tmp_path / "w.safetensors", **how)
