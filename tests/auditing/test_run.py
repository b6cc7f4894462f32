"""`audit` end to end on small models: the numbers are right, and nothing is lost when things go wrong."""

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from experiments.families import BERT, LLAMA, hugging_face, nano_gpt
from tests.auditing.same_audits import differences
from tests.support import records
from torch import Tensor, nn

import rankwise as rw
from rankwise.auditing import AttentionMap, AuditError, Finding
from rankwise.auditing.attention_maps import only_flagged
from rankwise.auditing.batches import check_batches
from rankwise.auditing.comparison import layer_means
from rankwise.errors import CaptureError, InputError, RankwiseError
from rankwise.measures import logit_moments, required_head_dim
from rankwise.theory import random_head_rank


def bert(**changes: Any) -> nn.Module:
    return hugging_face("BertModel", **BERT | changes)()


def ids(batch: int = 2, tokens: int = 12, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(5, 60, (batch, tokens), generator=generator)}


def head(audit: rw.Audit, layer: int, number: int) -> Any:
    return next(one for one in audit.heads if (one.layer, one.head) == (layer, number))


def test_numbers_equal_a_direct_svd_of_output_attentions() -> None:
    eager = hugging_face("BertModel", **BERT)(attn_implementation="eager")
    audit = rw.audit(bert(), [ids()], delta=1e-2)
    with torch.no_grad():
        attentions = eager(**ids(), output_attentions=True).attentions
    for layer, matrices in enumerate(attentions):
        sigma = torch.linalg.svdvals(matrices.double())
        share = sigma / sigma.sum(-1, keepdim=True)
        expected = {
            "numerical_rank": (sigma >= 1e-2).sum(-1).double(),
            "effective_rank": torch.exp(-(share * share.log()).sum(-1)),
            "stable_rank": (sigma**2).sum(-1) / sigma[..., 0] ** 2,
            "sigma_max": sigma[..., 0],
            "first_token_mass": matrices.double()[..., 0].mean(-1),
        }
        for number in range(4):
            for name, values in expected.items():
                # the attention of the eager model is float32: T·eps(float32) on each number of size ≤ T
                assert getattr(head(audit, layer, number), name) == pytest.approx(
                    values[:, number].mean().item(), rel=12 * 2**-23, abs=12 * 2**-23
                )


def test_collapse_equals_hidden_states() -> None:
    model = bert()
    audit = rw.audit(model, [ids()])
    with torch.no_grad():
        states = model(**ids(), output_hidden_states=True).hidden_states
    assert [layer.layer for layer in audit.layers] == [0, 1, 2, 3]
    for record, tokens in zip(audit.layers, states, strict=True):
        assert record.relative_spread == pytest.approx(
            rw.measures.token_spread(tokens).mean().item(), rel=1e-12
        )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "settings"), [("BertModel", BERT), ("LlamaModel", LLAMA)])
def test_a_padded_sequence_has_the_numbers_it_has_alone(
    name: str, settings: dict[str, Any], implementation: str, side: str
) -> None:
    model = hugging_face(name, **settings)(attn_implementation=implementation)
    alone = ids(1, 9)
    pads = torch.zeros(1, 3, dtype=torch.long)
    order = (lambda a, b: [b, a]) if side == "left" else (lambda a, b: [a, b])
    padded = {
        "input_ids": torch.cat(order(alone["input_ids"], pads), 1),
        "attention_mask": torch.cat(order(torch.ones(1, 9, dtype=torch.long), pads), 1),
    }
    start = 3 if side == "left" else 0
    padded["position_ids"] = torch.arange(12).sub(start).clamp(min=0)[None]
    wide, short = rw.audit(model, [padded]), rw.audit(model, [alone])
    for one, other in zip(wide.heads, short.heads, strict=True):
        assert (one.tokens, one.sources, one.mask, one.hardmax_rank) == (9, 9, other.mask, other.hardmax_rank)
        assert one.numerical_rank == other.numerical_rank
        # float32 activations through three layers: a few hundred roundings of relative size 2⁻²⁴
        assert one.effective_rank == pytest.approx(other.effective_rank, rel=500 * 2**-24)
        assert one.row_entropy == pytest.approx(other.row_entropy, rel=500 * 2**-24)
    for one, other in zip(wide.layers, short.layers, strict=True):
        assert one.token_spread == pytest.approx(other.token_spread, rel=500 * 2**-24)


