"""A baseline measures the same architecture at initialization, on the same data, per head and layer."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from experiments.zoo.transformers import BERT, hugging_face
from tests.support.documents import audit_document
from tests.support.modules import kind, token_ids
from tests.support.untouched import state_of
from tests.unchecked import unchecked
from torch import Tensor, nn

import rankwise as rw
from rankwise.auditing import AtInitSettings, AuditError, InitializationError, initialization, reinitialized
from rankwise.errors import InputError, RankwiseError

DELTA = 0.05
INTEGERS = nn.Parameter(torch.ones(16, 8, dtype=torch.int8), requires_grad=False)


def layer() -> nn.Module:
    torch.manual_seed(7)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


def batches(tokens: tuple[int, ...] = (32, 40)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, length, 8, generator=generator) for length in tokens]


def test_the_page_shows_the_mean_and_spread_over_seeds() -> None:
    audit = rw.audit(layer(), batches(), DELTA, at_init=3)
    columns = {column["name"]: column for column in audit_document(audit).data["columns"]}
    stable, rank = columns["init_stable_rank"], columns["init_numerical_rank"]
    drawn = [head.at_init for head in audit.heads]
    assert stable["values"] == pytest.approx([one.mean["stable_rank"] for one in drawn], 1e-5)
    assert stable["spread"] == pytest.approx([one.seed_std["stable_rank"] for one in drawn], 1e-5)
    shares = [head.at_init.seed_std["numerical_rank"] / head.full_rank for head in audit.heads]
    assert rank["spread"] == pytest.approx(shares, 1e-5)
    assert (stable["over_seeds"], columns["stable_rank"]["over_seeds"]) == (True, False)


def test_numbers_equal_audits_of_reinitialized_copies() -> None:
    model = layer()
    audit = rw.audit(model, batches(), DELTA, at_init=3)
    drawn = [rw.audit(reinitialized(model, seed=seed), batches(), DELTA) for seed in range(3)]
    assert audit.at_init is not None
    assert audit.at_init.seeds == [0, 1, 2]
    for at, head in enumerate(audit.heads):
        for name in ("numerical_rank", "effective_rank", "row_entropy", "nearest_head_distance"):
            values = np.array([getattr(one.heads[at], name) for one in drawn])
            assert head.at_init.mean[name] == pytest.approx(values.mean(), rel=1e-12)
            assert head.at_init.seed_std[name] == pytest.approx(values.std(ddof=1), rel=1e-9)
        spectra = np.mean([one.heads[at].spectrum for one in drawn], axis=0)
        np.testing.assert_allclose(head.at_init.spectrum, spectra, rtol=1e-12)
    for at, state in enumerate(audit.states):
        values = np.array([one.states[at].spread for one in drawn])
        assert state.at_init.mean["spread"] == pytest.approx(values.mean(), rel=1e-12)
        std = state.at_init.seed_std["spread"]
        assert std == pytest.approx(values.std(ddof=1), rel=1e-9, abs=1e-15)


def test_a_initialization_does_not_change_the_numbers_of_the_model() -> None:
    model = layer()
    plain, with_it = rw.audit(model, batches()), rw.audit(model, batches(), at_init=2)
    for one, other in zip(plain.heads, with_it.heads, strict=True):
        assert one.model_dump_json(exclude={"at_init"}) == other.model_dump_json(exclude={"at_init"})
    assert plain.at_init is None
    assert all(one.at_init is None for one in plain.heads)


@pytest.mark.parametrize("training", [False, True])
def test_model_and_random_state_are_untouched(training: bool) -> None:
    model = layer().train(training)
    torch.manual_seed(3)
    rw.audit(model, batches())
    wanted = torch.rand(4)
    torch.manual_seed(3)
    before = state_of(model) | {"torch's random state": 0}
    audit = rw.audit(model, batches(), at_init=2)
    assert torch.equal(torch.rand(4), wanted)
    assert state_of(model) | {"torch's random state": 0} == before
    again = rw.audit(model, batches(), at_init=2)  # in training mode, too: dropout has the seed's state
    assert [one.at_init for one in again.heads] == [one.at_init for one in audit.heads]


def test_one_copy_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[nn.Module]] = []
    most = 0
    made = initialization.reinitialized

    def counted(*given, **named) -> nn.Module:
        nonlocal most
        gc.collect()
        most = max(most, sum(one() is not None for one in alive))
        copied = made(*given, **named)
        alive.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(initialization, "reinitialized", counted)
    rw.audit(layer(), batches(), at_init=3)
    assert len(alive) == 4  # the first is built twice: before anything is measured, and to be measured
    assert most == 0


def test_batches_may_be_an_iterator() -> None:
    audit = rw.audit(layer(), iter(batches()), at_init=2)
    wanted = rw.audit(layer(), batches(), at_init=2)
    assert [head.at_init for head in audit.heads] == [head.at_init for head in wanted.heads]


# Has a weight that no method draws.
WithTable = kind(
    lambda self, x: self.inside(x + self.table), inside=layer, table=lambda: nn.Parameter(torch.randn(8))
)


def test_a_function_of_a_seed_may_build_the_copies() -> None:
    seen = []

    def build(seed: int) -> nn.Module:
        seen.append(seed)
        return WithTable()

    audit = rw.audit(WithTable(), batches(), at_init=AtInitSettings(2, build))
    assert seen == [0, 0, 1]
    assert audit.at_init.built == "by the function given"
    assert rw.audit(WithTable(), batches(), at_init=build).at_init.seeds == [0, 1, 2]


def test_a_transformers_model_is_built_from_its_configuration() -> None:
    audit = rw.audit(hugging_face("BertModel", **BERT)(), [token_ids()], at_init=2)
    assert audit.at_init.built == "from its configuration"
    assert all(head.at_init.seeds == 2 for head in audit.heads)
    loaded = rw.Audit.model_validate_json(audit.model_dump_json())
    assert loaded.heads[0].at_init == audit.heads[0].at_init


def test_padding_does_not_change_the_initialization() -> None:
    model, ids = hugging_face("BertModel", **BERT)(), token_ids()["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    padded = rw.audit(model, [{"input_ids": ids, "attention_mask": mask}], at_init=2)
    alone = rw.audit(model, [{"input_ids": ids[:1]}, {"input_ids": ids[1:, :9]}], at_init=2)
    for one, other in zip(padded.heads, alone.heads, strict=True):
        for name, value in one.at_init.mean.items():
            assert value == pytest.approx(other.at_init.mean[name], rel=1e-4, abs=1e-5, nan_ok=True), name


@pytest.mark.parametrize("wanted", [0, -1, "yes", 2.5, None, AtInitSettings(0), layer()], ids=str)
def test_other_values_of_initialization_are_refused(wanted: object) -> None:
    with unchecked(), pytest.raises(InputError, match="at_init"):
        rw.audit(layer(), batches(), at_init=wanted)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model, "is_quantized", True), "quantized"),
        (lambda model: setattr(model, "hf_device_map", {"a": 0, "b": "cpu"}), "more than one device"),
        (lambda model: model.to("meta"), "not in memory"),
        (lambda model: setattr(model.linear1, "weight", INTEGERS), "int8"),
        (lambda model: setattr(model, "extra", nn.Parameter(torch.ones(1))), r"'extra'.*at_init=build"),
    ],
)
def test_a_model_that_cannot_be_reinitialized_is_refused_before_it_runs(change, reason: str) -> None:
    calls = []
    model = layer()
    change(model)
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(InitializationError, match=reason):
        rw.audit(model, batches(), at_init=True)
    assert not calls


def test_a_copy_that_fails_keeps_the_audit_of_the_model() -> None:
    class Failing(nn.TransformerEncoderLayer):
        def forward(self, *given, **named) -> Tensor:
            raise RuntimeError("no such kernel")

    def build(seed: int) -> nn.Module:
        return Failing(8, 2, 16, batch_first=True)

    with pytest.raises(AuditError, match="no such kernel") as caught:
        rw.audit(layer(), batches(), at_init=build)
    assert len(caught.value.audit.heads) == 2
    assert isinstance(caught.value, RankwiseError)


def test_ctrl_c_keeps_finished_seeds() -> None:
    def progress(step: str, done: float) -> None:
        if step.startswith("copy 2 of 3"):
            assert done >= 1 / 3
            raise KeyboardInterrupt

    audit = rw.audit(layer(), batches(), at_init=3, on_progress=progress)
    assert audit.at_init.seeds == [0]
    assert audit.heads[0].at_init.seeds == 1
    assert "1 seeds at initialization only: interrupted from the keyboard" in audit.provenance.notes
    assert not audit.complete


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiling_does_not_change_the_initialization() -> None:
    model = layer()
    plain = rw.audit(model, batches(), at_init=2)
    compiled = rw.audit(torch.compile(copy.deepcopy(model)), batches(), at_init=2)
    assert [one.at_init for one in compiled.heads] == [one.at_init for one in plain.heads]
    assert compiled.heads[0].at_init is not None
