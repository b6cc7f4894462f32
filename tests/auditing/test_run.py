"""`audit` on small models: numbers equal oracles, and measured batches are kept if a later one fails."""

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import BERT, LLAMA, hugging_face, nano_gpt
from tests.auditing.same_audits import compared, differences
from tests.support.modules import Average, GivenAttention, kind, token_ids
from tests.tracing.capture_zoo import Head
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import rankwise as rw
from rankwise.auditing import AuditError
from rankwise.auditing.comparison import layer_means
from rankwise.auditing.provenance import weights_digest
from rankwise.errors import CaptureError, InputError, RankwiseError
from rankwise.measures import logit_moments, required_head_dim
from rankwise.theory import random_head_rank, rank_barrier


def bert(**changes: Any) -> nn.Module:
    return hugging_face("BertModel", **BERT | changes)()


def head(audit: rw.Audit, layer: int, number: int) -> Any:
    return next(one for one in audit.heads if (one.layer, one.head) == (layer, number))


def findings(audit: rw.Audit, code: str) -> list[Any]:
    return [finding for finding in audit.findings if finding.code == code]


def test_numbers_equal_a_direct_svd_of_output_attentions() -> None:
    eager = hugging_face("BertModel", **BERT)(attn_implementation="eager")
    audit = rw.audit(bert(), [token_ids()], delta=1e-2)
    with torch.no_grad():
        attentions = eager(**token_ids(), output_attentions=True).attentions
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


def test_spread_of_layers_equals_the_spread_of_hidden_states() -> None:
    model = bert()
    with torch.no_grad():
        hidden = model(**token_ids(), output_hidden_states=True).hidden_states
    wanted = [rw.measures.spread(tokens).mean().item() for tokens in hidden]
    states = rw.audit(model, [token_ids()]).states
    assert [state.blocks for state in states] == [0, 1, 2, 3]
    assert [state.spread for state in states] == pytest.approx(wanted, rel=1e-12)


def test_the_largest_token_is_counted_by_its_position_without_padding() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    tokens, padding = torch.randn(4, 12, 8), torch.zeros(4, 12, dtype=torch.bool)
    padding[:2, :2] = True  # left padding
    for row, place in enumerate((5, 5, 3, 7)):
        tokens[row, place] *= 100
    batches = [
        {"src": tokens[rows], "src_key_padding_mask": padding[rows]} for rows in (slice(0, 2), slice(2, 4))
    ]
    audit = rw.audit(model, batches)
    state = audit.states[0]
    assert (state.largest_at, state.largest_position, state.massive_tokens) == ({3: 3, 7: 1}, 3, 1)
    halves = [rw.audit(model, [batch]).states[0] for batch in batches]
    assert [(half.largest_at, half.largest_position) for half in halves] == [
        ({3: 2}, 3),
        ({3: 1, 7: 1}, None),
    ]
    merged = rw.Audit.merge([rw.audit(model, [batch]) for batch in batches])
    assert merged.states[0].largest_at == state.largest_at
    loaded = rw.Audit.model_validate_json(audit.model_dump_json())
    assert loaded.states[0].largest_at == state.largest_at


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "settings"), [("BertModel", BERT), ("LlamaModel", LLAMA)])
def test_padding_does_not_change_the_numbers_of_a_sequence(
    name: str, settings: dict[str, Any], implementation: str, side: str
) -> None:
    model = hugging_face(name, **settings)(attn_implementation=implementation)
    alone = token_ids(1, 9)
    pads = torch.zeros(1, 3, dtype=torch.long)
    order = (lambda a, b: [b, a]) if side == "left" else (lambda a, b: [a, b])
    padded = {
        "input_ids": torch.cat(order(alone["input_ids"], pads), 1),
        "attention_mask": torch.cat(order(torch.ones(1, 9, dtype=torch.long), pads), 1),
        "position_ids": torch.arange(12).sub(3 if side == "left" else 0).clamp(min=0)[None],
    }
    wide, short = rw.audit(model, [padded]), rw.audit(model, [alone])
    for one, other in zip(wide.heads, short.heads, strict=True):
        assert (one.tokens, one.sources, one.mask, one.one_hot_rank) == (9, 9, other.mask, other.one_hot_rank)
        assert one.numerical_rank == other.numerical_rank
        # float32 activations through three layers: a few hundred roundings of relative size 2⁻²⁴
        assert one.effective_rank == pytest.approx(other.effective_rank, rel=500 * 2**-24)
        assert one.row_entropy == pytest.approx(other.row_entropy, rel=500 * 2**-24)
    for one, other in zip(wide.states, short.states, strict=True):
        assert one.absolute_spread == pytest.approx(other.absolute_spread, rel=500 * 2**-24)


