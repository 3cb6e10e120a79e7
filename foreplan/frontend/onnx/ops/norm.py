"""ONNX's normalisations."""

from __future__ import annotations

from foreplan.frontend.onnx.node import OnnxNode, Operand, Result, translates
from foreplan.graph import Value
from foreplan.graph.value import Kind
from foreplan.ops.expr import sqrt
from foreplan.ops.map import elementwise
from foreplan.ops.norm.batch import BatchNorm, BatchNormTrain, batch_norm
from foreplan.ops.norm.rows import LayerNorm, group_norm, layer_norm, rms_norm
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import broadcast_to, reshape


@translates("BatchNormalization")
def _batch_norm(n: OnnxNode) -> Result:
    epsilon, momentum = n.number("epsilon", 1e-5), n.number("momentum", 0.9)
    if n.opset < 9 and not n.integer("spatial", 1):
        raise n.unsupported("it has statistics for each pixel (spatial=0); export the model for opset 9 or later")
    x, scale, bias, mean, variance = (n.value(i) for i in range(5))
    outputs = [i for i in range(1, n.output_count) if n.wants(i)]
    training = bool(n.integer("training_mode", 0)) if n.opset >= 14 else bool(outputs) and n.opset >= 7
    if n.opset < 7:
        training = not n.integer("is_test", 0) and bool(outputs)
    if not training:
        if n.taken is None:
            return batch_norm(n.b, x, scale, bias, mean, variance, epsilon=epsilon, momentum=momentum)
        return n.b.apply(BatchNorm(epsilon, momentum, frozen=True), x, scale, bias, mean, variance)
    if any(i > 2 for i in outputs):
        raise n.unsupported("its saved statistics are used; export the model in inference mode")
    y, batch_mean, batch_variance = n.b.node(BatchNormTrain(epsilon), x, scale, bias)
    results: list[Value] = [y]
    for running, current in ((mean, batch_mean), (variance, batch_variance)):
        new = elementwise(n.b, lambda old, new: old * momentum + new * (1.0 - momentum), running, current)
        results.append(new)
        if running.kind is Kind.BUFFER:
            n.updates[running] = new
    return results


@translates("InstanceNormalization")
def _instance_norm(n: OnnxNode) -> Operand:
    x = n.value(0)
    return group_norm(n.b, x, x.shape[1], n.value(1), n.value(2), epsilon=n.number("epsilon", 1e-5))


@translates("GroupNormalization")
def _group_norm(n: OnnxNode) -> Operand:
    x, groups = n.value(0), n.integer("num_groups")
    channels = x.shape[1]

    def a_channel(index: int) -> Value:
        vector = n.value(index)
        if n.opset >= 21 or vector.shape == (channels,):
            return vector
        # Before opset 21 there is one entry for each group.
        spread = broadcast_to(n.b, reshape(n.b, vector, (groups, 1)), (groups, channels // groups))
        return reshape(n.b, spread, (channels,))

    return group_norm(n.b, x, groups, a_channel(1), a_channel(2), epsilon=n.number("epsilon", 1e-5))


@translates("LayerNormalization")
def _layer_norm(n: OnnxNode) -> Result:
    x = n.value(0)
    axis, epsilon = n.axis(n.integer("axis", -1), len(x.shape)), n.number("epsilon", 1e-5)
    scale, bias = (n.value(i) if n.has(i) else None for i in (1, 2))
    if not (n.wants(1) or n.wants(2)):
        return layer_norm(n.b, x, scale, bias, axis=axis, epsilon=epsilon)
    parameters = [broadcast_to(n.b, v, x.shape[axis:]) for v in (scale, bias) if v is not None]
    y, *statistics = n.b.node(LayerNorm(axis, epsilon), x, *parameters)
    kept = (*x.shape[:axis], *(1,) * (len(x.shape) - axis))
    return [y, *(reshape(n.b, value, kept) for value in statistics)]


@translates("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_norm(n: OnnxNode) -> Operand:
    x = n.value(0)
    axis = n.axis(n.integer("axis", -1), len(x.shape))
    scale = n.value(1) if n.has(1) else None
    return rms_norm(n.b, x, scale, axis=axis, epsilon=n.number("epsilon", 1e-5))


@translates("MeanVarianceNormalization")
def _mean_variance(n: OnnxNode) -> Operand:
    x = n.value(0)
    axes = n.axes(n.integers("axes", [0, 2, 3]), len(x.shape))
    centred = elementwise(n.b, lambda x, m: x - m, x, reduce(n.b, "mean", x, axes, keepdims=True))
    squares = elementwise(n.b, lambda c: c * c, centred)
    variance = reduce(n.b, "mean", squares, axes, keepdims=True)
    return elementwise(n.b, lambda c, v: c / (sqrt(v) + 1e-9), centred, variance)