def test_numbers_do_not_depend_on_the_batch() -> None:
    both, model = ids(4), bert()
    together = rw.audit(model, [both])
    one_by_one = rw.audit(model, [{"input_ids": row[None]} for row in both["input_ids"]])
    for one, other in zip(together.heads, one_by_one.heads, strict=True):
        assert one.sequences == other.sequences == 4
        assert one.effective_rank == pytest.approx(other.effective_rank, rel=500 * 2**-24)
        assert one.std["effective_rank"] == pytest.approx(other.std["effective_rank"], rel=1e-3)


def test_masks_are_named_and_set_the_null() -> None:
    causal = rw.audit(nano_gpt(), [ids()]).heads[0]
    full = rw.audit(bert(), [ids()]).heads[0]
    window = rw.audit(hugging_face("MistralModel", **LLAMA | {"sliding_window": 5})(), [ids()]).heads[0]
    assert (causal.mask, causal.hardmax_rank) == ("causal", pytest.approx(13 / 2))
    assert (full.mask, full.hardmax_rank) == ("full", pytest.approx(rw.theory.rank_barrier(12)))
    assert (window.mask, window.hardmax_rank) == (
        "window",
        pytest.approx(rw.theory.rank_barrier(12, "causal", window=5)),
    )


def test_windows_of_a_picture_are_one_sequence() -> None:
    family = hugging_face(
        "SwinModel", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    audit = rw.audit(family(), [{"pixel_values": torch.randn(3, 3, 32, 32)}])
    assert {head.sequences for head in audit.heads} == {3}
    assert {head.mask for head in audit.heads if head.layer == 0} == {"full"}


def test_cross_attention_is_kept_apart() -> None:
    model = hugging_face("T5Model", vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)()
    batch = ids(2, 12) | {"decoder_input_ids": ids(2, 10)["input_ids"]}
    audit = rw.audit(model, [batch])
    shapes = {(head.stack, head.cross, head.mask, head.tokens, head.sources) for head in audit.heads}
    assert shapes == {
        ("encoder.block", False, "full", 12, 12),
        ("decoder.block", False, "causal", 10, 10),
        ("decoder.block", True, "full", 10, 12),
    }


def test_twins_are_found() -> None:
    model = bert()
    attention = model.encoder.layer[1].attention.self
    with torch.no_grad():
        for projection in (attention.query, attention.key):
            projection.weight[8:16] = projection.weight[:8]
            projection.bias[8:16] = projection.bias[:8]
    audit = rw.audit(model, [ids(2, 16)])
    twins = [finding for finding in audit.findings if finding.code == "DUPLICATE_HEADS"]
    assert [(finding.where.layer, finding.where.head) for finding in twins] == [(1, 0)]
    assert head(audit, 1, 0).nearest_head == 1
    assert head(audit, 1, 0).nearest_distance < 1e-6


def test_the_width_a_head_needs_is_of_all_sequences_and_a_narrow_head_is_found() -> None:
    """Pooled moments: as `required_head_dim` of all sequences, however they are batched and padded."""
    torch.manual_seed(0)
    model = bert(num_attention_heads=2)
    with torch.no_grad():
        for layer in model.encoder.layer:
            for weight in (layer.attention.self.query.weight, layer.attention.self.key.weight):
                weight *= 40
        model.encoder.layer[1].attention.self.key.weight[18:] = 0  # of head 1 all but two channels
    batch = ids(6, 24)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, 17:] = 0
    audit = rw.audit(model, [batch])
    assert {head.width for head in audit.heads} == {16}
    with rw.capture(model) as trace, torch.no_grad():
        model(**batch)
    for site in trace.mixers:
        moments = logit_moments(site.operator, site.valid_tokens, site.valid_sources).sum_sequences()
        wanted = required_head_dim(moments).tolist()
        assert [head.required_head_dim for head in audit.heads if head.layer == site.layer] == wanted
    [finding] = [finding for finding in audit.findings if finding.code == "OVERSIZED_HEADS"]
    assert (finding.where.layer, finding.where.head, finding.heads) == (1, 1, [1])
    assert finding.evidence["required_head_dim"] <= 2
    alone = [{name: part[at : at + 1] for name, part in batch.items()} for at in range(6)]
    again = rw.audit(model, alone)
    assert [head.required_head_dim for head in again.heads] == [
        head.required_head_dim for head in audit.heads
    ]


