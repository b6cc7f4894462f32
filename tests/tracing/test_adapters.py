"""State-space layers of transformers: every mixer and state, exactly, with padding and caches known."""

import contextlib
import io
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from experiments.families import PAGE
from experiments.guessed_inputs import fed
from experiments.state_space_checks import check_state_space
from experiments.state_space_models import STATE_SPACE, tiny
from experiments.tiny_architectures import builds
from torch import nn

import rankwise as rw
from rankwise.tracing.adapters import adapter_of
from rankwise.tracing.adapters.base import NoOperatorAdapter
from rankwise.tracing.module_calls import ModuleCall

EPS32 = torch.finfo(torch.float32).eps
every_family = pytest.mark.parametrize("name", list(STATE_SPACE))


def batch(padded=False, tokens=12):
    torch.manual_seed(1)
    given = {"input_ids": torch.randint(5, 60, (2, tokens))}
    if padded:
        mask = torch.ones(2, tokens, dtype=torch.long)
        mask[0, :4] = mask[1, 9:] = 0
        given["attention_mask"] = mask
    return given


@torch.no_grad()
def captured(model, given, **settings):
    with rw.capture(model, **settings) as trace:
        output = model(**given)
    return trace, output


class Seen(NamedTuple):
    """A capture with values, and outputs of each state-space module and of the model."""

    trace: rw.Trace
    gave: dict
    alone: torch.Tensor
    watched: torch.Tensor

    @property
    def sites(self):
        return [site for site in self.trace.mixers if site.kind != "softmax"]


@cache
def seen(name, padded):
    return look(tiny(name), batch(padded))


@torch.no_grad()
def look(model, given):
    alone, gave = model(**given)[0], {}

    def listen(name):
        return lambda module, args, output: gave.update({name: output})

    handles = [module.register_forward_hook(listen(at)) for at, module in model.named_modules()]
    trace, watched = captured(model, given, values=True)
    for handle in handles:
        handle.remove()
    return Seen(trace, gave, alone, watched[0])


@every_family
def test_every_mixer_and_state_is_seen(name):
    family, trace = STATE_SPACE[name], seen(name, padded=False).trace
    assert [site.kind for site in trace.mixers] == list(family.kinds)
    assert [state.layer for state in trace.states] == list(range(family.states))
    assert trace.uncaptured == []
    assert trace.notes == []
    assert {site.layer for site in trace.mixers} == set(range(family.states - 1))


@every_family
@pytest.mark.parametrize("padded", [False, True])
def test_the_computation_is_left_alone(name, padded):
    one = seen(name, padded)
    assert torch.equal(one.alone, one.watched)


@every_family
def test_training_is_left_alone(name):
    model, given = tiny(name).train(), batch(padded=True)
    torch.manual_seed(5)
    alone = model(**given)[0]
    torch.manual_seed(5)
    with rw.capture(model, values=True):
        watched = model(**given)[0]
    assert torch.equal(alone, watched)


@every_family
@pytest.mark.parametrize("padded", [False, True])
def test_the_operator_reproduces_the_layer(name, padded):
    """M V, D-term, gate, norm and projection together are the output of the module."""
    one = seen(name, padded)
    assert len(one.sites) == sum(kind != "softmax" for kind in STATE_SPACE[name].kinds)
    for site in one.sites:
        wanted = one.gave[site.name]
        for operator in (site.operator, rw.operators.DenseMixing(site.operator.dense(torch.float64))):
            mixed = (operator @ site.values.double()).float()
            if site.apply_output is None:
                got, wanted = mixed, site.output
            else:
                with torch.no_grad():
                    got = site.apply_output(mixed)
            # two sums of ≤ 12·4 terms, then of ≤ 64 in the projection: 4·(48 + 64) roundings of its size
            assert (got - wanted).abs().max() <= 450 * EPS32 * max(1.0, float(wanted.abs().max()))


@every_family
def test_padding_is_reported(name):
    given, trace = batch(padded=True), seen(name, padded=True).trace
    for site in trace.mixers:
        assert torch.equal(site.valid_tokens, given["attention_mask"].bool())
        assert torch.equal(site.valid_sources, given["attention_mask"].bool())
        assert site.sequences == 2
        assert not site.cross
    assert all(torch.equal(state.mask, given["attention_mask"].bool()) for state in trace.states)


