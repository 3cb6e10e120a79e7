"""What changed between two plans whose sizes are known."""

from __future__ import annotations

import json

from foreplan.views.diff import diff
from tests.views.small import KIB, small


def test_a_plan_and_itself():
    d = diff(*small(), *small())
    assert all(c.delta == 0 for c in (*d.sizes, *d.counts, *d.categories))
    assert d.buffers == ()
    assert "the same buffers are alive at both peaks" in str(d)


def test_a_grown_activation():
    d = diff(*small(), *small(scale=3))
    sizes = {c.name: (c.before, c.after, c.delta) for c in d.sizes}
    assert sizes["arena_bytes"] == (17 * KIB, 33 * KIB, 16 * KIB)
    assert sizes["persistent_bytes"][2] == sizes["workspace_bytes"][2] == 0
    assert sizes["order_lower_bound_bytes"] == (None, None, 0)
    assert {c.name: c.delta for c in d.categories if c.delta} == {"activations": 16 * KIB}
    assert [(c.name, c.before, c.after) for c in d.buffers] == [("a", 8 * KIB, 24 * KIB)]
    text = str(d)
    assert "17.00 KiB ->    33.00 KiB" in text and "+16.00 KiB" in text and "of another size: 1 buffers" in text


def test_what_appeared_and_what_vanished():
    d = diff(*small(), *small(evil=True))
    assert {c.name: (c.before, c.after) for c in d.buffers if c.before is None} == {
        "</script><script>alert(1)</script>": (None, 8 * KIB)
    }
    assert [c.name for c in d.buffers if c.after is None] == ["a"]
    assert "only before, at its peak: 1 buffers, -8.00 KiB" in str(d)


def test_as_json():
    data = json.loads(json.dumps(diff(*small(), *small(scale=2)).as_json()))
    assert data["bytes"]["arena_bytes"] == {"before": 17408, "after": 25600, "delta": 8192}
    assert data["counts"]["flops"] == {"before": 310, "after": 310, "delta": 0}
    assert data["counts"]["recomputed"]["after"] == 0
    assert data["peak"]["after"] == {"step": 0, "action": "forward"}
    assert data["buffers"]["a"]["delta"] == 8192
