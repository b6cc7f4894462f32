"""A COLLAPSE of a ToST model whose own λ is not 1: what is named was tried, and repairs."""

from typing import Any

import pytest
import torch
from experiments.tiny_models import text_inputs
from tests.auditing.fingerprint import fingerprint
from torch import nn

import rankwise as rw
from rankwise.auditing import Finding
from rankwise.models import ToSTConfig, ToSTForCausalLM
from rankwise.skips import LambdaSkip
from rankwise.skips import own_skips as own

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}


def collapsed(**settings: Any) -> ToSTForCausalLM:
    torch.manual_seed(0)
    return ToSTForCausalLM(ToSTConfig(**SIZES, layer_types="softmax", **settings)).eval()


BATCH = text_inputs()


def collapse_of(model: nn.Module, advised: bool = True) -> list[Finding]:
    audit = rw.audit(model, [BATCH])
    found = rw.skips.recommend(audit, model, BATCH).findings if advised else audit.findings
    return [one for one in found if one.code == "COLLAPSE"]


@pytest.mark.parametrize(
    ("skip", "init", "words", "repaired"),
    [
        ("fixed", 0.01, 'put `"skip_init": 1` into', {"skip": "fixed", "skip_init": 1.0}),
        ("fixed", -0.01, 'put `"skip_init": -1` into', {"skip": "fixed", "skip_init": -1.0}),
        ("none", 1.0, 'put `"skip": "fixed", "skip_init": 1` into', {"skip": "fixed", "skip_init": 1.0}),
    ],
)
def test_a_skip_of_the_configuration_is_named_there_and_repairs(
    skip: str, init: float, words: str, repaired: dict[str, Any]
) -> None:
    model = collapsed(skip=skip, skip_init=init)
    before = fingerprint(model)
    (finding,) = collapse_of(model)
    assert fingerprint(model) == before
    assert finding.remedy.startswith(words)
    other = collapsed(**repaired)
    other.load_state_dict(model.state_dict())
    assert collapse_of(other, advised=False) == []


@pytest.mark.parametrize("skip", ["learned", "channel"])
def test_learned_scales_are_named_by_their_weights(skip: str) -> None:
    model = collapsed(skip=skip, skip_init=0.01)
    skips = {name: one for name, one in model.named_modules() if isinstance(one, LambdaSkip)}
    last = list(skips)[-1]
    with torch.no_grad():
        skips[last].weight.fill_(3)
    (finding,) = collapse_of(model)
    first = f"{next(iter(skips))}.weight"
    wanted = f"raise |λ| below 1 to 1 in the learned `{first}` and {len(skips) - 2} more: an audit with it"
    assert finding.remedy.startswith(wanted)
    with torch.no_grad():
        for name, one in skips.items():
            assert one.weight.eq(3 if name == last else 0.01).all()
            one.weight.clamp_(min=1)
    assert collapse_of(model, advised=False) == []


def test_where_no_scale_that_is_tried_repairs_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "TRIED", (0.005, 0.02))
    model = collapsed(skip_init=0.01)
    audit = rw.skips.recommend(rw.audit(model, [BATCH]), model, BATCH)
    (finding,) = [one for one in audit.findings if one.code == "COLLAPSE"]
    assert finding.remedy.startswith("train it with a larger `skip_init`: an audit with |λ| = 0.02 still")
    assert [note.count("|λ| ≥") for note in audit.provenance.notes if "ran again" in note] == [1]


def test_a_plain_skip_is_none_of_its_own() -> None:
    assert own.own_skips(collapsed()) == {}
    assert len(own.own_skips(collapsed(skip="learned"))) == SIZES["num_hidden_layers"]


def test_scales_are_raised_with_their_sign_and_large_ones_stay() -> None:
    skip = LambdaSkip(3, "channel")
    with torch.no_grad():
        skip.weight.copy_(torch.tensor([-0.5, 3.0, 0.0]))
    x, update = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    with own.at_least({"": skip}, 2.0):
        assert torch.equal(skip(x, update), torch.tensor([-2.0, 3.0, 2.0]) * x + update)
    assert torch.equal(skip(x, update), torch.tensor([-0.5, 3.0, 0.0]) * x + update)
