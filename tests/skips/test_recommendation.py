"""`choose_lambda` and `recommend`: the chosen λ removes COLLAPSE, and suppressed mixers are found."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import BERT, hugging_face, text_inputs
from tests.support.modules import Apply, Average, Block, Stack
from tests.support.records import advice
from tests.support.untouched import untouched
from tests.unchecked import unchecked
from torch import Tensor, nn

import rankwise as rw
from rankwise.auditing import Finding, Provenance, Remedy
from rankwise.auditing.findings import INACTIVE_TURN
from rankwise.errors import InputError, SkipError
from rankwise.models import ToSTConfig, ToSTForCausalLM
from rankwise.skips import LambdaSkip, choose_lambda, recommendation
from rankwise.skips.observe import lambdas_of, places_in, with_lambdas
from rankwise.tracing import Address

bert = hugging_face("BertModel", **BERT)
TOKENS = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
START = TOKENS + 1


def advised(model: nn.Module, batch: Any = START, **provenance: Any) -> rw.Audit:
    return rw.skips.recommend(rw.audit(model, [batch], provenance=provenance), model, batch)


def collapse_of(audit: rw.Audit) -> list[Finding]:
    return [finding for finding in audit.findings if finding.code == "COLLAPSE"]


def inactive(audit: rw.Audit) -> list[str]:
    return [finding.where.site for finding in audit.findings if finding.code == "INACTIVE_BLOCK"]


def follow(finding: Finding, model: nn.Module, batch: Any = START) -> None:
    """Run the Python code of a remedy."""
    assert finding.remedy is not None
    exec(finding.remedy.code, {"rw": rw, "model": model, "batch": batch})


def averaging(strength: float = 0.3, blocks: int = 6) -> nn.Module:
    """Return blocks that divide μ/‖Y‖ by about 1 + strength at λ = 1."""
    return Stack(Average(strength=strength) for _ in range(blocks)).eval()


def pre_norm(blocks: int = 1) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True) for _ in range(blocks)]
    return Stack(layers).eval()


def fill(skips: rw.skips.Skips, values: list[float]) -> None:
    with torch.no_grad():
        for skip, value in zip(skips.values(), values, strict=True):
            skip.fill_(value)


# --- choice ----------------------------------------------------------------------------------------------


def test_the_least_lambda_without_a_collapse_is_chosen(device: torch.device) -> None:
    model, start = averaging(1.0).to(device), START.to(device)
    choice = choose_lambda(model, start, "blocks")
    assert choice.removes_collapse
    assert [value for value, _ in choice.tried] == [1.0, 2.0, 4.0, 8.0, 16.0][: len(choice.tried)]
    for value, lowest in choice.tried:
        skips = rw.add_lambda_skip(model, init=value, example=start)
        assert choice.sites == list(skips)
        audit = rw.audit(model, [start])
        apart = min(recommendation.APART, audit.states[0].direction_spread / 2)
        assert (lowest >= apart) == (value == choice.value)
        assert not (lowest >= apart and collapse_of(audit))
        assert lowest == pytest.approx(min(one.direction_spread for one in audit.states[1:]), rel=1e-5)
        rw.remove_lambda_skip(model)


@pytest.mark.parametrize("value", [3.0, -8.0, 40.0])
def test_the_lambda_that_is_set_is_not_undercut(value: float) -> None:
    """The statement "an audit with |λ| ≥ value finds no COLLAPSE" was tried, not only for the present λ."""
    model = averaging(0.1)
    skips = rw.add_lambda_skip(model, init=value, example=START)
    choice = choose_lambda(model, START, "blocks")
    assert (choice.value, [tried for tried, _ in choice.tried]) == (abs(value), [abs(value)])
    fill(skips, [value, 2 * value] + [16.0] * 4)
    assert choose_lambda(model, START, "blocks").value == min(abs(value), 16)


def test_no_lambda_is_named_if_every_lambda_collapses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommendation, "TRIED", (0.25, 0.5))
    model = averaging(2.0)
    rw.add_lambda_skip(model, init=0.1, example=START)
    choice = choose_lambda(model, START, "blocks")
    assert (choice.value, choice.removes_collapse, choice.advice) == (None, False, recommendation.UNHELPFUL)
    assert [value for value, _ in choice.tried] == [0.25, 0.5]
    (finding,) = collapse_of(advised(model))
    assert (
        "no |λ| up to 0.5 keeps the direction spread above 0.1, and no λ is named. Proved" in finding.meaning
    )
    assert finding.remedy == Remedy(words=choice.advice)
    assert "lambda_tried" not in finding.evidence
    assert finding.evidence["direction_spread_lowest_tried"] == max(lowest for _, lowest in choice.tried)
    rw.skips.remove_lambda_skip(model)
    rw.add_lambda_skip(model, init=0.5, example=START)
    (after,) = collapse_of(rw.audit(model, [START]))
    lowest = finding.evidence["direction_spread_lowest_tried"]
    rounding = 16 * torch.finfo(torch.float32).eps  # of states whose differences are of this order
    assert after.evidence["direction_spread_lowest"] == pytest.approx(lowest, abs=rounding)
    assert lowest > 10 * rounding


def test_a_comparison_to_pre_norm_is_the_advice_for_post_norm_that_no_lambda_helps() -> None:
    torch.manual_seed(0)

    def post(strength: float) -> nn.Module:
        return Block(Average(strength=strength), after=nn.LayerNorm(8))

    model = Stack(nn.Sequential(post(-0.5), Apply(pooled)) for _ in range(8)).eval()
    (finding,) = collapse_of(advised(model))
    assert finding.remedy == Remedy(words=recommendation.UNTRIED)


class Bytes(nn.Module):
    """Layers of PyTorch over bytes, with weights of a standard deviation of 0.2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
        self.embed = nn.Embedding(256, 64)
        self.layers = nn.ModuleList(deepcopy(layer) for _ in range(12))
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.embed(x), nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return x


