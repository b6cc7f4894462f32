"""Attention maps are block averages of the matrices of the chosen heads."""

import numpy as np
import pytest
import torch
from experiments.zoo.transformers import BERT, LLAMA, hugging_face
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.auditing.test_examples import Words
from tests.support import records
from tests.support.documents import audit_document
from tests.support.modules import token_ids
from tests.support.records import diagnose

import rankwise as rw
from rankwise.auditing import AttentionMap, Audit
from rankwise.auditing.attention_maps import block_averages, only_flagged
from rankwise.operators import DenseMixing, IndexedMixing, LinearAttentionMixing, SoftmaxMixing


def by_hand(matrix: torch.Tensor, side: int) -> torch.Tensor:
    """Return block means, computed by loops."""
    tokens, sources = matrix.shape
    rows, columns = min(tokens, side), min(sources, side)
    out = torch.zeros(rows, columns, dtype=matrix.dtype)
    for r in range(rows):
        for c in range(columns):
            own = [t for t in range(tokens) if t * rows // tokens == r]
            read = [s for s in range(sources) if s * columns // sources == c]
            out[r, c] = matrix[own][:, read].mean()
    return out


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 13), st.integers(1, 13), st.integers(1, 6))
def test_a_map_contains_the_means_of_blocks(tokens: int, sources: int, side: int) -> None:
    matrix = torch.randn(tokens, sources, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    picture = block_averages(DenseMixing(matrix), side)
    torch.testing.assert_close(picture, by_hand(matrix, side), rtol=1e-12, atol=1e-14)


def test_a_map_of_products_equals_the_map_of_the_matrix_without_padding() -> None:
    query, key = torch.randn(2, 1, 3, 40, 8, generator=torch.Generator().manual_seed(1)).double()
    real = torch.arange(40) >= 5
    part = IndexedMixing(SoftmaxMixing(query, key, is_causal=True), real, real)
    dense = part.dense()[0]
    for head in range(3):
        torch.testing.assert_close(block_averages(part, 9)[0, head], by_hand(dense[head], 9))


def test_a_map_of_a_hundred_thousand_tokens_needs_no_matrix() -> None:
    query, key = torch.rand(2, 1, 1, 100_000, 4, generator=torch.Generator().manual_seed(2))
    picture = block_averages(LinearAttentionMixing(query, key, normalized=True))[0, 0]
    assert picture.shape == (128, 128)
    # Rows sum to 1 over 100,000 columns: a float32 sum of n terms is off by at most n·2⁻²⁴ of it.
    assert picture.mean() * 100_000 == pytest.approx(1, rel=100_000 * 2**-24)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([0.0, 1e-30, 1.0, 1e30]), st.booleans())
def test_a_map_is_saved_in_half_precision(rows: int, columns: int, size: float, gap: bool) -> None:
    picture = size * np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)
    picture[0, 0] = np.nan if gap else picture[0, 0]
    kept = AttentionMap.of(picture, tokens=rows, sources=columns)
    again = AttentionMap.model_validate_json(kept.model_dump_json()).matrix()
    assert np.isnan(again).sum() == int(gap)
    # float16 has 11 bits; below 2⁻¹⁴ of the largest it has steps of 2⁻²⁴
    np.testing.assert_allclose(again, picture, rtol=2**-11, atol=kept.largest * 2**-24)


@pytest.mark.parametrize(
    "change", [{"values": "AAAA"}, {"values": "é"}, {"rows": 3}, {"rows": 129}, {"largest": None}]
)
def test_a_damaged_map_is_refused(change: dict[str, object]) -> None:
    kept = AttentionMap.of(np.eye(2, dtype=np.float32), tokens=2, sources=2)
    with pytest.raises(ValidationError):
        AttentionMap.model_validate(kept.model_dump() | change)


def test_an_audit_keeps_the_matrices_of_the_first_sequence(tmp_path) -> None:
    model, ids = hugging_face("BertModel", **BERT)(), token_ids()["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    audit = rw.audit(model, [batch, batch], attention_maps="all", tokenizer=Words())
    audit = rw.Audit.load(audit.save(tmp_path / "audit.json"))
    with rw.capture(model) as trace, torch.no_grad():
        model(**batch)
    assert audit.texts == {"input_ids": [f"w{number}" for number in ids[0, :9].tolist()]}
    for head in audit.heads:
        kept = head.attention_map
        assert (kept.tokens, kept.sources, kept.rows, kept.columns) == (9,) * 4
        assert kept.row_tokens == kept.column_tokens == "input_ids"
        matrix = trace.mixers[head.layer].operator[0, head.head].dense()[:9, :9]
        np.testing.assert_allclose(kept.matrix(), matrix, 2**-11, 2**-24)


def test_chosen_heads_have_maps() -> None:
    model = hugging_face("LlamaModel", **LLAMA)()
    audit = rw.audit(model, [token_ids(1)], attention_maps="1:2, 0:0,9:9")
    assert {(h.layer, h.head) for h in audit.heads if h.attention_map} == {(0, 0), (1, 2)}
    assert "no such head to keep the matrix of: 9:9" in audit.provenance.notes
    plain, kept = (rw.audit(model, [token_ids(1)], attention_maps=matrices) for matrices in (None, "flagged"))
    assert all(h.attention_map is None for h in plain.heads)
    flagged = {f.where.head for f in plain.findings if f.where.head is not None}
    assert bool(flagged) == any(h.attention_map for h in kept.heads)


def test_flagged_heads_have_maps_of_all_their_calls() -> None:
    kept = AttentionMap.of(np.eye(2, dtype=np.float32), tokens=2, sources=2)
    places = [records.place(layer, head) for layer in range(2) for head in range(4)]
    heads = [
        records.head(
            stack=at.stack, site=at.site, layer=at.layer, head=at.head, call=call, attention_map=kept
        )
        for at in places
        for call in range(2)
    ]
    found = only_flagged(heads, [records.finding("SINK", where=records.place(1, 2))])
    mapped = [(h.layer, h.head, h.call) for h in found if h.attention_map]
    assert mapped == [(1, 2, 0), (1, 2, 1)]


@pytest.mark.parametrize(("mass", "named"), [(0.5, "[CLS]"), (0.49, ""), (0.02, ""), (float("nan"), "")])
def test_a_peak_is_named_on_the_page_if_it_has_half_of_the_weight(mass: float, named: str) -> None:
    (head,) = records.grid(1, 1, max_token="[CLS]", max_token_mass=mass)
    about = records.provenance()
    audit = Audit(provenance=about, heads=[head], states=[], findings=[])
    peak = audit_document(audit).data["heads"]["max_token"]
    assert peak["words"][peak["of"][0]] == head.named_peak == named


@pytest.mark.parametrize(
    ("token", "sequences", "meaning"),
    [
        ("the first token", 64, "The first token takes 93% of a row on average"),
        ("[SEP]", 60, "[SEP] (in 60 of 64 sequences) takes 93%"),
        ("", 0, "One token takes 93%"),
    ],
)
def test_a_sink_names_its_token_and_the_number_of_sequences(token: str, sequences: int, meaning: str) -> None:
    peak = {"max_token_mass": 0.93, "max_token": token, "max_token_sequences": sequences}
    (found,) = diagnose(records.grid(1, 1, **peak), [], [])
    assert found.meaning.startswith(meaning)