@every_family
def test_padding_changes_no_entry_of_real_tokens(name):
    """Left padding, masked, leaves the operator among real tokens as it is without it."""
    if not STATE_SPACE[name].masks_padding:
        first = seen(name, padded=True).sites[0].operator.dense()
        assert bool((first[0, :, 5, 3] != 0).any())  # the model itself lets real tokens see padding
        return
    alone, _ = captured(tiny(name), {"input_ids": batch()["input_ids"][:1, 4:]})
    padded = seen(name, padded=True).trace
    for one, other in zip(alone.mixers, padded.mixers, strict=True):
        if one.kind != "softmax":
            part = other.operator[:1].dense()[..., 4:, 4:]
            scale = max(1.0, float(one.operator.dense().abs().max()))
            # three layers of ≤ 64 terms each, in another order of summation
            assert (part - one.operator.dense()).abs().max() <= 1000 * EPS32 * scale


@every_family
def test_one_token_and_one_sequence(name):
    trace, _ = captured(tiny(name), {"input_ids": torch.tensor([[7]])})
    assert all(site.operator.shape[-2:] == (1, 1) for site in trace.mixers)


@every_family
def test_a_prefill_is_read_and_a_step_from_a_cache_is_not(name):
    model, given = tiny(name), batch()
    plain = seen(name, padded=False).trace  # which makes a cache of its own, or none
    given |= {"use_cache": True}
    if name == "RecurrentGemma":  # which keeps its states in itself, and gives no cache back
        given["past_key_values"] = transformers.DynamicCache(config=model.config)
    trace, output = captured(model, given)
    assert [site.kind for site in trace.mixers] == list(STATE_SPACE[name].kinds)
    for one, other in zip(plain.mixers, trace.mixers, strict=True):
        assert torch.equal(one.operator.dense(), other.operator.dense())
    key = "cache_params" if "cache_params" in output else "past_key_values"
    cache = given.get("past_key_values", output.get(key))
    step = {"input_ids": torch.tensor([[3], [4]]), "use_cache": True, key: cache}
    if "softmax" in STATE_SPACE[name].kinds:
        trace, _ = captured(model, step)
        assert all(site.kind == "softmax" for site in trace.mixers)
        reasons = [module.reason for module in trace.uncaptured]
    else:
        with pytest.raises(rw.RankwiseError, match="it went on from a cache that holds earlier tokens"):
            captured(model, step)
        reasons = ["it went on from a cache"]
    assert reasons
    assert all("it went on from a cache" in reason for reason in reasons)


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2"])
def test_gradients_still_flow_and_nothing_captured_holds_a_graph(name):
    model, given = tiny(name), batch()
    with rw.capture(model, values=True) as trace:
        model(**given)[0].square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    site = trace.mixers[0]
    assert not site.operator.dense().requires_grad
    assert not site.values.requires_grad


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2", "Falcon-Mamba"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_precisions(name, dtype):
    one = look(tiny(name).to(dtype), batch(padded=True))
    assert torch.equal(one.alone, one.watched)
    # a few roundings on the way; float64 models of transformers compute the scan in float32
    slack = 8 * 2**-8 if dtype == torch.bfloat16 else 450 * EPS32
    for site in one.sites:
        wanted = one.gave[site.name].double()
        with torch.no_grad():
            got = site.apply_output(site.operator @ site.values)
        assert (got.double() - wanted).abs().max() <= slack * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2", "Jamba"])
def test_autocast(name):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one = look(tiny(name), batch(padded=True))
        assert torch.equal(one.alone, one.watched)
        for site in one.sites:
            wanted = one.gave[site.name].float()
            with torch.no_grad():
                got = site.apply_output(site.operator @ site.values).float()
            # bfloat16 has 8 bits: a few roundings to it on the way
            assert (got - wanted).abs().max() <= 8 * 2**-8 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2", "Zamba2"])
def test_the_prefill_of_generated_text_is_read_and_a_note_lists_the_steps(name):
    model = tiny(name, head="ForCausalLM")
    with torch.no_grad():
        alone = model.generate(**batch(), max_new_tokens=4, do_sample=False)
        with rw.capture(model) as trace:
            watched = model.generate(**batch(), max_new_tokens=4, do_sample=False)
    assert torch.equal(alone, watched)
    assert [site.forward_pass for site in trace.mixers if site.kind != "softmax"] == [0] * sum(
        kind != "softmax" for kind in STATE_SPACE[name].kinds
    )
    assert [note for note in trace.notes if "other calls of a mixer that was captured were left out" in note]
    assert trace.uncaptured == []


