"""Forward passes of the zoo, written again in JAX."""

import math

import numpy as np

from foreplan import models
from foreplan.frontend import spec, trace
from foreplan.graph import Graph
from foreplan.graph.init import generator_for
from foreplan.graph.value import Kind
from foreplan.models.convnext import block as convnext_block
from foreplan.models.efficientnet import mb_conv
from foreplan.models.mobilenet import inverted_residual
from foreplan.models.resnet import bottleneck
from tests.ops.check import evaluate
from tests.oracle.peers import jax, jnp, lax


def stored_content(graph: Graph) -> dict[str, np.ndarray]:
    """Contents that leave nothing at its special first value: no zero bias, no unit scale."""
    found = {}
    for value in graph.stored:
        if value.kind is Kind.CONSTANT:
            continue
        rng = generator_for(1, value.name)
        draw = rng.standard_normal(value.shape).astype(np.float32)
        if value.name.endswith("running_var"):
            found[value.name] = np.abs(draw) + 0.5
        elif len(value.shape) > 1:
            found[value.name] = draw / np.sqrt(math.prod(value.shape[1:])).astype(np.float32)
        else:
            found[value.name] = 1 + 0.1 * draw if value.name.endswith("weight") else 0.1 * draw
    return found


def check_forward(graph, reference, *inputs, tol=2e-4):
    stored = stored_content(graph)
    given = {value.name: x for value, x in zip(graph.inputs, inputs)}
    (output,) = graph.outputs.values()
    got = evaluate(graph, given, stored, hard=False)[output]
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(jax.jit(reference)(stored, *inputs))
    assert got.shape == expected.shape
    scale = np.abs(expected).max()
    np.testing.assert_allclose(got / scale, expected / scale, atol=tol)


def conv(w, name, x, stride=1, pad=0, groups=1):
    y = lax.conv_general_dilated(x, w[f"{name}.weight"], (stride, stride), [(pad, pad)] * 2, feature_group_count=groups)
    return y + w[f"{name}.bias"][:, None, None] if f"{name}.bias" in w else y


def bn(w, name, x):
    weight, bias, mean, var = (
        w[f"{name}.{part}"][:, None, None] for part in ("weight", "bias", "running_mean", "running_var")
    )
    return (x - mean) / jnp.sqrt(var + 1e-5) * weight + bias


def dense(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def max_pool(x, kernel, stride, pad=0):
    pads = [(0, 0), (0, 0), (pad, pad), (pad, pad)]
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, kernel, kernel), (1, 1, stride, stride), pads)


def images(*shape):
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


def test_mlp_forward():
    def reference(w, x):
        for i in range(2):
            x = jax.nn.relu(dense(w, f"hidden{i}", x))
        return dense(w, "out", x)

    check_forward(models.mlp(batch=5, width=16, layers=2), reference, images(5, 784))


def test_conv_chain_forward():
    def reference(w, x):
        for i in range(1, 10):
            x = conv(w, f"conv{i}", x, pad=1)
        return x

    check_forward(models.conv_chain(size=12), reference, images(1, 1, 12, 12))


def test_resnet18_forward():
    def block(w, name, x, stride):
        y = jax.nn.relu(bn(w, f"{name}.bn1", conv(w, f"{name}.conv1", x, stride, 1)))
        y = bn(w, f"{name}.bn2", conv(w, f"{name}.conv2", y, 1, 1))
        if f"{name}.downsample.0.weight" in w:
            x = bn(w, f"{name}.downsample.1", conv(w, f"{name}.downsample.0", x, stride))
        return jax.nn.relu(x + y)

    def reference(w, x):
        x = max_pool(jax.nn.relu(bn(w, "bn1", conv(w, "conv1", x, 2, 3))), 3, 2, 1)
        for stage in range(1, 5):
            for i in range(2):
                x = block(w, f"layer{stage}.{i}", x, 2 if stage > 1 and i == 0 else 1)
        return dense(w, "fc", x.mean((2, 3)))

    check_forward(models.resnet18(batch=1, size=32, classes=10), reference, images(1, 3, 32, 32))


