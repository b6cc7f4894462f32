"""What several tests of λ-skips share."""

import pytest

from rankwise.skips import threshold


@pytest.fixture
def coarse_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that do not look at the thresholds of stacks: two forward passes in place of some twenty."""
    monkeypatch.setattr(threshold, "GRID", (0.0, 1.0))
    monkeypatch.setattr(threshold, "PARTS", 1)