def test_a_position_of_zero_resets_the_rg_lru():
    given = batch() | {"position_ids": torch.arange(12)[None] % 5}
    (site,) = look(tiny("RecurrentGemma"), given).sites
    dense = site.operator.dense()
    assert bool((dense[..., 5:, :5] == 0).all())
    assert bool((dense[..., 4, 3] != 0).any())
    # two sums of ≤ 12 terms
    assert (site.operator @ site.values - site.output).abs().max() <= 100 * EPS32 * site.output.abs().max()


def test_the_rg_lru_is_read_wherever_its_state_is_empty():
    """A first token of position 12 resets nothing; without a state there is nothing to reset."""
    given = batch() | {"position_ids": torch.arange(12)[None] + 12, "use_cache": True}
    assert len(look(tiny("RecurrentGemma"), given).sites) == 1


def test_packed_rows_are_not_read():
    """transformers refuses them itself without a kernel, so the adapter is asked alone."""
    mixer, x = tiny("Mamba-2").layers[0].mixer, torch.randn(2, 12, 32)
    adapter, packed = adapter_of(mixer), torch.zeros(2, 12, dtype=torch.int32)
    assert "a row holds several sequences" in adapter.why_not(
        ModuleCall("mixer", mixer, (x,), {"seq_idx": packed})
    )
    assert adapter.why_not(ModuleCall("mixer", mixer, (x,), {"seq_idx": None})) is None


def test_the_page_in_the_docs_lists_every_family():
    text = PAGE.read_text()
    for name in STATE_SPACE:
        rows = [row for row in text.splitlines() if row.startswith(f"| {name} |")]
        assert len(rows) == 1, name
        assert rows[0].endswith("| yes |")


def test_the_check_of_the_page_fails_for_an_error(monkeypatch):
    row = check_state_space("Mamba")
    assert row.complete
    assert row.identical
    assert row.mixer_error < 450 * EPS32
    assert row.path_error < 1000 * EPS32
    monkeypatch.setitem(STATE_SPACE, "Mamba", replace(STATE_SPACE["Mamba"], states=4))
    assert not row.complete
    assert row.cells[2:4] == ("2 of 2", "3 of 4")


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2"])
def test_an_audit_from_end_to_end(name):
    audit = rw.audit(tiny(name), [batch(), batch(padded=True)])
    assert {record.kind for record in audit.heads} == set(STATE_SPACE[name].kinds)
    assert {layer.layer for layer in audit.layers} == {0, 1, 2}
    for record in audit.heads:
        assert 1 <= record.effective_rank <= 12
        assert record.mask == "causal"


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("mra", "multi-resolution attention: scores are exact in a few blocks"),
        ("deformable_detr", "deformable attention: each query reads its values at a few places"),
        ("reformer", "hashed attention: tokens are sorted by random hashes"),
        ("yoso", "its weights are chances that hashes"),
        ("xlstm", "the memory of an mLSTM: products of queries and keys that decay"),
        ("groupvit", "each of its tokens is given to one group alone"),
    ],
)
@torch.no_grad()
def test_layers_without_an_adapter_are_described(model_type, what):
    _, model = next(builds(model_type))
    batch, error = fed(model)
    assert error is None
    with suppress(rw.RankwiseError), rw.capture(model) as trace:  # an error if the model has no other mixer
        model(**batch)
    assert any(one.reason.startswith(what) for one in trace.uncaptured)


def test_a_class_of_the_same_name_elsewhere_is_not_taken_for_it():
    assert not NoOperatorAdapter().reads(type("MraSelfAttention", (nn.Module,), {})())


HOW_TO = (Path(__file__).parents[2] / "docs/how-to/adapters.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", HOW_TO, re.DOTALL)


@pytest.mark.parametrize("at", range(2))
def test_an_example_prints_the_output_on_the_page(at):
    code, wanted = EXAMPLES[at]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "adapters.md", "exec"), {"__name__": "example"})
    assert printed.getvalue() == wanted


def test_the_page_has_these_examples_only():
    assert len(EXAMPLES) == HOW_TO.count("```python") == 2