def test_nan_weights_are_a_finding_and_the_rest_is_measured() -> None:
    model = bert()
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight[0, 0] = math.nan
    audit = rw.audit(model, [ids()])
    broken = [finding for finding in audit.findings if finding.code == "NONFINITE"]
    assert broken[0].severity == "error"
    assert (broken[0].where.layer, broken[0].where.head) == (1, 0)
    assert all(math.isfinite(head(audit, 0, number).effective_rank) for number in range(4))
    assert head(audit, 1, 0).nonfinite == 2
    assert math.isnan(head(audit, 1, 0).effective_rank)


def test_one_bad_sequence_leaves_the_others() -> None:
    class Poisoned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nano_gpt()

        def forward(self, input_ids: Tensor, scale: Tensor) -> Tensor:
            x = self.inner.transformer["wte"](input_ids) * scale
            for block in self.inner.transformer["h"]:
                x = block(x)
            return x

    batch = ids(3) | {"scale": torch.tensor([1.0, math.nan, 1.0])[:, None, None]}
    audit = rw.audit(Poisoned(), [batch])
    assert {(head.sequences, head.nonfinite) for head in audit.heads} == {(2, 1)}
    assert {(layer.sequences, layer.nonfinite) for layer in audit.layers} == {(2, 1)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_cpu(dtype: torch.dtype) -> None:
    whole, half = rw.audit(bert(), [ids()]), rw.audit(bert().to(dtype), [ids()])
    assert half.provenance.model_dtype == str(dtype).removeprefix("torch.")
    for one, other in zip(whole.heads, half.heads, strict=True):
        # rounding of activations to 8 bits moves sharp rows by up to a few per cent
        assert one.effective_rank == pytest.approx(other.effective_rank, rel=0.2)


def test_one_token_one_head_one_layer() -> None:
    model = bert(num_attention_heads=1, num_hidden_layers=1)
    audit = rw.audit(model, [ids(1, 1)])
    [only] = audit.heads
    assert (only.numerical_rank, only.effective_rank, only.hardmax_rank, only.tokens) == (1, 1, 1, 1)
    assert [finding.code for finding in audit.findings if finding.severity != "info"] == []
    assert math.isnan(audit.layers[0].mean_cosine)


def test_a_compiled_model_is_run_uncompiled_and_it_is_said() -> None:
    audit = rw.audit(torch.compile(bert()), [ids()])
    assert len(audit.heads) == 12
    assert any("uncompiled" in note for note in audit.provenance.notes)


def test_dropout_is_noted() -> None:
    audit = rw.audit(bert().train(), [ids()])
    assert any("dropout was on" in note for note in audit.provenance.notes)
    assert not rw.audit(bert(), [ids()]).provenance.notes


def test_inputs_may_be_tensors_tuples_or_dicts() -> None:
    batch, model = ids(), nano_gpt()
    audits = [
        rw.audit(model, [batch]),
        rw.audit(model, [batch["input_ids"]]),
        rw.audit(model, [(batch["input_ids"],)]),
    ]
    # as JSON, where NaN is null: it is not equal to itself
    heads = [[head.model_dump_json() for head in audit.heads] for audit in audits]
    assert heads[0] == heads[1] == heads[2]


def test_memory_does_not_grow_with_batches() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def batches() -> Iterator[dict[str, Tensor]]:
        for seed in range(6):
            gc.collect()
            assert sum(ref() is not None for ref in seen) <= 1, "an audit keeps its batches"
            batch = ids(seed=seed)
            seen.append(weakref.ref(batch["input_ids"]))
            yield batch

    first, all_six = rw.audit(nano_gpt(), [ids()]), rw.audit(nano_gpt(), batches())
    assert len(all_six.heads) == len(first.heads)
    assert all_six.heads[0].sequences == 12


def test_ctrl_c_keeps_what_is_done() -> None:
    def batches() -> Iterator[dict[str, Tensor]]:
        yield ids()
        raise KeyboardInterrupt

    audit = rw.audit(bert(), batches())
    assert not audit.complete
    assert audit.heads[0].sequences == 2
    assert any("interrupted" in note for note in audit.provenance.notes)


def test_ctrl_c_before_anything_is_an_interrupt() -> None:
    def batches() -> Iterator[dict[str, Tensor]]:
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        rw.audit(bert(), batches())


def test_a_failing_forward_says_which_batch_and_keeps_the_ones_before() -> None:
    bad = {"input_ids": torch.full((1, 4), 999)}
    with pytest.raises(AuditError, match=r"batch 2: .*input_ids \(1, 4\).*IndexError") as caught:
        rw.audit(bert(), [ids(), bad])
    assert caught.value.audit is not None
    assert not caught.value.audit.complete
    assert caught.value.audit.heads[0].sequences == 2
    with pytest.raises(AuditError, match="batch 1") as caught:
        rw.audit(bert(), [bad])
    assert caught.value.audit is None


def test_no_batches_no_mixers_no_delta() -> None:
    with pytest.raises(InputError, match="at least one batch"):
        rw.audit(bert(), [])
    with pytest.raises(CaptureError, match="Name them by hand"):
        rw.audit(nn.Sequential(nn.Linear(4, 4)), [torch.randn(2, 4)])
    with pytest.raises(RankwiseError, match="delta"):
        rw.audit(bert(), [ids()], delta=0.0)


def test_progress_tells_the_site() -> None:
    told: list[tuple[int, str]] = []
    rw.audit(nano_gpt(), [ids(), ids()], on_progress=lambda done, site: told.append((done, site)))
    assert told[-1] == (1, "transformer.h.2")
    assert {done for done, _ in told} == {0, 1}


def test_the_function_wins_over_the_folder_of_its_name() -> None:
    import rankwise.auditing.records
    import rankwise.tracing.module_calls  # noqa: F401

    assert callable(rw.audit)
    assert callable(rw.capture)


class Streams(nn.Module):
    """Two stacks that run in turn; the first wipes out what tells tokens apart."""

    class Block(nn.Module):
        def __init__(self, keep: float) -> None:
            super().__init__()
            self.keep, self.qkv = keep, nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.keep * (x - x.mean(1, keepdim=True)) + x.mean(1, keepdim=True) + 0 * mixed

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([self.Block(0.05) for _ in range(3)])
        self.right = nn.ModuleList([self.Block(1.0) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for left, right in zip(self.left, self.right, strict=True):
            x, y = left(x), right(y)
        return x + y


def test_stacks_that_run_in_turn_are_told_apart() -> None:
    audit = rw.audit(Streams(), [torch.randn(2, 12, 16) + 1])
    collapsed = [finding for finding in audit.findings if finding.code == "COLLAPSE"]
    assert [finding.where.stack for finding in collapsed] == ["left"]


def test_each_head_has_the_null_of_its_own_mask() -> None:
    class TwoMasks(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            full = torch.ones(20, 20, dtype=torch.bool)
            near = full.tril() & full.triu(-1)
            mask = torch.stack([full, near])[None]
            return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    first, second = rw.audit(TwoMasks(), [torch.randn(3, 2, 20, 8)]).heads
    assert (first.mask, first.hardmax_rank) == ("full", pytest.approx(rw.theory.rank_barrier(20)))
    assert (second.mask, second.hardmax_rank) == (
        "window",
        pytest.approx(rw.theory.rank_barrier(20, "causal", window=2)),
    )


def test_the_mask_is_named_by_the_longest_sequence() -> None:
    model, long = nano_gpt(), ids(1, 12)["input_ids"]
    assert rw.audit(model, [long[:, :1], long]).heads[0].mask == "causal"


def test_the_random_null_is_known_where_queries_and_keys_are() -> None:
    class Random(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, k)

    identity = rw.audit(Random(), [(100 * torch.eye(64)[None, None], torch.eye(64)[None, None])]).heads[0]
    assert identity.numerical_rank == 64
    assert identity.random_rank == pytest.approx(random_head_rank(64, 64).mean)
    assert math.isnan(
        rw.audit(hugging_face("BloomModel", vocab_size=64, hidden_size=32, n_layer=1, n_head=4)(), [ids()])
        .heads[0]
        .random_rank
    )


def test_a_list_of_heads_is_a_layer_of_heads() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(24, 8, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([Head() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.cat([head(x) for head in self.heads], dim=-1)

    model = nn.Sequential(Block(), Block())
    audit = rw.audit(model, [torch.randn(2, 12, 24)])
    assert [(head.layer, head.head) for head in audit.heads] == [
        (at, of) for at in range(2) for of in range(3)
    ]
    assert audit.heads[0].site == "0.heads.*"


def test_what_fails_while_batches_are_made_keeps_the_ones_before() -> None:
    def batches() -> Iterator[dict[str, Tensor]]:
        yield ids()
        raise OSError("disk gone")

    def refused() -> Iterator[dict[str, Tensor]]:
        yield ids()
        raise InputError("picture 3", expected="a picture", got="noise", fix="Remove it.")

    for made, says in (
        (batches, "batch 2: expected a batch, got OSError: disk gone"),
        (refused, "picture 3"),
    ):
        with pytest.raises(AuditError, match=says) as caught:
            rw.audit(bert(), made())
        assert caught.value.audit is not None
        assert caught.value.audit.heads[0].sequences == 2


def test_only_whole_batches_count_but_of_the_first_what_there_is() -> None:
    model = bert()
    calls = iter(range(100))

    def second_time(module: nn.Module, args: Any, output: Any) -> None:
        if next(calls) in failing:
            raise KeyboardInterrupt

    model.encoder.layer[2].register_forward_hook(second_time)
    failing = {1}
    audit = rw.audit(model, [ids(), ids()])
    assert {head.sequences for head in audit.heads} == {2}
    assert audit.provenance.sequences == 2
    calls, failing = iter(range(100)), {0}
    audit = rw.audit(model, [ids(), ids()])
    assert {head.layer for head in audit.heads} == {0, 1}
    assert not audit.complete


def test_a_single_batch_wants_a_list() -> None:
    with pytest.raises(InputError, match=r"got Tensor.*rw\.audit\(model, \[batch\]\)"):
        rw.audit(bert(), torch.zeros(2, 3))
    for batches in ({"input_ids": torch.zeros(2, 3)}, torch.zeros(2, 3)):  # the types say so under test, too
        with pytest.raises(InputError, match=r"rw\.audit\(model, \[batch\]\)"):
            check_batches(batches)


def test_heads_that_change_their_number_are_refused() -> None:
    class Changing(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q)

    with pytest.raises(RankwiseError, match="expected 2, as in the sequences before, got 3"):
        rw.audit(Changing(), [torch.randn(1, 2, 9, 4), torch.randn(1, 3, 9, 4)])


class Encoders(nn.Module):
    """An encoder that runs once, or a second time in the same pass on the tokens in reverse order."""

    def __init__(self, encoder: nn.Module, twice: bool) -> None:
        super().__init__()
        self.encoder, self.twice = encoder, twice

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x) + self.encoder(x.flip(1)) if self.twice else self.encoder(x)


def test_a_stack_that_runs_twice_in_a_pass_restarts_as_in_another_batch() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 9, 8)
    twice = rw.audit(Encoders(encoder, True), [x])
    batches = rw.audit(Encoders(encoder, False), [x, x.flip(1)])
    assert math.isnan(twice.layers[0].relative_update)
    assert differences(twice.model_dump()["layers"], batches.model_dump()["layers"]) == []
    assert differences(twice.model_dump()["heads"], batches.model_dump()["heads"]) == []


class AttendsTwice(nn.Module):
    """A block whose attention module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        return x + self.attention(3 * x, 3 * x, x)[0]


def test_calls_of_a_module_in_a_layer_have_records_of_their_own_and_one_mean() -> None:
    torch.manual_seed(0)
    audit = rw.audit(nn.Sequential(AttendsTwice(), AttendsTwice()), [torch.randn(2, 9, 8)])
    own = [one for one in audit.heads if one.layer == 0]
    assert [(one.call, one.head) for one in own] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert own[0].effective_rank != own[2].effective_rank
    means = {(key.measure, key.layer): mean for key, (mean, _) in layer_means(audit).items()}
    assert means["row_entropy", 0] == pytest.approx(sum(one.row_entropy for one in own) / 4)


def test_an_attention_map_is_kept_if_another_call_of_its_head_has_a_finding() -> None:
    picture = AttentionMap.of(torch.eye(2).numpy(), 2, 2)
    heads = [records.head(head=at, call=call, attention_map=picture) for call in (0, 1) for at in (0, 1)]
    sink = {"code": "SINK", "severity": "info", "evidence": {}, "meaning": "", "remedy": ""}
    kept = only_flagged(heads, [Finding(where=heads[3].id, **sink)])
    assert [one.attention_map is not None for one in kept] == [False, True, False, True]