def test_numbers_do_not_depend_on_the_batch() -> None:
    both, model = token_ids(4), bert()
    together = rw.audit(model, [both])
    separate = rw.audit(model, [{"input_ids": row[None]} for row in both["input_ids"]])
    for one, other in zip(together.heads, separate.heads, strict=True):
        assert one.sequences == other.sequences == 4
        assert one.effective_rank == pytest.approx(other.effective_rank, rel=500 * 2**-24)
        assert one.std["effective_rank"] == pytest.approx(other.std["effective_rank"], rel=1e-3)


def band(tokens: int, window: int) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window)


TWO_MASKS = torch.stack([torch.ones(20, 20, dtype=torch.bool), band(20, 2)])[None]
LONG = token_ids(1)["input_ids"]


@pytest.mark.parametrize(
    ("model", "batches", "wanted"),
    [
        (nano_gpt, [token_ids()], [("causal", 13 / 2)]),
        (bert, [token_ids()], [("full", rank_barrier(12))]),
        (
            hugging_face("MistralModel", **LLAMA | {"sliding_window": 5}),
            [token_ids()],
            [("window", rank_barrier(12, band(12, 5)).item())],
        ),
        (
            lambda: GivenAttention(TWO_MASKS),
            [torch.randn(3, 2, 20, 8)],
            [("full", rank_barrier(20)), ("window", rank_barrier(20, band(20, 2)).item())],
        ),
        (nano_gpt, [LONG[:, :1], LONG], [("causal", (1 + 13 / 2) / 2)]),
    ],
    ids=["causal", "full", "window", "a mask per head", "one token first"],
)
def test_masks_are_named_and_determine_the_hardmax_rank(model: Any, batches: list[Any], wanted: Any) -> None:
    heads = rw.audit(model(), batches).heads
    for head, (mask, rank) in zip(heads, wanted, strict=False):
        assert (head.mask, head.one_hot_rank) == (mask, pytest.approx(rank))


def test_windows_of_a_picture_count_as_one_sequence() -> None:
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    model = hugging_face("SwinModel", **sizes, window_size=4)()
    heads = rw.audit(model, [{"pixel_values": torch.randn(3, 3, 32, 32)}]).heads
    assert {head.sequences for head in heads} == {3}
    assert {head.mask for head in heads if head.layer == 0} == {"full"}


def test_cross_attention_has_records_of_its_own() -> None:
    model = hugging_face("T5Model", vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)()
    batch = token_ids() | {"decoder_input_ids": token_ids(tokens=10)["input_ids"]}
    heads = rw.audit(model, [batch]).heads
    assert {(head.stack, head.cross, head.mask, head.tokens, head.sources) for head in heads} == {
        ("encoder.block", False, "full", 12, 12),
        ("decoder.block", False, "causal", 10, 10),
        ("decoder.block", True, "full", 10, 12),
    }


def test_heads_with_equal_weights_are_nearest() -> None:
    model = bert()
    attention = model.encoder.layer[1].attention.self
    with torch.no_grad():
        for projection in (attention.query, attention.key):
            projection.weight[8:16] = projection.weight[:8]
            projection.bias[8:16] = projection.bias[:8]
    audit = rw.audit(model, [token_ids(2, 16)])
    assert head(audit, 1, 0).nearest_head == 1
    assert head(audit, 1, 0).nearest_head_distance < 1e-6


