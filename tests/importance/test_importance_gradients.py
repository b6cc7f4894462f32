"""Gradients of gates against difference quotients, and curvature against its definition."""

from functools import partial

import numpy as np
import pytest
import torch
from importance_cases import encoder, ids, language_model, measure, run_scaled
from torch import nn
from torch.nn import functional as F

from rankwise.importance import ImportanceSettings

STEP = 1e-5
"""Step of central difference quotients in float64: errors are of order STEP² = 1e-10 and eps/STEP = 2e-11."""

FIVE_ERRORS = 5 * (2 / (100 * 3)) ** 0.5
"""The square of a near-normal sum spreads by √2 of its mean; 100 probes of three sequences each."""


def nats(model, given, gate, **where):
    """Return the sum of nats over next tokens per sequence."""
    logits = run_scaled(model, given, gate, **where).logits[:, :-1]
    lost = F.cross_entropy(logits.flatten(0, 1), given["input_ids"][:, 1:].flatten(), reduction="none")
    return lost.view(logits.shape[:2]).sum(1).detach()


def slope(of):
    return (of(1 + STEP) - of(1 - STEP)) / (2 * STEP)


@pytest.fixture(scope="module")
def causal():
    model, given = language_model(), {"input_ids": ids()}
    return model, given, measure(model, [given], ImportanceSettings(exact=False, probes=100, tolerance=None))


def test_gradients_are_difference_quotients():
    model, given = language_model(), {"input_ids": ids()}
    importance = measure(model, [given], ImportanceSettings(exact=False, probes=0, tolerance=None))
    tokens = given["input_ids"][:, 1:].numel()
    assert importance.counted == tokens
    for site in importance.sites:
        for head in range(4):
            rows = slope(partial(nats, model, given, site=site.site, head=head)).numpy()
            # without projections, the curvature is half of the empirical Fisher information
            gradient = site.curvature[head] - site.estimate[head]
            assert gradient == pytest.approx(rows.sum() / tokens, abs=1e-8)
            assert site.curvature[head] == pytest.approx(0.5 * np.square(rows).sum() / tokens, abs=1e-7)


def test_gradients_of_blocks_are_difference_quotients(causal):
    model, given, importance = causal
    assert [block.site for block in importance.blocks] == ["transformer.h.0", "transformer.h.1"]
    for block in importance.blocks:
        rows = slope(partial(nats, model, given, block=block.site)).numpy()
        gradient = block.curvature - block.estimate
        assert gradient == pytest.approx(rows.sum() / importance.counted, abs=1e-8)


def test_curvature_is_half_the_gauss_newton_diagonal_of_a_layer_shared_as_gates_per_token_have_it(causal):
    """The heads of a layer share the sum of their curvatures, in proportion to sums over gates per token."""
    model, given, importance = causal
    shares = model(**given).logits[:, :-1].softmax(-1).detach()

    def curvature(gate, **where):
        jacobian = slope(lambda step: run_scaled(model, given, gate(step), **where).logits.detach())[:, :-1]
        mean = (shares * jacobian).sum(-1, keepdim=True)
        return 0.5 * float((shares * (jacobian - mean).square()).sum()) / importance.counted

    def of_token(token):
        return lambda step: torch.where(torch.arange(10) == token, step, 1.0)[:, None]

    for site in importance.sites[1:]:
        heads = [{"site": site.site, "head": head} for head in range(4)]
        whole = sum(curvature(lambda step: step, **head) for head in heads)
        tokens = np.array([sum(curvature(of_token(t), **head) for t in range(10)) for head in heads])
        wanted = tokens * whole / tokens.sum()
        assert site.curvature == pytest.approx(wanted, rel=FIVE_ERRORS / 2)  # the sum of four heads


def test_curvature_of_states_is_the_squared_change():
    model, given = encoder(), {"input_ids": ids()}
    importance = measure(model, [given], ImportanceSettings(exact=False, probes=100, tolerance=None))
    whole = model(**given)[0].detach()
    assert importance.loss == "relative squared change of the output"
    for site in importance.sites:
        assert (site.estimate == site.curvature).all()  # the gradient is 0
        wanted = []
        for head in range(4):
            run = partial(run_scaled, model, given, site=site.site, head=head)
            jacobian = slope(lambda gate, run=run: run(gate)[0].detach())
            shares = jacobian.square().sum((1, 2)) / whole.square().sum((1, 2))
            wanted.append(float(shares.mean()))
        assert site.curvature.sum() == pytest.approx(sum(wanted), rel=FIVE_ERRORS)


def test_estimates_do_not_depend_on_the_split_into_batches():
    model, tokens = language_model(), ids()
    settings = ImportanceSettings(probes=0, exact=True, tolerance=None)
    together = measure(model, [{"input_ids": tokens}], settings)
    apart = measure(model, ({"input_ids": row[None]} for row in tokens.flip(0)), settings)
    for one, other in zip(together.sites, apart.sites, strict=True):
        for name in ("curvature", "estimate"):
            # sums of 30 numbers in another order
            wanted = getattr(one, name)
            assert getattr(other, name) == pytest.approx(wanted, rel=1e-10, abs=1e-13)
        assert other.exact == pytest.approx(one.exact, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize(("loss", "part"), [("auto", ""), ("output", ""), ("output", "transformer")])
def test_padding_does_not_change_importance(loss, part):
    model, tokens = language_model().get_submodule(part), ids()
    mask = torch.ones(3, 14, dtype=torch.long)
    mask[:, 10:] = 0
    padded = {"input_ids": F.pad(tokens, (0, 4), value=2), "attention_mask": mask}
    settings = ImportanceSettings(probes=0, exact=True, tolerance=None, loss=loss)
    plain = measure(model, [{"input_ids": tokens}], settings)
    other = measure(model, [padded], settings)
    assert other.counted == plain.counted
    for one, two in zip(plain.sites, other.sites, strict=True):
        assert two.estimate == pytest.approx(one.estimate, rel=1e-9, abs=1e-12, nan_ok=loss != "auto")
        assert two.exact == pytest.approx(one.exact, rel=1e-9, abs=1e-12)


def test_bfloat16_is_within_its_rounding_error():
    model, given = language_model(), {"input_ids": ids()}
    settings = ImportanceSettings(exact=False, probes=0, tolerance=None)
    exact = measure(model, [given], settings)
    half = measure(model.bfloat16(), [given], settings)
    one = np.concatenate([site.curvature for site in exact.sites])
    two = np.concatenate([site.curvature for site in half.sites])
    # bfloat16 keeps 8 bits: 2^-8 each of some 20 roundings on the way through two blocks and back
    assert np.abs(two - one).max() <= 20 * 2**-8 * one.max()


class Encoder(nn.Module):
    """Two layers over states (T, B, C), or (B, T, C) with the same weights; inputs and outputs (B, T, C)."""

    def __init__(self, batch_first):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.axes = 0, int(not batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x.transpose(*self.axes)).transpose(*self.axes)


def test_gates_of_blocks_follow_a_batch_axis_of_1():
    states = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    settings = ImportanceSettings(
        exact=False, loss=lambda output, batch: output.sin().sum((1, 2)), tolerance=None
    )
    first, second = (measure(Encoder(axis).eval().double(), [states], settings) for axis in (True, False))
    assert len(first.blocks) == 2
    for one, other in zip(first.blocks, second.blocks, strict=True):
        for name in ("curvature", "estimate"):  # squares per sequence; one gate would add sequences first
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-10)
