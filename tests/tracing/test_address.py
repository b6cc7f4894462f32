"""Addresses of heads and calls: their text, their files, and how calls are counted."""

import itertools

import pydantic
import pytest
import torch
from capture_zoo import kind
from torch import nn

from rankwise.tracing import Address, CallId, Intervention, capture

PLACES = {
    "": Address(),
    "decoder": Address("decoder"),
    "decoder layer 0": Address("decoder", 0),
    "decoder layer 2 head 0": Address("decoder", 2, "decoder.2.attention", head=0),
    "decoder.2.attention": Address(site="decoder.2.attention"),
}


@pytest.mark.parametrize("text", PLACES)
def test_an_address_has_a_text(text):
    assert str(PLACES[text]) == (text or "model")


@pytest.mark.parametrize("text", PLACES)
def test_an_address_is_saved_as_a_json_object(text):
    adapter = pydantic.TypeAdapter(Address)
    assert adapter.validate_json(adapter.dump_json(PLACES[text])) == PLACES[text]


@pytest.mark.parametrize("wrong", [{"layer": -1}, {"head": -1}, {"call": -1}, {"cross": True}])
def test_a_wrong_address_is_not_read(wrong):
    with pytest.raises(pydantic.ValidationError):
        pydantic.TypeAdapter(Address).validate_python(wrong)


def test_open_addresses_sort_before_those_inside_them():
    inside = [Address("decoder", *numbers) for numbers in itertools.product((0, 1), "ab", (0, 1), (0, 1))]
    places = [Address(), Address("decoder"), *inside]
    assert all(first.sort_key < second.sort_key for first, second in itertools.pairwise(places))
    assert [place.at(None) for place in inside[::2]] == [place.at(None) for place in inside[1::2]]


def run_three_times(self, x, other):
    """Attend to the tokens, to other tokens, and to the tokens again."""
    for given in (None, other, None):
        keys = x if given is None else given
        x = x + self.attention(x, keys, keys, need_weights=False)[0]
    return x


def run(self, x, other):
    for block in self.blocks:
        x = block(x, other)
    return x


Block = kind(run_three_times, attention=lambda: nn.MultiheadAttention(8, 2, batch_first=True))
Blocks = kind(run, blocks=lambda: nn.ModuleList([Block(), Block()]))


def test_calls_of_a_module_are_counted_in_its_layer_and_in_the_forward_pass():
    model, seen = Blocks().eval(), []

    class See(Intervention):
        def on_heads(self, heads):
            seen.append(heads.call_id)

    x, other = torch.randn(1, 5, 8), torch.randn(1, 3, 8)
    with capture(model, intervention=See()) as trace:
        model(x, other)
        model(x, other)
    assert [(site.forward_pass, site.layer, site.call, site.cross) for site in trace.mixers] == [
        (forward, layer, call, call == 1) for forward in (0, 1) for layer in (0, 1) for call in (0, 1, 2)
    ]
    assert [site.call_id for site in trace.mixers] == seen
    assert seen[:6] == [CallId(f"blocks.{at}.attention", call) for at in (0, 1) for call in (0, 1, 2)]
    assert trace.mixers[4].address(1) == Address("blocks", 1, "blocks.1.attention", 1, 1)


def test_a_module_shared_by_layers_counts_anew_in_each_layer():
    model = Blocks().eval()
    model.blocks[1].attention = model.blocks[0].attention
    with capture(model) as trace:
        model(torch.randn(1, 5, 8), torch.randn(1, 3, 8))
    assert [(site.layer, site.call) for site in trace.mixers] == [
        (layer, call) for layer in (0, 1) for call in (0, 1, 2)
    ]
    assert [site.call_id.index for site in trace.mixers] == list(range(6))


def test_a_stack_that_runs_again_counts_anew_in_its_layers_but_not_in_the_model():
    model = kind(
        lambda self, x, other: self.encoder(x, other) + self.encoder(other, x).mean(1, keepdim=True),
        encoder=Blocks,
    )().eval()
    with capture(model) as trace:
        model(torch.randn(1, 5, 8), torch.randn(1, 3, 8))
    places = [(site.forward_pass, site.layer, site.call) for site in trace.mixers]
    assert places == [(forward, layer, call) for forward in (0, 1) for layer in (0, 1) for call in (0, 1, 2)]
    first = [site.call_id.index for site in trace.mixers if site.name == "encoder.blocks.0.attention"]
    assert first == list(range(6))