@pytest.mark.parametrize("deep", [True, False])
def test_nothing_more_is_advised_after_the_advice_is_followed(deep: bool) -> None:
    batch = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0)) if deep else START
    model = Bytes().eval() if deep else averaging(1.0)
    (finding,) = collapse_of(advised(model, batch))
    follow(finding, model, batch)
    again = advised(model, batch)
    assert collapse_of(again) == []
    assert inactive(again) == []
    assert not any("skip" in action or "norm" in action for action in again.verdict.actions)


def test_a_lambda_that_suppresses_mixers_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = averaging(1.0)
    assert choose_lambda(model, START, "blocks").value is not None
    monkeypatch.setattr(recommendation, "TRIED", (10_000.0,))
    other = choose_lambda(model, START, "blocks")
    assert (other.value, other.removes_collapse) == (None, True)
    assert "|λ| = 10000 removes COLLAPSE, but suppresses 6 mixers, and no λ is named" in other.summary
    rw.add_lambda_skip(model, init=10_000, example=START)
    assert inactive(advised(model)) == [f"blocks.{layer}" for layer in range(6)]


@pytest.mark.parametrize("norm_first", [True, False], ids=["no norm after the sum", "norm"])
def test_the_proved_lambda_is_the_largest_bound_of_the_layers(norm_first: bool) -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(block, 3, enable_nested_tensor=False).eval()
    choice, layers = choose_lambda(model, TOKENS, "layers"), rw.certify_skip(model, TOKENS).layers
    name = "min_lambda_proved_relative" if norm_first else "min_lambda_proved"  # COLLAPSE is about μ/‖Y‖
    assert {layer.norm for layer in layers} == {"none" if norm_first else "LayerNorm"}
    assert choice.proved == max(getattr(layer, name) for layer in layers)
    if not norm_first:  # channels with different λ before a norm have no bound
        skips = rw.add_lambda_skip(model, per="channel", example=TOKENS)
        assert choose_lambda(model, TOKENS, "layers").proved == pytest.approx(choice.proved)
        with torch.no_grad():
            skips[list(skips)[1]].copy_(torch.linspace(1, 20, 8))
        assert choose_lambda(model, TOKENS, "layers").proved is None