def test_resnet_bottleneck_forward():
    def reference(w, x):
        y = jax.nn.relu(bn(w, "bn1", conv(w, "conv1", x)))
        y = jax.nn.relu(bn(w, "bn2", conv(w, "conv2", y, 2, 1)))
        y = bn(w, "bn3", conv(w, "conv3", y))
        return jax.nn.relu(y + bn(w, "downsample.1", conv(w, "downsample.0", x, 2)))

    graph = trace(lambda x: bottleneck(x, 4, 2), spec((2, 8, 9, 9)))
    check_forward(graph, reference, images(2, 8, 9, 9))


def test_mobilenet_block_forward():
    def reference(w, x):
        y = jax.nn.relu6(bn(w, "conv.0.1", conv(w, "conv.0.0", x)))
        y = jax.nn.relu6(bn(w, "conv.1.1", conv(w, "conv.1.0", y, 1, 1, groups=24)))
        return x + bn(w, "conv.3", conv(w, "conv.2", y))

    graph = trace(lambda x: inverted_residual(x, 4, 1, 6), spec((2, 4, 7, 7)))
    check_forward(graph, reference, images(2, 4, 7, 7))


def test_efficientnet_block_forward():
    def reference(w, x):
        y = jax.nn.silu(bn(w, "block.0.1", conv(w, "block.0.0", x)))
        y = jax.nn.silu(bn(w, "block.1.1", conv(w, "block.1.0", y, 1, 2, groups=24)))
        scale = jax.nn.silu(conv(w, "block.2.fc1", y.mean((2, 3), keepdims=True)))
        y = y * jax.nn.sigmoid(conv(w, "block.2.fc2", scale))
        return x + bn(w, "block.3.1", conv(w, "block.3.0", y))

    graph = trace(lambda x: mb_conv(x, 4, 5, 1, 6, 0.0), spec((2, 4, 7, 7)))
    check_forward(graph, reference, images(2, 4, 7, 7))


def test_convnext_block_forward():
    def reference(w, x):
        y = layer_norm(w, "block.2", conv(w, "block.0", x, 1, 3, groups=4).transpose(0, 2, 3, 1), 1e-6)
        y = jax.nn.gelu(dense(w, "block.3", y), approximate=False)
        return x + w["layer_scale"] * dense(w, "block.5", y).transpose(0, 3, 1, 2)

    graph = trace(lambda x: convnext_block(x, 1e-6, 0.0), spec((2, 4, 7, 7)))
    check_forward(graph, reference, images(2, 4, 7, 7))


def test_unet_forward():
    def double(w, name, x):
        for i in (1, 2):
            x = jax.nn.relu(bn(w, f"{name}.bn{i}", conv(w, f"{name}.conv{i}", x, 1, 1)))
        return x

    def up(w, name, x):
        # Stride and kernel are both 2: each input pixel makes its own 2×2 block of the output.
        y = jnp.einsum("nchw,ckij->nkhiwj", x, w[f"{name}.up.weight"])
        n, k, h, _, wide, _ = y.shape
        return y.reshape(n, k, 2 * h, 2 * wide) + w[f"{name}.up.bias"][:, None, None]

    def reference(w, x):
        kept = []
        for level in range(5):
            x = double(w, f"down{level}", max_pool(x, 2, 2) if level else x)
            kept.append(x)
        for level in reversed(range(4)):
            x = double(w, f"up{level}", jnp.concatenate([kept[level], up(w, f"up{level}", x)], 1))
        return conv(w, "out", x)

    check_forward(models.unet(batch=1, size=32, width=4), reference, images(1, 3, 32, 32))


def layer_norm(w, name, x, epsilon=1e-5):
    normal = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + epsilon)
    return normal * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(q, k, v, heads, causal=False):
    def split(x):
        return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)

    q, k, v = split(q), split(k), split(v)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), scores, -jnp.inf)
    y = jax.nn.softmax(scores) @ v
    return y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1)


