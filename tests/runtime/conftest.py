"""What tests of several files run."""

from __future__ import annotations

import pytest

import foreplan as fp
from tests.runtime.micro_batches import compiled
from tests.runtime.test_session import classifier


@pytest.fixture(scope="session")
def halves() -> fp.Compiled:
    """A step over three micro-batches with batch norm, dropout, clipping and state, all at once."""
    return compiled(classifier(batch=4, dropout=0.3), fp.optim.AdamW(1e-2, clip_norm=0.5), accumulate=3)
