"""State-space layers of transformers: every mixer and state is captured exactly, with padding and caches."""

from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from capture_zoo import seen, seen_with_outputs
from experiments.coverage.families import check_state_space
from experiments.zoo.any_architecture import find_inputs, tiny_variants
from experiments.zoo.state_space import STATE_SPACE, tiny
from torch import nn

import rankwise as rw
from rankwise.tracing import record_calls
from rankwise.tracing.module_calls import ModuleCall
from rankwise.tracing.readers import reader_of
from rankwise.tracing.readers.base import NoOperatorReader

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


@cache
def traced(name, padded):
    """Return trace and outputs of a family; capture leaves its output unchanged."""
    return seen_with_outputs(tiny(name), **batch(padded))


@torch.no_grad()
def captured(model, given):
    with rw.capture(model) as trace:
        output = model(**given)
    return trace, output


def mixers_without_softmax(trace):
    return [site for site in trace.mixers if site.kind != "softmax"]


def output_error(site, outputs, operator=None):
    """Return the largest difference between the module's output and the output made from M V.

    A given operator is applied in float64.
    """
    with torch.no_grad():
        mixed = site.operator @ site.values if operator is None else operator @ site.values.double()
        mixed = mixed.to(site.values.dtype)
        got = mixed if site.apply_output is None else site.apply_output(mixed)
    expected = site.output if site.apply_output is None else outputs[site.name]
    return float((got.double() - expected.double()).abs().max() / max(1.0, float(expected.abs().max())))


@every_family
def test_a_mixer_is_captured_if_it_is_the_model(name):
    model, site = tiny(name), mixers_without_softmax(traced(name, padded=False)[0])[0]
    with torch.no_grad(), record_calls(model, {site.name}) as calls:
        model(**batch(), use_cache=False)
    call = calls[0]
    with torch.no_grad(), rw.capture(call.module) as trace:
        call.module(*call.args, **call.kwargs)
    assert torch.equal(trace.mixers[0].operator.dense(), site.operator.dense())


@every_family
def test_capture_changes_no_output_in_training(name):
    model, given = tiny(name).train(), batch(padded=True)
    torch.manual_seed(5)
    alone = model(**given)[0]
    torch.manual_seed(5)
    with rw.capture(model, values=True):
        assert torch.equal(alone, model(**given)[0])


@every_family
def test_every_mixer_and_state_is_captured(name):
    """M V, D-term, gate, norm and projection together are the output of the module."""
    family, real = STATE_SPACE[name], batch(padded=True)["attention_mask"].bool()
    for padded in (False, True):
        trace, outputs = traced(name, padded)
        assert [site.kind for site in trace.mixers] == list(family.kinds)
        assert [state.layer for state in trace.states] == list(range(family.states))
        assert trace.uncaptured == []
        assert padded or trace.notes == []
        assert {site.layer for site in trace.mixers} == set(range(family.states - 1))
        for site in mixers_without_softmax(trace):
            for operator in (site.operator, rw.operators.DenseMixing(site.operator.dense(torch.float64))):
                # two sums of ≤ 12·4 terms, then of ≤ 64 in the projection: 4·(48 + 64) roundings of its size
                assert output_error(site, outputs, operator) <= 450 * EPS32
        assert mixers_without_softmax(trace)
    for site in trace.mixers:
        assert torch.equal(site.valid_tokens, real)
        assert torch.equal(site.valid_sources, real)
        assert site.sequences == 2
        assert not site.cross
    assert all(torch.equal(state.mask, real) for state in trace.states)


@every_family
def test_padding_changes_no_entry_of_real_tokens(name):
    padded, _ = traced(name, padded=True)
    if not STATE_SPACE[name].masks_padding:
        first = mixers_without_softmax(padded)[0].operator.dense()
        assert bool((first[0, :, 5, 3] != 0).any())  # the model itself lets real tokens see padding
        return
    alone, _ = captured(tiny(name), {"input_ids": batch()["input_ids"][:1, 4:]})
    for one, other in zip(alone.mixers, padded.mixers, strict=True):
        if one.kind != "softmax":
            part = other.operator[:1].dense()[..., 4:, 4:]
            scale = max(1.0, float(one.operator.dense().abs().max()))
            # three layers of ≤ 64 terms each, in another order of summation
            assert (part - one.operator.dense()).abs().max() <= 1000 * EPS32 * scale


@every_family
def test_one_token_of_one_sequence_is_captured(name):
    trace, _ = captured(tiny(name), {"input_ids": torch.tensor([[7]])})
    assert all(site.operator.shape[-2:] == (1, 1) for site in trace.mixers)