TOKENS = np.random.default_rng(4).integers(0, 50, (2, 9))


def test_gpt2_forward():
    def reference(w, tokens):
        x = w["wte.weight"][tokens] + w["wpe.weight"][:9]
        y = layer_norm(w, "h.0.ln_1", x)
        y = attention(*jnp.split(dense(w, "h.0.attn.c_attn", y), 3, -1), 4, causal=True)
        x = x + dense(w, "h.0.attn.c_proj", y)
        y = jax.nn.gelu(dense(w, "h.0.mlp.c_fc", layer_norm(w, "h.0.ln_2", x)), approximate=True)
        x = x + dense(w, "h.0.mlp.c_proj", y)
        return layer_norm(w, "ln_f", x) @ w["wte.weight"].T

    graph = models.gpt2_small(batch=2, seq=9, layers=1, width=32, heads=4, vocabulary=50)
    check_forward(graph, reference, TOKENS)


def test_bert_forward():
    def reference(w, tokens, segments):
        x = w["embeddings.word.weight"][tokens] + w["embeddings.position.weight"][:9]
        x = layer_norm(w, "embeddings.norm", x + w["embeddings.segment.weight"][segments], 1e-12)
        for i in range(2):
            name = f"encoder.{i}"
            y = attention(*(dense(w, f"{name}.attention.{part}", x) for part in ("query", "key", "value")), 4)
            x = layer_norm(w, f"{name}.attention.norm", x + dense(w, f"{name}.attention.output", y), 1e-12)
            y = jax.nn.gelu(dense(w, f"{name}.intermediate", x), approximate=False)
            x = layer_norm(w, f"{name}.norm", x + dense(w, f"{name}.output", y), 1e-12)
        x = layer_norm(w, "head.norm", jax.nn.gelu(dense(w, "head.dense", x), approximate=False), 1e-12)
        return x @ w["embeddings.word.weight"].T + w["head.bias"]

    graph = models.bert_base(batch=2, seq=9, layers=2, width=32, heads=4, vocabulary=50)
    check_forward(graph, reference, TOKENS, TOKENS % 2)
    dropped = models.bert_base(
        batch=2, seq=9, layers=2, width=32, heads=4, vocabulary=50, dropout=0.1, attention_dropout=0.1
    )
    check_forward(dropped, reference, TOKENS, TOKENS % 2)  # which an inference leaves out


