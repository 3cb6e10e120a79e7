"""What is said of a step whose products are in parts."""

from __future__ import annotations

from foreplan.graph import Graph, Kind
from foreplan.passes.tensor.regions import Found
from foreplan.passes.tensor.tokens import Tokens


def note(graph: Graph, found: Found, tokens: Tokens, ranks: int) -> str:
    """What is computed in parts, and what is not."""
    by_tokens = {node.name for region in tokens.regions for node in region.shards}
    count = found.products - len(found.whole)
    weights = [value for value in graph.stored if value.kind in (Kind.PARAMETER, Kind.FROZEN)]
    cut = sum(value.type.size for value in weights if any(value in region.parts for region in found.regions))
    share = f"{cut / sum(value.type.size for value in weights):.0%} of all weights"
    text = f"tensor={ranks}: {count} of {found.products} products are computed in parts, with {share}"
    if found.whole:
        name, why = next(iter(found.whole.items()))
        more = f", and {len(found.whole) - 1} more," if len(found.whole) > 1 else ""
        how = "for its own tokens, with all of its weight" if name in by_tokens else "whole"
        text += f"; every rank computes {name!r}{more} {how}: {why}"
    sums = tokens.sums + len(tokens.whole)
    text += f"; {tokens.sums} of {sums} sums of products give each rank its own tokens alone"
    if tokens.whole:
        name, why = next(iter(tokens.whole.items()))
        text += f", and {name!r} all of them: {why}"
    return text