def test_the_required_head_dim_pools_all_sequences() -> None:
    """It equals `required_head_dim` of all sequences for every batch size and with padding."""
    torch.manual_seed(0)
    model = bert(num_attention_heads=2)
    with torch.no_grad():
        for layer in model.encoder.layer:
            for weight in (layer.attention.self.query.weight, layer.attention.self.key.weight):
                weight *= 40
        model.encoder.layer[1].attention.self.key.weight[18:] = 0  # head 1 keeps two channels
    batch = token_ids(6, 24)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, 17:] = 0
    audit = rw.audit(model, [batch])
    assert {head.head_dim for head in audit.heads} == {16}
    with rw.capture(model) as trace, torch.no_grad():
        model(**batch)
    moments = (logit_moments(site.operator, site.valid_tokens, site.valid_sources) for site in trace.mixers)
    wanted = torch.cat([required_head_dim(one.sum_sequences()) for one in moments]).tolist()
    assert [head.required_head_dim for head in audit.heads] == wanted
    [finding] = findings(audit, "OVERSIZED_HEADS")
    assert (finding.where.layer, finding.where.head, finding.heads) == (1, 1, [1])
    assert finding.evidence["required_head_dim"] <= 2
    again = rw.audit(model, [{name: part[at : at + 1] for name, part in batch.items()} for at in range(6)])
    assert [head.required_head_dim for head in again.heads] == wanted


def test_nan_weights_are_a_finding_and_other_heads_are_measured() -> None:
    model = bert()
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight[0, 0] = math.nan
    audit = rw.audit(model, [token_ids()])
    first, *_ = findings(audit, "NONFINITE")
    assert (first.severity, first.where.layer, first.where.head) == ("error", 1, 0)
    assert all(math.isfinite(head(audit, 0, number).effective_rank) for number in range(4))
    assert head(audit, 1, 0).nonfinite_sequences == 2
    assert math.isnan(head(audit, 1, 0).effective_rank)


def test_a_sequence_that_is_not_finite_is_excluded() -> None:
    def scaled(self: Any, input_ids: Tensor, scale: Tensor) -> Tensor:
        x = self.inner.transformer["wte"](input_ids) * scale
        for block in self.inner.transformer["h"]:
            x = block(x)
        return x

    batch = token_ids(3) | {"scale": torch.tensor([1.0, math.nan, 1.0])[:, None, None]}
    audit = rw.audit(kind(scaled, inner=nano_gpt)(), [batch])
    assert {(one.sequences, one.nonfinite_sequences) for one in (*audit.heads, *audit.states)} == {(2, 1)}


