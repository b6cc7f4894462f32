"""Modules with a method `mixing_operator`, and readers that must not stop a model."""

import pytest
import torch
from capture_zoo import fused, kind
from torch import nn

import rankwise as rw
from rankwise.errors import CaptureError
from rankwise.operators import DiagonalMixing, ToeplitzMixing
from rankwise.tracing.readers import OperatorReader, reader_of


class Convolution(nn.Module):
    """A long convolution over tokens that returns its operator: one kernel per channel."""

    def __init__(self, width=6, tokens=9, dropout=0.0):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(width, tokens))
        self.inner, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)
        self.asked = 0

    def mixing_operator(self, hidden_states, scale=1.0):
        self.asked += 1
        self.inner(hidden_states)  # the hooks of capture must not take this for a call of the model
        self.dropout(hidden_states)
        kernel = scale * self.kernel[:, : hidden_states.shape[1]]
        return ToeplitzMixing(kernel.expand(hidden_states.shape[0], -1, -1))

    def mixing_values(self, hidden_states, scale=1.0):
        return self.inner(hidden_states).transpose(1, 2)[..., None]

    def forward(self, hidden_states, scale=1.0):
        tokens = hidden_states.shape[1]
        lags = torch.arange(tokens)[:, None] - torch.arange(tokens)
        matrix = torch.where(lags >= 0, self.kernel[:, lags.clamp(min=0)], 0.0) * scale
        mixed = torch.einsum("dts,bsd->btd", matrix, self.inner(hidden_states))
        return self.dropout(mixed)


def stack(make=Convolution, depth=3):
    torch.manual_seed(0)
    block = kind(lambda self, x: x + self.mixer(x, scale=0.5), mixer=make)
    return nn.Sequential(*(block() for _ in range(depth)))


def tokens():
    return torch.randn(2, 7, 6)


def captured(model, **settings):
    with torch.no_grad(), rw.capture(model, **settings) as trace:
        model(tokens())
    return trace


def test_a_module_returns_its_operator():
    trace = captured(model := stack(), values=True)
    assert [(site.name, site.layer, site.kind) for site in trace.mixers] == [
        (f"{at}.mixer", at, "toeplitz") for at in range(3)
    ]
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]
    assert trace.uncaptured == []
    for site, block, state, after in zip(trace.mixers, model, trace.states, trace.states[1:], strict=False):
        mixed = (site.operator @ site.values)[..., 0].transpose(1, 2)
        # seven terms, by way of a transform of 16: 1e-6 of sizes below 10
        torch.testing.assert_close(state.tokens + mixed, after.tokens, rtol=0, atol=1e-5)
        assert block.mixer.asked == 1


def test_values_are_computed_only_if_requested():
    class Strict(Convolution):
        def mixing_values(self, hidden_states, scale=1.0):
            raise AssertionError("values were not requested")

    trace = captured(stack(Strict))
    assert len(trace.mixers) == 3
    assert trace.mixers[0].values is None


def test_reading_an_operator_draws_no_random_numbers():
    model, x = stack(lambda: Convolution(dropout=0.5)).train(), tokens()
    torch.manual_seed(3)
    alone = model(x)
    torch.manual_seed(3)
    with rw.capture(model):
        assert torch.equal(alone, model(x))


def test_attention_with_a_reader_is_captured_once():
    attention = kind(lambda self, x, scale=1.0: fused(x[:, None], x[:, None], x[:, None])[:, 0])
    attention.mixing_operator = lambda self, x, scale: rw.operators.SoftmaxMixing(x[:, None], x[:, None])
    assert len(captured(stack(attention)).mixers) == 3


def test_only_the_outer_of_two_nested_modules_is_read():
    outer = kind(lambda self, x, scale=1.0: self.inner(x, scale), inner=Convolution)
    outer.mixing_operator = lambda self, x, scale: self.inner.mixing_operator(x, scale)
    trace = captured(model := stack(outer))
    assert [site.name for site in trace.mixers] == ["0.mixer", "1.mixer", "2.mixer"]
    assert model[0].mixer.inner.asked == 1


def test_a_site_of_the_caller_replaces_the_method():
    def operator(module, args, kwargs, output):
        return DiagonalMixing(torch.ones(args[0].shape[0], 1, args[0].shape[1]))

    trace = captured(model := stack(), sites={"1.mixer": operator})
    assert [site.kind for site in trace.mixers] == ["toeplitz", "diagonal", "toeplitz"]
    assert model[1].mixer.asked == 0


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (
            lambda self, x, scale: torch.eye(3),
            r"`mixing_operator` returned Tensor \(3, 3\), expected a Mixing",
        ),
        (lambda self, x, scale: rw.operators.DenseMixing(torch.eye(3)), r"returned DenseMixing \(3, 3\)"),
        (lambda self, x, scale: {}["gone"], r"its operator could not be read \(KeyError: 'gone'\)"),
        (lambda self, x: None, r"its operator could not be read \(TypeError"),
    ],
    ids=["a tensor", "no heads", "an error", "other arguments"],
)
def test_a_module_that_returns_a_wrong_operator_does_not_stop_the_model(made, reason):
    class Wrong(Convolution):
        mixing_operator = made

    model, x = stack(Wrong), tokens()
    model[1].mixer.__class__ = Convolution
    alone = model(x)
    with rw.capture(model) as trace:
        assert torch.equal(model(x), alone)
    assert [site.name for site in trace.mixers] == ["1.mixer"]
    assert [module.name for module in trace.uncaptured] == ["0.mixer", "2.mixer"]
    with pytest.raises(CaptureError, match=reason), rw.capture(model := stack(Wrong)):
        model(x)


def test_a_module_with_a_cache_is_not_called_twice():
    class Cached(Convolution):
        def forward(self, hidden_states, scale=1.0, past_key_values=None):
            return super().forward(hidden_states, scale)

        def mixing_operator(self, hidden_states, scale=1.0, past_key_values=None):
            return super().mixing_operator(hidden_states, scale)

    def forward(self, x, cache=None):
        return x + self.mixer(x, scale=0.5, past_key_values=cache)

    model = kind(forward, mixer=Cached)()
    assert len(captured(model).mixers) == 1
    reason = "it was called with a cache that a second call would change"
    with pytest.raises(CaptureError, match=reason), rw.capture(model):
        model(tokens(), cache=object())


def test_a_call_without_tokens_is_reported():
    with pytest.raises(CaptureError, match="called with no tokens or no sequences"), rw.capture(m := stack()):
        m(torch.randn(2, 0, 6))


def test_a_call_that_raises_leaves_nothing_behind():
    model = stack()
    with rw.capture(model) as trace:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(2, 7, 5))
        model(tokens())
    assert [site.name for site in trace.mixers] == ["0.mixer", "1.mixer", "2.mixer"]


def test_a_class_of_equal_name_in_another_library_has_no_reader():
    assert reader_of(kind(lambda self, x: x, "MambaMixer")()) is None
    assert isinstance(reader_of(Convolution()), OperatorReader)
    assert reader_of(nn.Linear(2, 2)) is None
