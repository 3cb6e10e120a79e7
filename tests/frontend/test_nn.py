"""Layers and functions of `nn` against JAX, and the names and contents of the parameters they make."""

from functools import partial

import numpy as np
import pytest

from foreplan.base.errors import ShapeError, TraceError, UsageError
from foreplan.frontend import nn, spec, trace
from foreplan.graph import Array, Fill, Normal, Uniform
from foreplan.graph.op import op_text
from foreplan.graph.value import Kind
from tests.ops.check import evaluate
from tests.oracle.peers import jax, jnp, lax

RNG = np.random.default_rng(3)
X = RNG.standard_normal((2, 4, 9, 8)).astype(np.float32)
H = RNG.standard_normal((2, 5, 12)).astype(np.float32)


def run(fn, *arrays):
    """(output, content of each stored value by name) of a traced function with one output."""
    graph = trace(fn, *(spec(x.shape, x.dtype) for x in arrays))
    rng = np.random.default_rng(11)
    stored = {}
    for value in graph.stored:
        if value.kind is not Kind.CONSTANT:
            content = rng.standard_normal(value.shape).astype(value.dtype.numpy)
            stored[value.name] = np.abs(content) + 0.5 if value.name.endswith("running_var") else content
    values = evaluate(graph, {value.name: x for value, x in zip(graph.inputs, arrays)}, stored)
    (output,) = graph.outputs.values()
    return values[output], stored


def close(got, expected, tol=1e-5):
    assert got.shape == np.shape(expected)
    np.testing.assert_allclose(got, expected, rtol=tol, atol=tol)