class Chunks(nn.Module):
    """BERT on both halves of each sequence, together or one after the other; the mean of their tokens."""

    def __init__(self, model: nn.Module, together: bool) -> None:
        super().__init__()
        self.bert, self.together = model, together

    def forward(self, ids: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        halves = [part.chunk(2, dim=1) for part in (ids, mask, scale)]
        calls = [tuple(map(torch.cat, halves))] if self.together else list(zip(*halves, strict=True))
        states = [
            self.bert(inputs_embeds=self.bert.embeddings.word_embeddings(i) * s, attention_mask=m)[0]
            for i, m, s in calls
        ]
        return (torch.cat(states) * torch.cat(halves[1])[..., None]).sum(1)


@pytest.mark.parametrize(("together", "sequences"), [(True, 2), (False, 3)])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_chunk_of_nothing_but_padding_is_not_a_sequence(
    implementation: str, together: bool, sequences: int
) -> None:
    """One sequence fills both halves, one only the first: three chunks have tokens.

    Heads of a single call on all chunks count them as windows of two sequences.
    """
    model = Chunks(bert(attn_implementation=implementation), together).eval()
    ids, mask = token_ids(2, 12)["input_ids"], torch.ones(2, 12, dtype=torch.long)
    mask[1, 6:] = 0
    batch = {"ids": ids, "mask": mask, "scale": torch.ones(2, 12, 1)}
    assert bool(model(**batch).isfinite().all())
    audit = rw.audit(model, [batch], at_init=True)
    assert findings(audit, "NONFINITE") == []
    assert {(one.sequences, one.nonfinite_sequences, one.tokens) for one in audit.states} == {(3, 0, 6)}
    assert {(one.sequences, one.nonfinite_sequences, one.tokens) for one in audit.heads} == {
        (sequences, 0, 6)
    }
    assert not any(math.isnan(one.numerical_rank) for one in audit.heads)
    batch["scale"][0, 0] = math.nan  # real tokens that are not finite are an error
    broken = rw.audit(model, [batch])
    assert {(one.sequences, one.nonfinite_sequences) for one in broken.states} == {(2, 1)}
    assert {(one.sequences, one.nonfinite_sequences) for one in broken.heads} == {(sequences - 1, 1)}


def test_a_stack_without_a_single_token_has_no_numbers_and_no_error() -> None:
    model = Chunks(bert(), together=False).eval()
    batch = {"ids": token_ids(1, 12)["input_ids"], "mask": torch.zeros(1, 12, dtype=torch.long)}
    audit = rw.audit(model, [batch | {"scale": torch.ones(1, 12, 1)}])
    assert {(one.sequences, one.nonfinite_sequences) for one in (*audit.heads, *audit.states)} == {(0, 0)}
    assert all(math.isnan(one.numerical_rank) for one in audit.heads)
    assert audit.findings == []
    assert rw.Audit.model_validate_json(audit.model_dump_json()).heads[0].sequences == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured_on_a_cpu(dtype: torch.dtype) -> None:
    whole, half = rw.audit(bert(), [token_ids()]), rw.audit(bert().to(dtype), [token_ids()])
    assert half.provenance.model_dtype == str(dtype).removeprefix("torch.")
    # rounding of activations to 8 bits changes sharp rows by up to a few per cent
    wanted = [head.effective_rank for head in whole.heads]
    assert [head.effective_rank for head in half.heads] == pytest.approx(wanted, rel=0.2)


def test_a_model_of_one_head_reads_one_token() -> None:
    audit = rw.audit(bert(num_attention_heads=1, num_hidden_layers=1), [token_ids(1, 1)])
    [only] = audit.heads
    assert (only.numerical_rank, only.effective_rank, only.one_hot_rank, only.tokens) == (1, 1, 1, 1)
    assert [finding.code for finding in audit.findings if finding.severity != "info"] == []
    assert math.isnan(audit.states[0].mean_cosine)


def test_notes_name_compilation_and_dropout() -> None:
    for model, note in ((torch.compile(bert()), "uncompiled"), (bert().train(), "dropout was active")):
        audit = rw.audit(model, [token_ids()])
        assert len(audit.heads) == 12
        assert any(note in one for one in audit.provenance.notes)
    assert not rw.audit(bert(), [token_ids()]).provenance.notes


def test_inputs_may_be_tensors_tuples_or_dicts() -> None:
    batch, model = token_ids(), nano_gpt()
    audits = [rw.audit(model, [one]) for one in (batch, batch["input_ids"], (batch["input_ids"],))]
    first, *others = ([head.model_dump_json() for head in audit.heads] for audit in audits)
    assert others == [first] * 2  # in JSON NaN is null, which equals itself


def test_memory_does_not_grow_with_batches() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def batches() -> Iterator[dict[str, Tensor]]:
        for seed in range(6):
            gc.collect()
            assert sum(ref() is not None for ref in seen) <= 1, "an audit keeps its batches"
            batch = token_ids(seed=seed)
            seen.append(weakref.ref(batch["input_ids"]))
            yield batch

    assert rw.audit(nano_gpt(), batches()).heads[0].sequences == 12


def raising(error: BaseException, batches: int = 1) -> Iterator[dict[str, Tensor]]:
    """Yield some batches, then raise."""
    yield from (token_ids() for _ in range(batches))
    raise error


def test_ctrl_c_keeps_measured_batches() -> None:
    audit = rw.audit(bert(), raising(KeyboardInterrupt()))
    assert (audit.complete, audit.heads[0].sequences) == (False, 2)
    assert any("interrupted" in note for note in audit.provenance.notes)
    with pytest.raises(KeyboardInterrupt):
        rw.audit(bert(), raising(KeyboardInterrupt(), batches=0))


BAD = {"input_ids": torch.full((1, 4), 999)}
REFUSED = InputError("picture 3", expected="a picture", got="noise", fix="Remove it.")


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([token_ids(), BAD], "`batches`, batch 2: .*IndexError"),
        (raising(OSError("disk gone")), "batch 2: expected a batch, got OSError: disk gone"),
        (raising(REFUSED), "picture 3"),
    ],
    ids=["forward", "reading", "own error"],
)
def test_a_failure_names_its_batch_and_keeps_earlier_batches(batches: Any, message: str) -> None:
    with pytest.raises(AuditError, match=message) as caught:
        rw.audit(bert(), batches)
    partial = caught.value.audit
    assert (partial.complete, partial.heads[0].sequences) == (False, 2)
    with pytest.raises(InputError, match=r"`batches`, batch 1: .*IndexError"):
        rw.audit(bert(), [BAD])


