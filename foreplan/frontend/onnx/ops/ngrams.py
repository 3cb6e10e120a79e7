"""TfIdfVectorizer of integers: how often given n-grams occur in rows of tokens."""

from __future__ import annotations

import numpy as np

from foreplan.frontend.onnx.node import OnnxNode, Operand, translates
from foreplan.frontend.onnx.tensors import from_array
from foreplan.graph import Value, as_dtype
from foreplan.ops.expr import call, where
from foreplan.ops.map import elementwise
from foreplan.ops.matmul import matmul
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape, slice_axis


@translates("TfIdfVectorizer")
def _tf_idf_vectorizer(n: OnnxNode) -> Operand:
    if n.has_attribute("pool_strings"):
        raise n.unsupported("it counts texts; give it the numbers of tokens, and a pool_int64s")
    mode, shape = n.text("mode", ""), n.shape(0)
    if mode not in ("TF", "IDF", "TFIDF"):
        raise n.fail(f"mode must be TF, IDF or TFIDF, and is {mode!r}")
    if not 1 <= len(shape) <= 2:
        raise n.misshapen(f"it takes a row of tokens or several, and got {n.type(0)}")
    indexes = n.integers("ngram_indexes")
    weights = np.asarray(n.numbers("weights", [1.0] * len(indexes)), np.float32)
    if len(weights) != len(indexes) or min(indexes, default=-1) < 0:
        raise n.fail("it needs a place in the result, and a weight if there are any, for each n-gram of the pool")
    rows = reshape(n.b, n.value(0), (1, *shape) if len(shape) == 1 else shape)
    counts = [_counted(n, rows, grams) for grams, _ in _pool(n)]
    found = None
    for count, (_, first) in zip(counts, _pool(n)):
        if count is None:
            continue
        chosen = slice(first, first + count.shape[1])
        places = np.zeros((count.shape[1], max(indexes) + 1), np.float32)
        places[np.arange(count.shape[1]), indexes[chosen]] = 1.0 if mode == "TF" else weights[chosen]
        if mode == "IDF":
            count = elementwise(n.b, lambda c: where(c > 0, 1.0, 0.0), count)
        term = matmul(n.b, count, n.as_value(from_array(f"{n.output_names[0]}.places", places)))
        found = term if found is None else elementwise(n.b, lambda a, b: a + b, found, term)
    if found is None:
        found = n.as_value(from_array(n.output_names[0], np.zeros((rows.shape[0], max(indexes) + 1), np.float32)))
    return reshape(n.b, found, (*shape[:-1], max(indexes) + 1))


def _pool(n: OnnxNode) -> list[tuple[np.ndarray, int]]:
    """For each length, its n-grams as rows, and the number of n-grams before them."""
    pool, starts = np.asarray(n.integers("pool_int64s"), np.int64), n.integers("ngram_counts")
    found, before = [], 0
    for length, (start, end) in enumerate(zip(starts, [*starts[1:], len(pool)]), 1):
        if not 0 <= start <= end <= len(pool) or (end - start) % length:
            raise n.fail(f"ngram_counts {list(starts)} do not divide a pool of {len(pool)} into n-grams of 1, 2, ...")
        grams = pool[start:end].reshape(-1, length)
        found.append((grams, before))
        before += len(grams)
    if before != len(n.integers("ngram_indexes")):
        raise n.fail(f"its pool has {before} n-grams, and ngram_indexes has {len(n.integers('ngram_indexes'))}")
    return found


def _counted(n: OnnxNode, rows: Value, grams: np.ndarray) -> Value | None:
    """How often each n-gram of one length occurs in each row, as float32 [rows, n-grams]; None: it is not counted.

    Up to max_skip_count tokens are skipped between the tokens of an n-gram, as many between any two.
    """
    count, length = grams.shape
    if not count or not n.integer("min_gram_length") <= length <= n.integer("max_gram_length"):
        return None
    batch, tokens = rows.shape
    found = None
    for step in range(1, 2 + (n.integer("max_skip_count") if length > 1 else 0)):
        places = tokens - (length - 1) * step
        if places < 1:
            continue
        hits = None
        for j in range(length):
            at = reshape(n.b, slice_axis(n.b, rows, 1, j * step, places), (batch, 1, places))
            token = from_array(f"{n.output_names[0]}.tokens", grams[:, j].reshape(1, -1, 1).astype(rows.dtype.numpy))
            same = elementwise(
                n.b, lambda a, b: where(call("eq", a, b), 1.0, 0.0), at, n.as_value(token), dtype=as_dtype("float32")
            )
            hits = same if hits is None else elementwise(n.b, lambda a, b: a * b, hits, same)
        assert hits is not None
        term = reduce(n.b, "sum", hits, (2,))
        found = term if found is None else elementwise(n.b, lambda a, b: a + b, found, term)
    return found