@every_family
def test_a_prefill_is_captured_and_a_step_from_a_cache_is_not(name):
    model, given = tiny(name), batch() | {"use_cache": True}
    plain, _ = traced(name, padded=False)
    if name == "RecurrentGemma":  # it keeps its states in itself, and returns no cache
        given["past_key_values"] = transformers.DynamicCache(config=model.config)
    trace, output = captured(model, given)
    assert [site.kind for site in trace.mixers] == list(STATE_SPACE[name].kinds)
    for one, other in zip(plain.mixers, trace.mixers, strict=True):
        assert torch.equal(one.operator.dense(), other.operator.dense())
    key = "cache_params" if "cache_params" in output else "past_key_values"
    cache = given.get("past_key_values", output.get(key))
    step = {"input_ids": torch.tensor([[3], [4]]), "use_cache": True, key: cache}
    reason = "it continued from a cache that holds earlier tokens"
    if "softmax" in STATE_SPACE[name].kinds:
        trace, _ = captured(model, step)
        assert not mixers_without_softmax(trace)
        assert trace.uncaptured
        assert all(reason in module.reason for module in trace.uncaptured)
    else:
        with pytest.raises(rw.RankwiseError, match=reason):
            captured(model, step)


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2"])
def test_gradients_still_flow_and_nothing_captured_holds_a_graph(name):
    model, given = tiny(name), batch()
    with rw.capture(model, values=True) as trace:
        model(**given)[0].square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    site = trace.mixers[0]
    assert not site.operator.dense().requires_grad
    assert not site.values.requires_grad


HALF = 8 * 2**-8  # bfloat16 has 8 bits: a few roundings to it on the way


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2", "Falcon-Mamba"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_operators_are_exact_in_other_precisions(name, dtype):
    trace, outputs = seen_with_outputs(tiny(name).to(dtype), **batch(padded=True))
    # float64 models of transformers compute the scan in float32
    limit = HALF if dtype == torch.bfloat16 else 450 * EPS32
    for site in trace.mixers:
        assert output_error(site, outputs) <= limit


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2", "Jamba"])
def test_operators_are_exact_under_autocast(name):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trace, outputs = seen_with_outputs(tiny(name), **batch(padded=True))
        for site in mixers_without_softmax(trace):
            assert output_error(site, outputs) <= HALF


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2", "Zamba2"])
def test_the_prefill_of_generated_text_is_captured_and_a_note_lists_the_steps(name):
    model = tiny(name, head="ForCausalLM")
    with torch.no_grad():
        alone = model.generate(**batch(), max_new_tokens=4, do_sample=False)
        with rw.capture(model) as trace:
            watched = model.generate(**batch(), max_new_tokens=4, do_sample=False)
    assert torch.equal(alone, watched)
    expected = sum(kind != "softmax" for kind in STATE_SPACE[name].kinds)
    assert [site.forward_pass for site in mixers_without_softmax(trace)] == [0] * expected
    assert [note for note in trace.notes if "other calls of a mixer that was captured were left out" in note]
    assert trace.uncaptured == []


def test_a_position_of_zero_resets_the_rg_lru():
    given = batch() | {"position_ids": torch.arange(12)[None] % 5}
    (site,) = mixers_without_softmax(seen(tiny("RecurrentGemma"), **given))
    dense = site.operator.dense()
    assert bool((dense[..., 5:, :5] == 0).all())
    assert bool((dense[..., 4, 3] != 0).any())
    # two sums of ≤ 12 terms
    assert (site.operator @ site.values - site.output).abs().max() <= 100 * EPS32 * site.output.abs().max()


def test_the_rg_lru_is_captured_wherever_its_state_is_empty():
    """A first token of position 12 resets nothing; without a state there is nothing to reset."""
    given = batch() | {"position_ids": torch.arange(12)[None] + 12, "use_cache": True}
    assert len(mixers_without_softmax(seen(tiny("RecurrentGemma"), **given))) == 1


def test_packed_rows_are_not_captured():
    """transformers refuses packed rows without a kernel, so the reader is called directly."""
    mixer, x = tiny("Mamba-2").layers[0].mixer, torch.randn(2, 12, 32)
    reader, packed = reader_of(mixer), torch.zeros(2, 12, dtype=torch.int32)
    assert "a row holds several sequences" in reader.why_not(
        ModuleCall("mixer", mixer, (x,), {"seq_idx": packed})
    )
    assert reader.why_not(ModuleCall("mixer", mixer, (x,), {"seq_idx": None})) is None