def test_a_device_that_fails_loses_no_finished_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """After such an error, a weight can no longer be read."""
    model, calls, whole = bert(), list[int](), rw.audit(bert(), [token_ids()])

    def lose(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def digest(model: nn.Module) -> str:
        if len(calls) == 2:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return weights_digest(model)

    model.register_forward_pre_hook(lose)
    monkeypatch.setattr("rankwise.auditing.run.weights_digest", digest)
    with pytest.raises(AuditError, match=r"batch 2: .*CUDA error.* start a new process") as caught:
        rw.audit(model, [token_ids()] * 2)
    assert compared(caught.value.audit, whole, {"complete", "model"}) == []


def test_a_batch_counts_if_it_is_whole_except_the_first() -> None:
    model = bert()
    calls: list[int] = []

    def interrupt(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(len(calls))
        if calls[-1] == failing:
            raise KeyboardInterrupt

    model.encoder.layer[2].register_forward_hook(interrupt)
    failing = 1
    audit = rw.audit(model, [token_ids(), token_ids()])
    assert {head.sequences for head in audit.heads} == {audit.provenance.sequences} == {2}
    calls, failing = [], 0
    audit = rw.audit(model, [token_ids(), token_ids()])
    assert {head.layer for head in audit.heads} == {0, 1}
    assert not audit.complete


@pytest.mark.parametrize(
    ("model", "batches", "options", "error", "message"),
    [
        (bert, [], {}, InputError, "at least one batch"),
        (lambda: nn.Linear(4, 4), [torch.randn(2, 4)], {}, CaptureError, "Name them by hand"),
        (bert, [token_ids()], {"delta": 0.0}, RankwiseError, "delta"),
        (
            GivenAttention,
            [torch.randn(1, 2, 9, 4), torch.randn(1, 3, 9, 4)],
            {},
            RankwiseError,
            "expected 2, as in the sequences before, got 3",
        ),
    ],
    ids=["no batch", "no mixer", "delta", "another number of heads"],
)
def test_an_audit_without_a_result_is_refused(
    model: Any, batches: Any, options: dict[str, float], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rw.audit(model(), batches, **options)


@pytest.mark.parametrize("labelled", [False, True])
def test_an_audit_computes_logits_only_if_the_model_computes_a_loss(labelled: bool) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model, lengths = LlamaForCausalLM(config).eval(), list[int]()
    model.lm_head.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
    ids = token_ids()["input_ids"]
    batch = {"input_ids": ids, "labels": ids} if labelled else {"input_ids": ids}
    found = rw.audit(model, [batch])
    assert lengths == [ids.shape[1] if labelled else 1]
    bare = rw.audit(model.model, [{"input_ids": ids}])
    assert [head.effective_rank for head in found.heads] == [head.effective_rank for head in bare.heads]


@pytest.mark.parametrize("known", [True, False], ids=["list", "generator"])
def test_progress_names_batch_and_module_and_the_share_grows(known: bool) -> None:
    steps: list[tuple[str, float]] = []
    given = [token_ids()] * 2
    batches = given if known else (batch for batch in given)
    rw.audit(nano_gpt(), batches, on_progress=lambda step, done: steps.append((step, done)))
    total = " of 2" if known else ""
    assert steps[-1][0] == f"batch 2{total}: transformer.h.2"
    first, second = ([done for step, done in steps if step.startswith(f"batch {n}{total}")] for n in (1, 2))
    assert [first, second] == [sorted(first), sorted(second)]
    assert 0 <= min(first) < max(first) <= (0.5 if known else 1)
    if known:
        assert second == pytest.approx([share + 0.5 for share in first])
    else:
        assert second == first


def test_functions_keep_their_names_after_imports_of_modules() -> None:
    import rankwise.auditing.records
    import rankwise.tracing.module_calls  # noqa: F401

    assert callable(rw.audit)
    assert callable(rw.capture)


def test_stacks_that_alternate_are_distinguished() -> None:
    """Blocks of the first shrink differences between tokens."""

    def alternate(self: Any, x: Tensor) -> Tensor:
        y = x
        for left, right in zip(self.left, self.right, strict=True):
            x, y = left(x), right(y)
        return x + y

    def blocks(skip: float, strength: float) -> nn.ModuleList:
        return nn.ModuleList([Average(skip, strength) for _ in range(3)])

    model = kind(alternate, left=lambda: blocks(0.05, 1.0), right=lambda: blocks(1.0, 0.01))()
    collapsed = findings(rw.audit(model, [torch.randn(2, 12, 8) + 1]), "COLLAPSE")
    assert [finding.where.stack for finding in collapsed] == ["left"]


def test_the_random_rank_needs_queries_and_keys() -> None:
    keys = torch.eye(64)[None, None]
    identity = rw.audit(GivenAttention(), [(100 * keys, keys)]).heads[0]
    assert identity.numerical_rank == 64
    assert identity.random_rank == pytest.approx(random_head_rank(64, 64).mean)
    bloom = hugging_face("BloomModel", vocab_size=64, hidden_size=32, n_layer=1, n_head=4)()
    assert math.isnan(rw.audit(bloom, [token_ids()]).heads[0].random_rank)


def test_modules_of_one_head_in_a_list_are_heads_of_one_layer() -> None:
    block = kind(
        lambda self, x: x + torch.cat([head(x) for head in self.heads], dim=-1),
        heads=lambda: nn.ModuleList([Head(8) for _ in range(3)]),
    )
    heads = rw.audit(nn.Sequential(block(), block()), [torch.randn(2, 12, 24)]).heads
    assert [(head.layer, head.head) for head in heads] == [(at, of) for at in range(2) for of in range(3)]
    assert heads[0].site == "0.heads.*"


class Encoders(nn.Module):
    """Encoder that runs once, or again in the same pass on the tokens in reverse order."""

    def __init__(self, encoder: nn.Module, twice: bool) -> None:
        super().__init__()
        self.encoder, self.twice = encoder, twice

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x) + self.encoder(x.flip(1)) if self.twice else self.encoder(x)


def test_a_second_run_of_a_stack_in_a_pass_is_measured_as_another_batch() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 9, 8)
    twice = rw.audit(Encoders(encoder, True), [x])
    batches = rw.audit(Encoders(encoder, False), [x, x.flip(1)])
    assert math.isnan(twice.states[0].relative_update)
    for field in ("states", "heads"):
        assert differences(twice.model_dump()[field], batches.model_dump()[field]) == []


def test_each_call_of_a_module_in_a_layer_has_its_own_records() -> None:
    torch.manual_seed(0)

    def attend_twice(self: Any, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        return x + self.attention(3 * x, 3 * x, x)[0]

    block = kind(attend_twice, attention=lambda: nn.MultiheadAttention(8, 2, batch_first=True))
    audit = rw.audit(nn.Sequential(block(), block()), [torch.randn(2, 9, 8)])
    own = [one for one in audit.heads if one.layer == 0]
    assert [(one.call, one.head) for one in own] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert own[0].effective_rank != own[2].effective_rank
    means = {(key.measure, key.layer): mean for key, (mean, _) in layer_means(audit).items()}
    assert means["row_entropy", 0] == pytest.approx(sum(one.row_entropy for one in own) / 4)