def test_llama_forward():
    def norm(w, name, x):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    def turned(x, heads):
        x = x.reshape(2, 9, heads, 8)
        angle = jnp.arange(9)[:, None, None] * 100.0 ** (-jnp.arange(4) / 4)
        z = (x[..., :4] + 1j * x[..., 4:]) * jnp.exp(1j * angle)
        return jnp.concatenate([z.real, z.imag], -1)

    def reference(w, tokens):
        x, name = w["model.embed_tokens.weight"][tokens], "model.layers.0"
        y = norm(w, f"{name}.input_layernorm", x)
        q, k, v = (y @ w[f"{name}.self_attn.{part}_proj.weight"].T for part in "qkv")
        k, v = (jnp.repeat(each, 2, 2).reshape(2, 9, 32) for each in (turned(k, 2), v.reshape(2, 9, 2, 8)))
        y = attention(turned(q, 4).reshape(2, 9, 32), k, v, 4, causal=True)
        x = x + y @ w[f"{name}.self_attn.o_proj.weight"].T
        y = norm(w, f"{name}.post_attention_layernorm", x)
        gate, up = (y @ w[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (jax.nn.silu(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T
        return norm(w, "model.norm", x) @ w["lm_head.weight"].T

    sizes = {"layers": 1, "width": 32, "heads": 4, "kv_heads": 2, "features": 48, "vocabulary": 50}
    graph = models.llama(batch=2, seq=9, base=100.0, stretch=1.0, tied=False, **sizes)
    check_forward(graph, reference, TOKENS)


def test_lstm_forward():
    def reference(w, tokens):
        x = w["encoder.weight"][tokens]
        for layer in "01":
            h = c = jnp.zeros((2, 16))
            found = []
            for t in range(9):
                gates = x[:, t] @ w[f"rnn.weight_ih_l{layer}"].T + h @ w[f"rnn.weight_hh_l{layer}"].T
                gates = gates + w[f"rnn.bias_ih_l{layer}"] + w[f"rnn.bias_hh_l{layer}"]
                i, f, g, o = jnp.split(gates, 4, -1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
                found.append(h)
            x = jnp.stack(found, 1)
        return dense(w, "decoder", x)

    check_forward(models.lstm_lm(batch=2, seq=9, width=16, vocabulary=50), reference, TOKENS)


def test_vit_forward():
    def reference(w, x):
        x = conv(w, "conv_proj", x, 8)
        x = x.reshape(2, 32, -1).swapaxes(1, 2)
        x = jnp.concatenate([jnp.broadcast_to(w["class_token"], (2, 1, 32)), x], 1) + w["encoder.pos_embedding"]
        name = "encoder.layers.encoder_layer_0"
        y = layer_norm(w, f"{name}.ln_1", x, 1e-6)
        y = attention(*jnp.split(dense(w, f"{name}.self_attention.in_proj", y), 3, -1), 4)
        x = x + dense(w, f"{name}.self_attention.out_proj", y)
        y = jax.nn.gelu(dense(w, f"{name}.mlp.0", layer_norm(w, f"{name}.ln_2", x, 1e-6)), approximate=False)
        x = layer_norm(w, "encoder.ln", x + dense(w, f"{name}.mlp.3", y), 1e-6)
        return dense(w, "heads.head", x[:, 0])

    graph = models.vit_b16(batch=2, size=24, layers=1, classes=7, width=32, heads=4, patch=8)
    check_forward(graph, reference, images(2, 3, 24, 24))


def test_mixer_forward():
    def perceptron(w, name, x):
        return dense(w, f"{name}.fc2", jax.nn.gelu(dense(w, f"{name}.fc1", x), approximate=False))

    def reference(w, x):
        x = conv(w, "stem.proj", x, 8)
        x = x.reshape(2, 32, -1).swapaxes(1, 2)
        for i in range(2):
            y = layer_norm(w, f"blocks.{i}.norm1", x, 1e-6).swapaxes(1, 2)
            x = x + perceptron(w, f"blocks.{i}.mlp_tokens", y).swapaxes(1, 2)
            x = x + perceptron(w, f"blocks.{i}.mlp_channels", layer_norm(w, f"blocks.{i}.norm2", x, 1e-6))
        return dense(w, "head", layer_norm(w, "norm", x, 1e-6).mean(1))

    graph = models.mixer_b16(batch=2, size=24, layers=2, classes=7, width=32, patch=8)
    check_forward(graph, reference, images(2, 3, 24, 24))


def test_dlrm_forward():
    def perceptron(w, name, count, x):
        for i in range(count):
            x = jax.nn.relu(dense(w, f"{name}.{2 * i}", x))
        return x

    def reference(w, x, categories):
        x = perceptron(w, "bot_l", 4, x)
        vectors = jnp.stack([x, *(w[f"emb_l.{i}.weight"][categories[:, i]] for i in range(3))], 1)
        products = jnp.einsum("nid,njd->nij", vectors, vectors)
        pairs = [products[:, i, j] for i in range(4) for j in range(i)]
        return dense(w, "top_l.4", perceptron(w, "top_l", 2, jnp.concatenate([x, jnp.stack(pairs, 1)], 1)))

    graph = models.dlrm(batch=2, dense=4, tables=3, rows=50, width=8, hidden=16)
    check_forward(graph, reference, images(2, 4), TOKENS[:, :3])