def test_the_check_of_the_page_fails_for_an_error(monkeypatch):
    row = check_state_space("Mamba")
    assert row.complete
    assert row.identical
    assert row.mixer_error < 450 * EPS32
    assert row.path_error < 1000 * EPS32
    monkeypatch.setitem(STATE_SPACE, "Mamba", replace(STATE_SPACE["Mamba"], states=4))
    assert not row.complete
    assert row.cells[2:4] == ["2 of 2", "3 of 4"]


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2"])
def test_an_audit_from_end_to_end(name):
    audit = rw.audit(tiny(name), [batch(), batch(padded=True)])
    assert {record.kind for record in audit.heads} == set(STATE_SPACE[name].kinds)
    assert {state.blocks for state in audit.states} == {0, 1, 2}
    for record in audit.heads:
        assert 1 <= record.effective_rank <= 12
        assert record.mask == "causal"


@pytest.mark.parametrize("model_type", ["mra", "deformable_detr", "reformer", "yoso", "xlstm", "groupvit"])
@torch.no_grad()
def test_layers_without_a_readable_matrix_are_refused(model_type):
    _, model = next(tiny_variants(model_type))
    batch, error = find_inputs(model)
    assert error is None
    with suppress(rw.RankwiseError), rw.capture(model) as trace:  # an error if the model has no other mixer
        model(**batch)
    assert any(one.reason.startswith("it mixes tokens, but not by a matrix") for one in trace.uncaptured)


def test_classes_are_refused_by_name_and_library():
    assert not NoOperatorReader().reads(type("MraSelfAttention", (nn.Module,), {})())
    kernels = type("mLSTMBackend", (nn.Module,), {"__module__": "mlstm_kernels.torch.backend_module"})
    assert NoOperatorReader().reads(kernels())


class PlainMamba(nn.Module):
    """Mamba as other libraries write it: the parts of transformers' layer, but no attributes for sizes."""

    def __init__(self, width=8, inner=12, state=4, rank=2, normed=False):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.conv1d = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * state, bias=False), nn.Linear(rank, inner)
        self.A_log, self.D = nn.Parameter(torch.rand(inner, state)), nn.Parameter(torch.rand(inner))
        self.sizes = [rank, state, state]
        if normed:
            self.dt_layernorm, self.B_layernorm, self.C_layernorm = map(nn.LayerNorm, self.sizes)

    def forward(self, x):
        x, z = self.in_proj(x).chunk(2, -1)
        x = nn.functional.silu(self.conv1d(x.mT)[..., : x.shape[1]].mT)
        parts = self.x_proj(x).split(self.sizes, dim=-1)
        if hasattr(self, "dt_layernorm"):
            norms = self.dt_layernorm, self.B_layernorm, self.C_layernorm
            parts = [norm(part) for norm, part in zip(norms, parts, strict=True)]
        step = nn.functional.softplus(parts[0] @ self.dt_proj.weight.mT + self.dt_proj.bias)
        state, outputs = 0, []
        for t in range(x.shape[1]):
            decay = (step[:, t, :, None] * -self.A_log.exp()).exp()
            state = decay * state + (step[:, t] * x[:, t])[..., None] * parts[1][:, t, None]
            outputs.append((state * parts[2][:, t, None]).sum(-1))
        return self.out_proj((torch.stack(outputs, 1) + self.D * x) * nn.functional.silu(z))


@pytest.mark.parametrize("normed", [False, True])
def test_mamba_of_another_library_is_read_by_its_parts(normed):
    model, x = (
        nn.Sequential(PlainMamba(normed=normed), PlainMamba(normed=normed)).eval(),
        torch.randn(2, 9, 8),
    )
    trace, outputs = seen_with_outputs(model, input=x)
    assert [(site.name, site.kind) for site in trace.mixers] == [("0", "selective"), ("1", "selective")]
    # The state sums at most T terms.
    assert max(output_error(site, outputs) for site in trace.mixers) < 64 * 9 * EPS32


@pytest.mark.parametrize("more", ["x_proj_back", "A_log_b"])
def test_mamba_with_more_parts_is_not_read_by_its_parts(more):
    two_ways = PlainMamba()
    setattr(two_ways, more, nn.Linear(12, 10) if "proj" in more else nn.Parameter(torch.rand(12, 4)))
    trace = seen(nn.Sequential(two_ways, PlainMamba()).eval(), torch.randn(2, 9, 8))
    assert [site.name for site in trace.mixers] == ["1"]
    reasons = {one.name: one.reason for one in trace.uncaptured}
    assert reasons["0"].startswith(f"next to the parts of a Mamba layer it has {more}, such as a second scan")
