"""Labels of heads by attention maps made by hand, and names of heads in other packages."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from experiments.zoo.transformers import GPT, hugging_face
from tests.support import records
from tests.support.modules import token_ids

import rankwise as rw
from rankwise.auditing import AttentionMap
from rankwise.errors import InputError

TEXT = list("abcdefabcdef")
T = len(TEXT)
CAUSAL = np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]


def labels(*maps: np.ndarray, tokens: Sequence[str] = TEXT) -> list[dict[str, object]]:
    """Return the rows of heads with these attention maps."""
    heads = [
        records.head(
            head=at,
            attention_map=AttentionMap.of(
                weights.astype(np.float32), *weights.shape, "input_ids", "input_ids"
            ),
        )
        for at, weights in enumerate(maps)
    ]
    return records.audit(heads).model_copy(update={"texts": {"input_ids": list(tokens)}}).head_labels()


def rows_to(columns: dict[int, int]) -> np.ndarray:
    """Return causal attention in which some rows attend to one column, and others to the first."""
    weights = np.zeros((T, T))
    for row in range(T):
        weights[row, columns.get(row, 0)] = 1
    return weights


def test_heads_made_by_hand_get_their_labels() -> None:
    previous = rows_to({row: row - 1 for row in range(1, T)})
    induction = rows_to({row: row - 5 for row in range(6, T)})  # the token after the same token, 6 before
    decay = 0.4 * np.tril(0.75 ** (np.arange(T)[:, None] - np.arange(T)).clip(0))
    sink = rows_to({})
    rows = labels(previous, induction, decay, sink, CAUSAL)
    assert [row["label"] for row in rows] == ["previous_token", "induction", "positional", "", ""]
    assert rows[0]["previous_token"] == 1
    # Rows 6 to 11 attend to one of 7 to 12 tokens: uniform rows have 1/7, …, 1/12 there.
    uniform = np.mean([1 / (row + 1) for row in range(6, T)])
    assert rows[1]["induction"] == pytest.approx(1 - uniform, abs=1e-12)
    assert rows[2]["positional"] == pytest.approx(1, abs=1e-6)  # weights of one offset are equal
    assert rows[4]["induction"] == pytest.approx(0, abs=1e-3)  # float16


def test_offsets_explain_nothing_of_weights_that_depend_on_the_column_alone() -> None:
    random = np.random.default_rng(0).random((64, 64))
    [row] = labels(random, tokens=["x"] * 64)
    assert 0 <= row["positional"] < 2 * 127 / 64**2  # 127 means of 4,096 independent numbers explain 127/4095
    [row] = labels(np.full((64, 64), 1 / 64), tokens=["x"] * 64)
    assert row["positional"] == 0


def test_induction_needs_a_repeated_token_and_tokens() -> None:
    for tokens in ([str(at) for at in range(T)], ["too", "short"]):
        [row] = labels(CAUSAL, tokens=tokens)
        assert math.isnan(row["induction"])


def test_maps_of_long_sequences_and_no_maps_are_refused() -> None:
    whole = records.encoder()
    with pytest.raises(InputError, match=r"at most 128 tokens, got none.*attention_maps='all'"):
        whole.model_copy(update={"heads": [records.head()]}).head_labels()
    averaged = AttentionMap.of(np.ones((4, 4), np.float32), 8, 8)
    with pytest.raises(InputError, match=r"`Audit\.head_labels`"):
        whole.model_copy(update={"heads": [records.head(attention_map=averaged)]}).head_labels()


@pytest.mark.parametrize(
    ("place", "hook", "path"),
    [
        ({"stack": "layers", "site": "layers.3.self_attn"}, "blocks.3.attn", "layers[3].self_attn"),
        ({"stack": "h", "site": "h.3.attn"}, "blocks.3.attn", "h[3].attn"),
        (
            {"stack": "decoder.block", "site": "decoder.block.3.layer.1.EncDecAttention", "cross": True},
            "decoder.3.cross_attn", "decoder.block[3].layer[1].EncDecAttention",
        ),
        (
            {"stack": "encoder.block", "site": "encoder.block.3.layer.0.SelfAttention"},
            "encoder.3.attn", "encoder.block[3].layer[0].SelfAttention",
        ),
    ],
)  # fmt: skip
def test_names_in_other_packages(place: dict[str, object], hook: str, path: str) -> None:
    head = records.head(layer=3, **place)
    assert head.transformer_lens == f"{hook}.hook_pattern"
    assert head.nnsight == path


def test_paths_lead_to_the_modules_of_a_model() -> None:
    model = hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT)().eval()
    audit = rw.audit(model, [token_ids()], attention_maps="all")
    modules = dict(model.named_modules())
    for row in audit.head_labels():
        assert (
            eval(f"model.{row['nnsight']}", {"model": model})
            is modules[audit.head(row["layer"], row["head"]).site]
        )
        assert 0 <= row["previous_token"] <= 1
    assert len(audit.head_labels()) == len(audit.heads)
    torch.testing.assert_close(
        audit.to_tensor("effective_rank").double().flatten(),
        torch.tensor([head.effective_rank for head in audit.heads], dtype=torch.float64), rtol=1e-6, atol=0,
    )  # fmt: skip
