"""An audit runs each batch once and leaves the model unchanged, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import BERT, hugging_face, nano_gpt
from tests.support.modules import token_ids
from tests.support.untouched import untouched
from torch import Tensor, nn

import rankwise as rw
from rankwise.auditing import AuditError


def ids() -> list[dict[str, Tensor]]:
    return [token_ids(seed=seed) for seed in range(3)]


def collapsing() -> nn.Module:
    """Return a BERT in which every token gets a multiple of the mean."""
    model = hugging_face("BertModel", **BERT)()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "self.query" in name:
                weight.zero_()
            if "self.value.weight" in name or "attention.output.dense.weight" in name:
                weight *= 50
    return model


def with_skips() -> nn.Module:
    model = hugging_face("BertModel", **BERT)()
    rw.add_lambda_skip(model, init=3)
    return model


def closed() -> nn.Module:
    """Return a DINOv2 with a LayerScale of −0 in a layer."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28}
    model = hugging_face("Dinov2Model", **sizes, patch_size=7)()
    with torch.no_grad():
        model.get_parameter("encoder.layer.1.layer_scale1.lambda1").fill_(-0.0)
    return model


def in_training() -> nn.Module:
    return hugging_face(
        "BertModel", **BERT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )().train()


def mamba() -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4}
    return hugging_face("MambaModel", **sizes)()  # 16 channels, each with a matrix of its own


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]]]] = {
    "collapsing": (collapsing, ids),
    "skips": (with_skips, ids),
    "closed LayerScale": (closed, lambda: [torch.randn(2, 3, 28, 28) for _ in range(2)]),
    "training": (in_training, ids),
    "mamba": (mamba, ids),
    "nano": (nano_gpt, ids),
}


@pytest.mark.parametrize("method", ["exact", "estimate"])
@pytest.mark.parametrize("name", MODELS)
def test_each_batch_runs_once_and_nothing_changes(name: str, method: Any) -> None:
    model, batches = (make() for make in MODELS[name])
    runs: list[Any] = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    torch.manual_seed(5)
    with untouched(model):
        audit = rw.audit(model, batches, rank_method=method)
    assert len(runs) == len(batches) == audit.provenance.batches


FIRST_RUNS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "audit": lambda model, batch: rw.audit(model, [batch], importance="exact"),
    "monitor": lambda model, batch: [rw.RankMonitor(batch, every=1).step(model, step) for step in range(2)],
    "skips": lambda model, batch: rw.remove_lambda_skip(
        rw.add_lambda_skip(model, 1.0, example=batch) and model
    ),
    "certify": lambda model, batch: rw.certify_skip(model, batch),
}


@pytest.mark.parametrize("use", FIRST_RUNS)
def test_hooks_of_a_first_run_are_not_left_without_their_flag(use: str) -> None:
    """transformers adds hooks that record hidden states at the first run, and notes this in an attribute."""
    model, batch = hugging_face("BertModel", **BERT, output_hidden_states=True)(), token_ids()
    with untouched(model):
        FIRST_RUNS[use](model, batch)
    with torch.no_grad():
        assert len(model(**batch).hidden_states) == 4


def test_the_models_of_these_tests_collapse_or_have_skips() -> None:
    assert "COLLAPSE" in {one.code for one in rw.audit(collapsing(), ids()).findings}
    assert rw.skips.skips_of(with_skips())


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_an_audit_that_stops_leaves_the_model_alone(error: BaseException) -> None:
    model = with_skips()
    block = model.encoder.layer[2]
    runs: list[int] = []

    def fail(*_: Any) -> None:
        runs.append(1)
        if len(runs) == 2:
            raise error

    block.register_forward_pre_hook(fail)
    batches = ids()
    with untouched(model):
        if isinstance(error, KeyboardInterrupt):
            assert not rw.audit(model, batches).complete
        else:
            with pytest.raises(AuditError):
                rw.audit(model, batches)


def test_an_invalid_provenance_is_refused_before_the_model_runs() -> None:
    runs: list[int] = []
    model = nano_gpt()
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    for given in ({"modell": "x"}, {"model": 7}, {"notes": "no list"}):
        with pytest.raises(rw.errors.InputError, match="`provenance`: expected fields"):
            rw.audit(model, ids(), provenance=given)
    assert runs == []