NEAREST = [i * 8 // 13 for i in range(13)]
ACTIVATIONS = {
    "relu": (nn.relu, lambda x: jax.nn.relu(x)),
    "relu6": (nn.relu6, lambda x: jax.nn.relu6(x)),
    "leaky_relu": (nn.leaky_relu, lambda x: jax.nn.leaky_relu(x)),
    "elu": (nn.elu, lambda x: jax.nn.elu(x)),
    "sigmoid": (nn.sigmoid, lambda x: jax.nn.sigmoid(x)),
    "tanh": (nn.tanh, lambda x: jnp.tanh(x)),
    "silu": (nn.silu, lambda x: jax.nn.silu(x)),
    "softplus": (nn.softplus, lambda x: jax.nn.softplus(x)),
    "mish": (nn.mish, lambda x: jax.nn.mish(x)),
    "hard_sigmoid": (nn.hard_sigmoid, lambda x: jax.nn.hard_sigmoid(x)),
    "hard_swish": (nn.hard_swish, lambda x: jax.nn.hard_swish(x)),
    "gelu": (nn.gelu, lambda x: jax.nn.gelu(x, approximate=False)),
    "gelu by tanh": (lambda x: nn.gelu(x, "tanh"), lambda x: jax.nn.gelu(x, approximate=True)),
    "softmax": (nn.softmax, lambda x: jax.nn.softmax(x)),
    "softmax axis": (lambda x: nn.softmax(x, axis=1), lambda x: jax.nn.softmax(x, axis=1)),
    "log_softmax": (lambda x: nn.log_softmax(x, 2), lambda x: jax.nn.log_softmax(x, 2)),
    "flatten": (nn.flatten, lambda x: x.reshape(2, -1)),
    "global_avg_pool": (nn.global_avg_pool, lambda x: x.mean((2, 3))),
    "cumsum": (lambda x: nn.cumsum(x, 2), lambda x: jnp.cumsum(x, 2)),
    "cumsum back": (lambda x: nn.cumsum(x, 1, reverse=True), lambda x: lax.cumsum(x, 1, reverse=True)),
    "topk": (lambda x: nn.topk(x, 3)[0], lambda x: lax.top_k(x, 3)[0]),
    "topk indices": (lambda x: nn.topk(x, 3)[1], lambda x: lax.top_k(x, 3)[1]),
    "concat": (lambda x: nn.concat([x, x * 2]), lambda x: jnp.concatenate([x, x * 2], 1)),
    "masked_mean": (lambda x: nn.masked_mean(x, x > 0), lambda x: x[x > 0].mean()),
    "dropout": (lambda x: nn.dropout(x, 0.4) + 0.0, lambda x: x),
    "stochastic_depth": (lambda x: nn.stochastic_depth(x, 0.4) + 0.0, lambda x: x),
    "upsample": (nn.upsample, lambda x: x.repeat(2, 2).repeat(2, 3)),
    "resize nearest": (lambda x: nn.resize(x, (4, 13), "nearest"), lambda x: x[:, :, [0, 2, 4, 6]][..., NEAREST]),
    "resize corners": (
        lambda x: nn.resize(x, (17, 8), align_corners=True)[:, :, 1::2],
        lambda x: (x[:, :, 1:] + x[:, :, :-1]) / 2,
    ),
    "resize": (lambda x: nn.resize(x, (18, 12)), lambda x: jax.image.resize(x, (2, 4, 18, 12), "bilinear")),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions(name):
    ours, theirs = ACTIVATIONS[name]
    got, stored = run(ours, X)
    assert not stored
    close(got, theirs(jnp.asarray(X)))


def windows(x, reduce, init, kernel, stride, padding):
    pads = [(0, 0), (0, 0), *((p, p) for p in padding)]
    return lax.reduce_window(x, init, reduce, (1, 1, *kernel), (1, 1, *stride), pads)


def test_pooling():
    got, _ = run(lambda x: nn.max_pool(x, 3, 2, 1), X)
    close(got, windows(X, lax.max, -jnp.inf, (3, 3), (2, 2), (1, 1)))
    got, _ = run(lambda x: nn.max_pool(x, (2, 3)), X)
    close(got, windows(X, lax.max, -jnp.inf, (2, 3), (2, 3), (0, 0)))
    got, _ = run(lambda x: nn.avg_pool(x, 3, 2, 1, count_padding=True), X)
    close(got, windows(X, lax.add, 0.0, (3, 3), (2, 2), (1, 1)) / 9)
    got, _ = run(lambda x: nn.avg_pool(x, 3, 2, 1), X)
    counts = windows(np.ones_like(X), lax.add, 0.0, (3, 3), (2, 2), (1, 1))
    close(got, windows(X, lax.add, 0.0, (3, 3), (2, 2), (1, 1)) / counts)


def test_linear():
    got, stored = run(lambda x: nn.linear(x, 7, name="fc"), H)
    assert {name: w.shape for name, w in stored.items()} == {"fc.weight": (7, 12), "fc.bias": (7,)}
    close(got, H @ stored["fc.weight"].T + stored["fc.bias"])
    got, stored = run(lambda x: nn.linear(x, 7, bias=False), H)
    close(got, H @ stored["linear0.weight"].T)


CONVOLUTIONS = {
    "plain": ({"kernel": 3}, {}),
    "same": ({"kernel": 3, "stride": 2, "padding": "same"}, {"window_strides": (2, 2), "padding": "SAME"}),
    "valid": ({"kernel": (2, 3), "padding": "valid"}, {}),
    "strided": (
        {"kernel": 3, "stride": (2, 1), "padding": 1},
        {"window_strides": (2, 1), "padding": [(1, 1), (1, 1)]},
    ),
    "uneven": ({"kernel": 3, "padding": [(0, 1), (2, 1)]}, {"padding": [(0, 1), (2, 1)]}),
    "dilated": (
        {"kernel": 3, "dilation": 2, "padding": 2},
        {"padding": [(2, 2), (2, 2)], "rhs_dilation": (2, 2)},
    ),
    "groups": ({"kernel": 3, "groups": 2}, {"feature_group_count": 2}),
    "depthwise": ({"kernel": 3, "groups": 4}, {"feature_group_count": 4}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv(name):
    ours, theirs = CONVOLUTIONS[name]
    got, stored = run(lambda x: nn.conv(x, 8, **ours), X)
    weight, bias = stored["conv0.weight"], stored["conv0.bias"]
    theirs = {"window_strides": (1, 1), "padding": "VALID"} | theirs
    expected = lax.conv_general_dilated(X, weight, **theirs)
    close(got, expected + bias[:, None, None], 1e-4)


def test_conv_transpose():
    got, stored = run(lambda x: nn.conv_transpose(x, 6, 3, 2, padding=1, output_padding=1), X)
    weight, bias = stored["conv_transpose0.weight"], stored["conv_transpose0.bias"]
    assert weight.shape == (4, 6, 3, 3)
    # A transposed convolution is the vector-Jacobian product of the convolution with the same weight.
    image = jnp.zeros((2, 6, 18, 16))
    forward = lambda x: lax.conv_general_dilated(x, weight, (2, 2), [(1, 1), (1, 1)])  # noqa: E731
    (expected,) = jax.vjp(forward, image)[1](jnp.asarray(X))
    close(got, expected + bias[:, None, None], 1e-4)


def test_normalisations():
    got, stored = run(lambda x: nn.batch_norm(x, name="bn"), X)
    scale, bias, mean, var = (
        stored[f"bn.{part}"][:, None, None] for part in ("weight", "bias", "running_mean", "running_var")
    )
    close(got, (X - mean) / np.sqrt(var + 1e-5) * scale + bias)
    got, stored = run(lambda x: nn.layer_norm(x, name="ln"), H)
    normal = (H - H.mean(-1, keepdims=True)) / np.sqrt(H.var(-1, keepdims=True) + 1e-5)
    close(got, normal * stored["ln.weight"] + stored["ln.bias"])
    got, stored = run(lambda x: nn.rms_norm(x, name="rms"), H)
    close(got, H / np.sqrt(np.square(H).mean(-1, keepdims=True) + 1e-6) * stored["rms.weight"])
    got, stored = run(lambda x: nn.group_norm(x, 2, name="gn"), X)
    groups = X.reshape(2, 2, -1)
    normal = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-5)
    close(got, normal.reshape(X.shape) * stored["gn.weight"][:, None, None] + stored["gn.bias"][:, None, None])


def test_batch_norm_keeps_buffers():
    graph = trace(lambda x: nn.batch_norm(x), spec((2, 3, 4, 4)))
    kinds = {value.name: value.kind for value in graph.stored}
    assert kinds == {
        "batch_norm0.weight": Kind.PARAMETER,
        "batch_norm0.bias": Kind.PARAMETER,
        "batch_norm0.running_mean": Kind.BUFFER,
        "batch_norm0.running_var": Kind.BUFFER,
    }


def reference_attention(q, k, v, mask=None):
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def test_attention():
    q, k, v = (RNG.standard_normal((2, 3, n, 4)).astype(np.float32) for n in (5, 6, 6))
    got, _ = run(nn.attention, q, k, v)
    close(got, reference_attention(q, k, v))
    mask = RNG.random((5, 6)) < 0.7
    mask[:, 0] = True
    got, _ = run(lambda q, k, v: nn.attention(q, k, v, mask), q, k, v)
    close(got, reference_attention(q, k, v, mask))
    got, _ = run(lambda q, k, v, m: nn.attention(q, k, v, m > 0), q, k, v, mask.astype(np.float32))
    close(got, reference_attention(q, k, v, mask))
    got, _ = run(lambda q, k, v: nn.attention(q, k, v, causal=True), k, k, v)
    close(got, reference_attention(k, k, v, np.tri(6, dtype=bool)))


def heads(x, n):
    return x.reshape(*x.shape[:2], n, -1).transpose(0, 2, 1, 3)


def test_multi_head_attention():
    got, w = run(lambda x: nn.multi_head_attention(x, 3, causal=True, name="attn"), H)
    q, k, v = np.split(H @ w["attn.in_proj.weight"].T + w["attn.in_proj.bias"], 3, -1)
    y = reference_attention(heads(q, 3), heads(k, 3), heads(v, 3), np.tri(5, dtype=bool))
    y = y.transpose(0, 2, 1, 3).reshape(H.shape)
    close(got, y @ w["attn.out_proj.weight"].T + w["attn.out_proj.bias"], 1e-4)

    context = RNG.standard_normal((2, 7, 6)).astype(np.float32)
    got, w = run(lambda x, c: nn.multi_head_attention(x, 2, c, bias=False, name="cross"), H, context)
    k, v = np.split(context @ w["cross.kv_proj.weight"].T, 2, -1)
    y = reference_attention(heads(H @ w["cross.q_proj.weight"].T, 2), heads(k, 2), heads(v, 2))
    close(got, y.transpose(0, 2, 1, 3).reshape(H.shape) @ w["cross.out_proj.weight"].T, 1e-4)


def test_embedding_with_a_tied_output():
    ids = np.array([[1, 0, 6], [3, 3, 2]])
    got, stored = run(lambda ids: nn.embedding(ids, 7, 5, name="wte") @ nn.shared("wte.weight").T, ids)
    table = stored["wte.weight"]
    close(got, table[ids] @ table.T)


def test_loss_terms_and_one_hot():
    logits, ids = H, np.array([[1, 0, 11, 4, 2], [3, 3, 2, -100, 5]])
    got, _ = run(nn.cross_entropy, logits, ids)
    expected = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.maximum(ids, 0)[..., None], -1)[..., 0]
    close(got, np.where(ids < 0, 0, expected))
    got, _ = run(lambda x: nn.one_hot(x, 12), np.abs(ids) % 12)
    close(got, np.eye(12, dtype=np.float32)[np.abs(ids) % 12])


def test_names_come_from_scopes():
    def block(x):
        x = nn.linear(x, 4, bias=False)
        return nn.linear(x, 4, bias=False, name="out")

    def model(x):
        with nn.scope("layer1"):
            for i in range(2):
                with nn.scope(i):
                    x = block(x)
        x = nn.linear(nn.linear(x, 4, bias=False), 4, bias=False)
        return x + nn.parameter("shift", 4) + nn.buffer("seen", (), 3.0)

    graph = trace(model, spec((2, 4)))
    assert [value.name for value in graph.stored] == [
        "layer1.0.linear0.weight",
        "layer1.0.out.weight",
        "layer1.1.linear0.weight",
        "layer1.1.out.weight",
        "linear0.weight",
        "linear1.weight",
        "shift",
        "seen",
    ]
    assert [node.name for node in graph.nodes][:2] == ["layer1.0.linear0/matmul", "layer1.0.out/matmul"]
    assert all(node.source.startswith("test_nn.py:") for node in graph.nodes)


def test_initialisers():
    def model(x):
        x = nn.conv(x, 8, 3, name="conv")
        x = nn.linear(nn.global_avg_pool(x), 4, name="fc", bias_init=0.0)
        return x + nn.parameter("array", 4, np.arange(4.0)) + nn.parameter("number", 4, 2)

    init = {value.name: value.init for value in trace(model, spec(X.shape)).stored}
    # PyTorch: kaiming_uniform with a = √5 is U(±1/√fan_in).
    assert init["conv.weight"] == Uniform(-1 / 6, 1 / 6)
    assert init["conv.bias"] == Uniform(-1 / 6, 1 / 6)
    assert init["fc.weight"] == Uniform(-1 / 8**0.5, 1 / 8**0.5)
    assert init["fc.bias"] == Fill(0.0)
    assert isinstance(init["array"], Array)
    assert init["number"] == Fill(2.0)
    assert nn.kaiming_normal_fan_out((64, 3, 7, 7)) == Normal((2 / (64 * 49)) ** 0.5)
    assert nn.xavier_uniform(4, 2) == Uniform(-1.0, 1.0)
    assert nn.xavier_uniform(0, 0) == Uniform(0.0, 0.0)
    with pytest.raises(UsageError, match="fan_in"):
        nn.xavier_uniform("a", 2)


def refused(fn, *specs, error=TraceError):
    with pytest.raises(error, match=r"test_nn\.py:\d+") as caught:
        trace(fn, *specs)
    return str(caught.value)


def test_errors_name_the_line():
    def twice(x):
        return nn.linear(nn.linear(x, 4, name="fc"), 4, name="fc")

    assert "nn.shared('fc.weight')" in refused(twice, spec((2, 4)))
    assert "there are none" in refused(lambda x: x + nn.shared("gone"), spec(3))
    assert "ratio" in refused(lambda x: nn.dropout(x, 1.0), spec(3))
    assert "ratio" in refused(lambda x: nn.dropout(x, "a"), spec(3))
    assert "stochastic_depth's ratio" in refused(lambda x: nn.stochastic_depth(x, 1.0), spec(3))
    assert "groups" in refused(lambda x: nn.conv(x, 6, 3, groups=4), spec((1, 4, 8, 8)), error=ShapeError)
    assert "groups" in refused(lambda x: nn.group_norm(x, 3), spec((1, 4, 8)), error=ShapeError)
    assert "heads" in refused(lambda x: nn.multi_head_attention(x, 5), spec((1, 4, 8)), error=ShapeError)
    assert "shape" in refused(lambda x: x + nn.parameter("w", 3, np.ones(2)), spec(3), error=ShapeError)

    def inside(x):
        with nn.scope("deep"), nn.scope("deeper"):
            return nn.max_pool(x, 9)

    message = refused(inside, spec((1, 1, 4, 4)), error=ShapeError)
    assert f"test_nn.py:{inside.__code__.co_firstlineno + 2}" in message
    with pytest.raises(TraceError, match="nothing is being traced"):
        nn.parameter("w", 3)


AXES = {
    "cumsum": lambda x: nn.cumsum(x, 2),
    "cumsum of negative": lambda x: nn.cumsum(x, -3),
    "topk": lambda x: nn.topk(x, 1, axis=2)[0],
    "layer_norm": lambda x: nn.layer_norm(x, axis=3),
    "rms_norm": lambda x: nn.rms_norm(x, axis=-3),
}


@pytest.mark.parametrize("name", AXES)
def test_an_axis_that_is_none(name):
    assert "distinct axes" in refused(AXES[name], spec((2, 3)), error=ShapeError)


IMAGES = spec((1, 4, 5, 5))
NUMBERS = {
    "conv's kernel": lambda x: nn.conv(x, 4, (3, 2.5)),
    "conv's stride": lambda x: nn.conv(x, 4, 3, stride=0, padding="same"),
    "conv's padding": lambda x: nn.conv(x, 4, 3, padding=[1, 2.5]),
    "conv's groups": lambda x: nn.conv(x, 4, 3, groups=1.0),
    "conv_transpose's padding": lambda x: nn.conv_transpose(x, 4, 3, padding="same"),
    "max_pool's kernel": lambda x: nn.max_pool(x, 2.5),
    "avg_pool's padding": lambda x: nn.avg_pool(x, 2, padding="same"),
    "resize's size": lambda x: nn.resize(x, (4, 4.5)),
    "group_norm's groups": lambda x: nn.group_norm(x, 1.0),
    "topk's k": lambda x: nn.topk(x, 1.5)[0],
    "one_hot's depth": lambda x: nn.one_hot(x, -1),
    "the number of heads": lambda x: nn.multi_head_attention(nn.flatten(x, 2), 0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_sizes_that_no_layer_can_mean(name):
    with pytest.raises(UsageError, match=f"{name} must be a whole number of at least"):
        trace(NUMBERS[name], IMAGES)


def test_sizes_that_do_not_fit_the_axes():
    pairs = [(1, 1, 1), (1, 1, 1)]
    assert "pairs" in refused(lambda x: nn.conv(x, 4, 3, padding=pairs), IMAGES, error=ShapeError)
    assert "2 spatial axes" in refused(lambda x: nn.max_pool(x, (2, 2, 2)), IMAGES, error=ShapeError)
    assert "[batch, positions, width]" in refused(lambda x: nn.split_heads(x, 2)[0], spec((2, 4)), error=ShapeError)
    assert "[batch, positions, heads, depth]" in refused(lambda x: nn.join_heads(x), spec((2, 3, 4)), error=ShapeError)


def test_numbers_of_numpy_are_sizes_too():
    def model(x, of=int):
        x = nn.conv(x, 4, of(3), stride=of(1), padding=np.array([1, 1]), groups=of(2), dilation=(of(1), of(1)))
        x = nn.resize(nn.max_pool(x, of(2)), of(4))
        x = nn.split_heads(nn.flatten(nn.group_norm(x, of(2)), of(2)), of(2), of(4))[0]
        return nn.one_hot(nn.topk(x, of(2))[1], of(3)) + nn.parameter("number", (), of(2))

    nodes, wanted = (trace(partial(model, of=of), IMAGES).nodes for of in (np.int64, int))
    assert [(node.name, op_text(node.op)) for node in nodes] == [(node.name, op_text(node.op)) for node in wanted]


def test_content_that_is_none():
    for wrong in ("normal", [1, 2, 3], None):
        with pytest.raises(
            UsageError, match="content of the parameter 'w' must be an initialiser, a number or an array"
        ):
            trace(lambda x, wrong=wrong: x + nn.parameter("w", 3, wrong), spec(3))


def test_a_mask_of_lists():
    x, mask = X[:1, :1, :2], [[True, False], [True, True]]
    got, _ = run(lambda x: nn.attention(x, x, x, mask), x)
    expected, _ = run(lambda x: nn.attention(x, x, x, np.array(mask)), x)
    np.testing.assert_array_equal(got, expected)


def test_extents_that_are_no_whole_numbers():
    """Rounded down, they made another layer in silence."""
    for extent in (2.5, 2.0, True, "3"):
        with pytest.raises(UsageError, match="linear's features must be a whole number"):
            trace(partial(nn.linear, features=extent), spec((2, 3)))
    with pytest.raises(UsageError, match="upsample's scale must be a whole number"):
        trace(lambda x: nn.upsample(x, 1.5), spec((1, 2, 3, 3)))


def test_numbers_that_no_layer_can_mean():
    for epsilon in (-1.0, float("nan"), float("inf"), "1"):
        for layer in (nn.batch_norm, nn.layer_norm, nn.rms_norm, partial(nn.group_norm, groups=1)):
            with pytest.raises(UsageError, match="epsilon must be in"):
                trace(partial(layer, epsilon=epsilon), spec((2, 3, 4)))
    for momentum in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="batch_norm's momentum must be in"):
            trace(partial(nn.batch_norm, momentum=momentum), spec((2, 3)))
    trace(partial(nn.batch_norm, momentum=1.0), spec((2, 3)))
    assert "distinct axes" in refused(lambda x: nn.flatten(x, 3), spec((2, 3)), error=ShapeError)