def test_the_mixing_share_decreases_with_lambda(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shares = averaging(), []
    for value in (1.0, 100.0):
        monkeypatch.setattr(recommendation, "TRIED", (value,))
        shares.append(choose_lambda(model, START, "blocks").mixing_share)
    assert 0 < 20 * shares[1] < shares[0]


@pytest.mark.parametrize("per", ["layer", "channel"])
def test_trials_raise_smaller_lambdas_and_keep_signs(per: Any) -> None:
    model = averaging()
    skips = rw.add_lambda_skip(model, per=per, example=START)
    fill(skips, [-0.5, 0.0, 3.0, -3.0, 0.5, 1.0])
    places = list(skips.places.values())
    raised = recommendation.raise_lambdas(lambdas_of(model, places), 2.0)
    with untouched(model), with_lambdas(model, places, raised), torch.no_grad():
        tried = model(START)
    fill(skips, [-2.0, 2.0, 3.0, -3.0, 2.0, 2.0])  # 0 counts as positive
    torch.testing.assert_close(model(START), tried)


def test_a_stack_that_the_model_does_not_have_is_refused() -> None:
    for model in (averaging(), Stack([Average(0.01)]).eval()):  # the second has no residual connection
        with pytest.raises(InputError, match="`stack`"):
            choose_lambda(model, START, "others")


def test_a_model_without_a_stack_is_refused() -> None:
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 8)
    for model, stack in ((layer, "layers"), (Apply(layer), "function")):  # with a site under the name
        with untouched(model), pytest.raises(InputError, match="expected a stack of blocks, got none"):
            choose_lambda(model, x, stack)


def test_states_that_are_not_finite_are_refused() -> None:
    model = averaging()
    with torch.no_grad():
        model.blocks[1].attention.out_proj.weight[0, 0] = math.inf
    with pytest.raises(SkipError, match="finite"):
        choose_lambda(model, START, "blocks")


# --- remedies --------------------------------------------------------------------------------------------


def test_the_finding_states_trial_and_proof_and_its_remedy_removes_collapse() -> None:
    model = averaging(1.0)
    audit = advised(model)
    (finding,) = collapse_of(audit)
    choice = choose_lambda(model, START, finding.where.stack)
    assert finding.evidence["lambda_tried"] == choice.value
    assert finding.evidence["lambda_proved"] == choice.proved
    assert finding.evidence["mixing_share"] == choice.mixing_share
    assert finding.evidence["direction_spread_lowest_tried"] == choice.tried[-1][1]
    assert f"|λ| = {choice.value:g} removes COLLAPSE" in finding.meaning
    assert finding.meaning.endswith("Nothing is known about training with such a λ.")
    assert recommendation.TRAINS in audit.provenance.notes
    assert rw.skips.recommend(audit, model, START) == audit
    follow(finding, model)
    assert collapse_of(rw.audit(model, [START])) == []


@pytest.mark.parametrize("per", ["layer", "channel"])
def test_smaller_lambdas_of_a_model_are_raised_by_hand(per: Any) -> None:
    model = averaging(0.1)
    skips = rw.add_lambda_skip(model, per=per, example=START)
    fill(skips, [0.01, -0.02, 0.01, -0.01, 5.0, 5.0])
    (finding,) = collapse_of(advised(model))
    value, site = finding.evidence["lambda_tried"], next(iter(skips))
    where = f"`rw.skips.skips_of(model)[{site!r}].data` and 3 more"
    assert advice(finding) == f"raise |λ| below {value:g} to {value:g}, with its sign, in {where}"
    for skip in skips.values():
        skip.data = torch.where(skip < 0, -1, 1) * skip.abs().clamp(min=value)
    assert collapse_of(rw.audit(model, [START])) == []


