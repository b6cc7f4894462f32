"""What stacks keep, and from which λ on: means over sequences that have something to keep."""

import math
from functools import partial

import pytest
import torch
from experiments.tiny_models import BERT, LLAMA, hugging_face, text_inputs
from torch import nn

from rankwise.measures import token_spread
from rankwise.skips import SkipError, add_lambda_skip, certify_skip
from rankwise.skips.norms import normed, norms_behind, record_norms
from rankwise.skips.probe import find_skip_locations
from rankwise.skips.skip_sums import skip_sums
from rankwise.skips.skips import name_sites
from rankwise.skips.threshold import Both, kept_by, threshold

llama = hugging_face("LlamaModel", **LLAMA)
bert = hugging_face("BertModel", **BERT)
mu = partial(token_spread, normalized=False)
CONSTANT = torch.full((1, 12), 7)


def test_a_sequence_of_equal_tokens_is_left_out() -> None:
    """It has no positions in its embeddings, so all its states are equal: 0 of 0."""
    model, ids = llama(), text_inputs()["input_ids"]
    plain = certify_skip(model, {"input_ids": ids}, target=0.9)
    mixed = certify_skip(model, {"input_ids": torch.cat([CONSTANT, ids])}, target=0.9)
    for name in ("kept", "threshold", "kept_mu", "threshold_mu"):
        assert getattr(mixed.stacks[0], name) == pytest.approx(getattr(plain.stacks[0], name), rel=1e-4)
    assert (plain.stacks[0].left_out, mixed.stacks[0].left_out) == (0, 1)
    assert any("sequences of equal tokens at the start of layers: 1;" in note for note in mixed.notes)
    assert not any("equal tokens" in note for note in plain.notes)


def test_with_no_other_sequence_nothing_is_said() -> None:
    certificate = certify_skip(llama(), {"input_ids": CONSTANT})
    stack = certificate.stacks[0]
    assert (stack.kept, stack.threshold, stack.kept_mu, stack.threshold_mu, stack.left_out) == (None,) * 4 + (
        1,
    )
    assert not any(math.isnan(layer.kept) for layer in certificate.layers)


@pytest.mark.parametrize("build", [llama, bert], ids=["pre-norm", "post-norm"])
def test_both_measures_are_means_of_ratios(build) -> None:
    model, batch = build(), text_inputs()
    sites = name_sites(find_skip_locations(model, batch)[0])
    with record_norms(model, sites) as calls:
        seen = skip_sums(model, batch, sites, {site.name: 1.5 for site in sites})
    first, last = seen[0].residual.double(), seen[-1].total.double()
    share = (mu(last) / last.norm(dim=(-2, -1))) / (mu(first) / first.norm(dim=(-2, -1)))
    end = normed(last, True, 1e-12) if build is bert else last
    (found,) = kept_by(seen, norms_behind(seen, calls)).values()
    assert found.share == pytest.approx(float(share.mean()))
    assert found.mu == pytest.approx(float((mu(end) / mu(first)).mean()))


@pytest.mark.parametrize("target", [0.3, 0.9])
def test_each_measure_has_its_own_threshold(target: float) -> None:
    model, batch = bert(), text_inputs()
    sites = name_sites(find_skip_locations(model, batch)[0])
    with record_norms(model, sites) as calls:
        seen = skip_sums(model, batch, sites, {site.name: 1.0 for site in sites})
    norms = norms_behind(seen, calls)
    (found,) = threshold(model, batch, sites, target, norms).values()
    for at in range(2):
        least = found[at]
        assert least is not None
        if 0 < least < math.inf:
            scales = {site.name: least for site in sites}
            (kept,) = kept_by(skip_sums(model, batch, sites, scales), norms).values()
            assert kept[at] >= target
    assert isinstance(found, Both)


def test_what_is_recommended_keeps_the_target_when_it_is_put_in() -> None:
    model, batch = llama(), text_inputs()
    skips = add_lambda_skip(model, init=0.2)
    (stack,) = certify_skip(model, batch, target=0.9).stacks
    assert stack.kept < 0.9
    assert stack.recommended == stack.threshold > 0.2
    assert float(f"{stack.recommended:g}") == stack.recommended  # as it is printed
    with torch.no_grad():
        for parameter in skips.values():
            parameter.fill_(stack.recommended)
    (stack,) = certify_skip(model, batch, target=0.9).stacks
    assert stack.kept >= 0.9
    assert stack.recommended is None


def _nan(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(iter(model.parameters())).fill_(math.nan)
    return model


def _infinite_mixer(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.layers[1].self_attn.o_proj.weight[0, 0] = math.inf
    return model


@pytest.mark.parametrize(
    ("breaks", "got"),
    [
        (_nan, r"states at 'layers.0.self_attn'.*NaN or infinity in the residual"),
        (_infinite_mixer, r"states at 'layers.1.self_attn'.*NaN or infinity in what the mixer gave"),
    ],
    ids=["embeddings", "mixer"],
)
def test_states_that_are_not_finite(breaks, got: str) -> None:
    model = llama()
    add_lambda_skip(model)
    with pytest.raises(SkipError, match=got):
        certify_skip(breaks(model), text_inputs())
