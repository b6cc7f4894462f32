"""Size of pages: the chart library and the data per head."""

import hashlib
from importlib import resources

import numpy as np
import pytest
from tests.support import documents, records

from rankwise.auditing import AttentionMap
from rankwise.report.page import CHART_FILE, chart_script

CHART_VERSION = "4.1.1"
CHART_SHA256 = "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
"""SHA-256 digest of the file in this version of the npm package `plotly.js-cartesian-dist-min`."""


def test_the_chart_library_is_the_published_file_with_its_license() -> None:
    from plotly.offline import get_plotlyjs_version

    vendor = resources.files("rankwise.report") / "vendor"
    content, license_text = (vendor / CHART_FILE).read_bytes(), (vendor / "plotly-LICENSE.txt").read_text()
    assert hashlib.sha256(content).hexdigest() == CHART_SHA256
    assert f"v{CHART_VERSION}" in content[:200].decode()
    assert get_plotlyjs_version().split(".")[0] == CHART_VERSION.split(".")[0]
    assert "MIT" in license_text
    assert "Plotly" in license_text


def test_a_page_is_smaller_than_two_megabytes() -> None:
    assert len(documents.page(records.encoder()).encode()) < 2_000_000
    assert len(chart_script()) < 1_600_000


def test_maps_are_omitted_if_the_page_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.report.head_details.MAP_BYTES", 20_000)
    noise = np.random.default_rng(0).uniform(0, 1, (64, 64)).astype(np.float32)
    picture = AttentionMap.of(noise, tokens=64, sources=64)
    heads = [head.model_copy(update={"attention_map": picture}) for head in records.grid(8, 12)]
    audit = records.encoder().model_copy(update={"heads": heads, "findings": []})
    assert "of 96 attention maps are left out to keep the page small" in documents.page(audit)


def test_two_thousand_heads_take_less_than_one_megabyte() -> None:
    heads = records.grid(20, 100)
    audit = records.encoder().model_copy(update={"heads": heads, "findings": []})
    assert len(documents.page(audit).encode()) - len(chart_script()) < 4_500_000 / 5
    large = records.sized(24, 16)
    assert len(documents.page(large).encode()) - len(chart_script()) < 1_500_000 / 4