class TwoStacks(nn.Module):
    """Run two stacks; the second collapses, and the first only with ``both``."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.first = averaging(1.0).blocks if both else averaging(0.05, blocks=2).blocks
        self.second = averaging(1.0).blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.first, *self.second):
            x = block(x)
        return x


def test_the_remedy_for_one_of_two_stacks_names_the_stack() -> None:
    model = TwoStacks().eval()
    (finding,) = collapse_of(advised(model))
    value, by_command = (
        finding.evidence["lambda_tried"],
        Provenance(model="m", delta=0.01, arguments=[["net"]]),
    )
    command = f"rankwise skip net --lambda {value:g} --sites second --out net-skips"
    code = f"rw.add_lambda_skip(model, init={value:g}, sites=['second'], example=batch)"
    assert advice(finding, by_command) == f"add the smallest λ that keeps tokens apart: `{command}`"
    assert advice(finding) == f"add the smallest λ that keeps tokens apart: `{code}`"
    follow(finding, model)
    assert list(rw.skips.skips_of(model)) == choose_lambda(model, START, "second").sites
    assert collapse_of(rw.audit(model, [START])) == []


@pytest.mark.parametrize("per", ["layer", "channel"])
def test_a_stack_without_skips_gets_a_remedy_although_another_stack_has_skips(per: Any) -> None:
    model = TwoStacks().eval()
    fitted = rw.add_lambda_skip(model, init=3, per=per, sites="first", example=START)
    (finding,) = collapse_of(advised(model))
    follow(finding, model)
    skips = rw.skips.skips_of(model)
    assert {name.partition(".")[0] for name in skips} == {"first", "second"}
    assert all(skips[name] is value and value.eq(3).all() for name, value in fitted.items())
    assert collapse_of(rw.audit(model, [START])) == []


def test_remedies_of_two_stacks_work_in_any_order() -> None:
    original = TwoStacks(both=True).eval()
    findings = collapse_of(advised(original))
    assert {one.where.stack for one in findings} == {"first", "second"}
    for order in (findings, findings[::-1]):
        model = deepcopy(original)
        for one in order:
            follow(one, model)
        skips = rw.skips.skips_of(model)
        for one in findings:
            sites = [f"{one.where.stack}.{at}.attention" for at in range(6)]
            assert [float(skips[name].detach()) for name in sites] == [one.evidence["lambda_tried"]] * 6
        assert list(skips) == [f"{stack}.{at}.attention" for stack in ("first", "second") for at in range(6)]
        assert collapse_of(rw.audit(model, [START])) == []


def pooled(x: Tensor) -> Tensor:
    """Move tokens toward their mean between the mixers, where λ has no effect."""
    return x.mean(1, keepdim=True) + 0.3 * (x - x.mean(1, keepdim=True))


@pytest.mark.parametrize("existing", [None, 20.0], ids=["plain", "above every trial"])
def test_no_lambda_is_named_if_no_larger_one_helps(existing: float | None) -> None:
    model = Stack(nn.Sequential(Average(strength=-0.5), Apply(pooled)) for _ in range(8)).eval()
    if existing is not None:
        rw.add_lambda_skip(model, init=existing, example=START)
    (finding,) = collapse_of(advised(model))
    assert "no |λ| up to 16 keeps the direction spread above 0.1, and no λ is named." in finding.meaning
    assert finding.remedy == Remedy(words=recommendation.UNHELPFUL)
    for part in model.blocks:
        part[1] = nn.Identity()
    assert collapse_of(rw.audit(model, [START])) == []


def test_a_batch_without_collapse_gets_another_remedy_than_the_audit() -> None:
    model = averaging(2.0)
    centred = TOKENS[:1] - TOKENS[:1].mean(1, keepdim=True)
    audit = rw.audit(model, [centred, START.repeat(24, 1, 1)])
    (finding,) = collapse_of(rw.skips.recommend(audit, model, centred))
    assert "Tried on this batch: no COLLAPSE." in finding.meaning
    assert finding.remedy is not None
    choice = eval(finding.remedy.code, {"rw": rw, "model": model, "batch": START})
    assert choice.removes_collapse
    assert choice.value > 1


def test_a_model_without_residual_connections_gets_a_remedy_as_text() -> None:
    audit = advised(Stack(Average(0.01) for _ in range(3)).eval())  # λ·x + f(x) is not a plain sum
    (finding,) = collapse_of(audit)
    assert finding.remedy == Remedy(words=recommendation.BY_HAND)
    assert recommendation.TRAINS not in audit.provenance.notes  # no λ was tried
    assert collapse_of(rw.audit(Stack(Average(8.0) for _ in range(3)).eval(), [START])) == []


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}
BATCH = text_inputs()


def tost(**settings: Any) -> ToSTForCausalLM:
    torch.manual_seed(0)
    return ToSTForCausalLM(ToSTConfig(**{**SIZES, **settings}, layer_types="softmax")).eval()


@pytest.mark.parametrize(
    ("skip", "init", "entries", "repaired"),
    [
        ("fixed", 0.01, '"skip_init": 1', {"skip": "fixed", "skip_init": 1.0}),
        ("fixed", -0.01, '"skip_init": -1', {"skip": "fixed", "skip_init": -1.0}),
        ("none", 1.0, '"skip": "fixed", "skip_init": 1', {"skip": "fixed", "skip_init": 1.0}),
    ],
)
def test_lambdas_of_the_configuration_are_raised_there(
    skip: str, init: float, entries: str, repaired: dict[str, Any]
) -> None:
    model = tost(skip=skip, skip_init=init)
    with untouched(model):
        (finding,) = collapse_of(advised(model, BATCH))
    assert advice(finding).startswith(f"put `{entries}` into")
    other = tost(**repaired)
    other.load_state_dict(model.state_dict())
    assert collapse_of(rw.audit(other, [BATCH])) == []


@pytest.mark.parametrize("skip", ["learned", "channel"])
def test_learned_lambdas_are_named_by_their_weights(skip: str) -> None:
    model = tost(skip=skip, skip_init=0.01, num_hidden_layers=9)
    skips = {name: one for name, one in model.named_modules() if isinstance(one, LambdaSkip)}
    last = list(skips)[-1]
    skips[last].weight.data.fill_(3)
    (finding,) = collapse_of(advised(model, BATCH))
    first = f"{next(iter(skips))}.weight"
    words = f"raise |λ| below 1 to 1, with its sign, in `{first}` and {len(skips) - 2} more"
    assert finding.remedy == Remedy(words=words)
    for name, one in skips.items():
        assert one.weight.eq(3 if name == last else 0.01).all()
        one.weight.data.clamp_(min=1)
    assert collapse_of(rw.audit(model, [BATCH])) == []


@pytest.mark.parametrize("skip", ["fixed", "none", "learned", "channel", "shared"])
def test_lambda_modules_have_the_same_certificate_as_hooks(skip: str) -> None:
    model = tost(skip=skip, skip_init=1.5, num_hidden_layers=2)
    assert len(places_in(model, BATCH)[0]) == 2
    certificate = rw.certify_skip(model, BATCH)
    for layer in certificate.layers:
        assert layer.absolute_spread_ratio_bound <= layer.absolute_spread_ratio * (1 + 1e-9)
    hooked = tost(num_hidden_layers=2)
    hooked.load_state_dict(model.state_dict(), strict=False)
    value = 0.0 if skip == "none" else 1.5
    with pytest.warns(UserWarning, match="λ = 0") if not value else unchecked():
        rw.add_lambda_skip(hooked, init=value)
    wanted = rw.certify_skip(hooked, BATCH)
    for one, other in zip(certificate.layers, wanted.layers, strict=True):
        for name, number in one.model_dump().items():
            close = pytest.approx(number, rel=1e-4) if isinstance(number, float) else number
            assert getattr(other, name) == close, name


# --- suppressed mixers -----------------------------------------------------------------------------------


def shares(model: nn.Module, batch: Any) -> dict[str, float]:
    return recommendation.mixing_shares(model, batch, places_in(model, batch)[0])


def test_a_suppressed_mixer_is_found_although_its_block_changes_the_states() -> None:
    model, batch = bert(), text_inputs()
    skips = rw.add_lambda_skip(model)
    assert inactive(advised(model, batch)) == []
    site = list(skips)[1]
    skips[site].data.fill_(1e5)
    audit = advised(model, batch)
    assert inactive(audit) == [site]
    assert min(layer.relative_update for layer in audit.states[1:]) > INACTIVE_TURN
    (finding,) = [one for one in audit.findings if one.code == "INACTIVE_BLOCK"]
    certified = next(one for one in rw.certify_skip(model, batch).layers if one.site == site)
    assert finding.evidence["mixer_share"] == pytest.approx(certified.mixing_share, rel=0.2)
    again = rw.skips.recommend(audit, model, batch)
    assert (again.findings, again.provenance) == (audit.findings, audit.provenance)


def test_a_mixer_that_a_lambda_module_suppresses_is_found() -> None:
    model = tost(skip="learned")
    model.get_parameter("model.layers.5.skip.weight").data.fill_(1e5)
    (block,) = inactive(advised(model, BATCH))
    assert block.startswith("model.layers.5")


def test_an_inactive_block_with_a_suppressed_mixer_is_one_finding() -> None:
    model = pre_norm(blocks=3)
    skips = rw.add_lambda_skip(model, example=TOKENS)
    skips[list(skips)[2]].data.fill_(1e5)
    for weight in (model.blocks[2].linear2.weight, model.blocks[2].linear2.bias):
        weight.data.zero_()
    assert inactive(advised(model, TOKENS)) == ["blocks.2"]


def test_a_mixer_is_suppressed_below_a_share_of_a_hundredth() -> None:
    model = pre_norm()
    skips = rw.add_lambda_skip(model, init=1e4, example=TOKENS)
    ((site, share),) = shares(model, TOKENS).items()
    for part, found in ((0.9, [site]), (1.1, [])):
        skips[site].data.fill_(1e4 * share / (part * INACTIVE_TURN))  # the share is proportional to 1/λ
        assert shares(model, TOKENS)[site] == pytest.approx(part * INACTIVE_TURN, rel=0.01)
        assert inactive(advised(model, TOKENS)) == found


def test_a_share_is_a_mean_over_real_tokens() -> None:
    model = averaging(blocks=1)
    rw.add_lambda_skip(model, init=3, example=TOKENS)
    one, other = (shares(model, row[None])["blocks.0.attention"] for row in TOKENS)
    assert one != pytest.approx(other)
    assert shares(model, TOKENS)["blocks.0.attention"] == pytest.approx((one + other) / 2)
    model, batch = bert(), text_inputs()
    rw.add_lambda_skip(model, init=3)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][:, 7:] = 0
    whole = shares(model, {name: value[:, :7] for name, value in batch.items()})
    assert shares(model, batch) == pytest.approx(whole)


@pytest.mark.parametrize("by", [100.0, 0.01], ids=["smaller share later", "larger share later"])
def test_the_share_of_a_repeated_mixer_is_the_largest(by: float) -> None:
    (block,) = pre_norm().blocks
    model, start = Stack([block, Apply(lambda x: by * x), block]).eval(), TOKENS / min(1, by)
    rw.add_lambda_skip(model, init=2, example=start)
    (share,) = shares(model, start).values()
    rw.remove_lambda_skip(model)
    alone = Stack([block]).eval()
    rw.add_lambda_skip(alone, init=2, example=start)
    (small,) = shares(alone, 100 * TOKENS).values()
    assert share > 10 * small


def test_states_with_norms_beyond_float16_have_a_share() -> None:
    model, start = averaging(0.1, blocks=1).half(), TOKENS.sign().half() * 3e4
    rw.add_lambda_skip(model, example=start)
    (share,) = shares(model, start).values()
    assert share > INACTIVE_TURN


# --- arguments -------------------------------------------------------------------------------------------


def holding(*findings: Finding) -> rw.Audit:
    return rw.Audit(provenance=Provenance(model="m", delta=0.01), heads=[], states=[], findings=findings)


def finding() -> Finding:
    evidence = {
        "blocks": 1,
        "direction_spread": 0.02,
        "direction_spread_input": 0.9,
        "direction_spread_lowest": 0.02,
    }
    return Finding(code="COLLAPSE", severity="error", where=Address("h"), evidence=evidence, meaning="")


STACK = Provenance(model="m", delta=0.01, model_class="net.Stack")
OTHER = holding().model_copy(update={"provenance": STACK})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"audit": None}, r"`audit`: expected an audit, got NoneType\. .*rw\.Audit\.load"),
        ({"audit": [finding()]}, r"`audit`: expected an audit, got list\."),
        ({"audit": holding().model_copy(update={"complete": False})}, "expected a complete audit"),
        ({"audit": OTHER}, r"expected an audit of a torch\.nn.*Identity, got one of a net\.Stack"),
        ({"model": None}, r"`model`: expected a torch\.nn\.Module, got NoneType\."),
        ({"batch": None}, "`batch`: expected a batch with tokens.*got NoneType"),
        ({"batch": "a text"}, "`batch`: expected a batch with tokens.*got str"),
        ({"batch": [{"input_ids": torch.ones(1, 2)}]}, "`batch`: expected a batch with tokens.*got list"),
        ({"batch": {}}, "`batch`: expected a batch with tokens.*got dict"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], match: str) -> None:
    given = {"audit": holding(), "model": nn.Identity(), "batch": TOKENS} | change
    with unchecked(), pytest.raises(InputError, match=match):
        rw.skips.recommend(**given)


def test_a_batch_that_the_model_cannot_run_is_refused_with_a_fix() -> None:
    model = bert()
    rw.add_lambda_skip(model)
    audit, wrong = rw.audit(model, [text_inputs()]), {"input_idz": text_inputs()["input_ids"]}
    with pytest.raises(InputError, match=r"`batch`: expected a batch that BertModel runs on.*no input_idz"):
        rw.skips.recommend(audit, model, wrong)


def test_unused_labels_are_dropped_as_in_an_audit() -> None:
    model, batch = averaging(1.0), (START, torch.zeros(len(START), dtype=torch.long))
    audit = rw.audit(model, [batch])
    assert len(collapse_of(audit)) == 1
    labelled, plain = (rw.skips.recommend(audit, model, given) for given in (batch, START))
    assert labelled.findings == plain.findings


@pytest.mark.parametrize("case", ["skips", "training mode", "collapse", "nothing to do"])
def test_the_model_does_not_change(case: str) -> None:
    if case in ("skips", "training mode"):
        model, batch = bert(), text_inputs()
        rw.add_lambda_skip(model, init=3)
    else:
        model, batch = averaging(1.0) if case == "collapse" else averaging(blocks=1), START
    audit, runs = rw.audit(model, [batch]), []
    model.train(case == "training mode")
    model.register_forward_hook(lambda *_: runs.append(1))
    with untouched(model):
        recommended = rw.skips.recommend(audit, model, batch)
    if case == "nothing to do":
        assert (runs, recommended.provenance.notes) == ([], audit.provenance.notes)
