"""λ against a collapse is chosen by trial and repairs; mixers that a λ-skip suppresses are found."""

import math
import shlex
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import BERT, hugging_face, text_inputs
from tests.support.modules import Average, Stack
from tests.support.untouched import untouched
from tests.unchecked import unchecked
from torch import Tensor, nn

import rankwise as rw
from rankwise.auditing import Finding, Provenance
from rankwise.auditing.findings import INACTIVE_TURN
from rankwise.errors import InputError, RankwiseError, SkipError
from rankwise.models import ToSTConfig, ToSTForCausalLM
from rankwise.skips import LambdaSkip, choose_lambda, recommendation
from rankwise.skips.observe import lambdas_of, sites_in, with_lambdas
from rankwise.tracing import HeadId


def tokens() -> Tensor:
    return torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))


def advised(model: nn.Module, batch: Any) -> rw.Audit:
    """Audited, then examined."""
    return rw.skips.recommend(rw.audit(model, [batch]), model, batch)


def collapse_of(audit: rw.Audit) -> list[Finding]:
    return [one for one in audit.findings if one.code == "COLLAPSE"]


def inactive(audit: rw.Audit) -> list[str]:
    return [one.where.site for one in audit.findings if one.code == "INACTIVE_BLOCK"]


def stack_of(strength: float = 0.3, blocks: int = 6) -> nn.Module:
    """Six times, λ = 1 keeps 1/(1 + strength) of what tells tokens apart."""
    return Stack([Average(1.0, strength=strength) for _ in range(blocks)]).eval()


START = tokens() + 1


# --- choice ----------------------------------------------------------------------------------------------


def test_the_least_scale_without_a_collapse_is_chosen_and_removes_it(device: torch.device) -> None:
    model, start = stack_of(1.0).to(device), START.to(device)
    choice = choose_lambda(model, start, "blocks")
    assert choice.removes_collapse
    assert [value for value, _ in choice.tried] == [
        one for one in recommendation.TRIED if one <= choice.value
    ]
    for value, lowest in choice.tried:
        skips = rw.add_lambda_skip(model, init=value, example=start)
        assert choice.sites == list(skips)
        audit = rw.audit(model, [start])
        assert (collapse_of(audit) == []) == (value == choice.value)
        assert lowest == pytest.approx(min(one.relative_spread for one in audit.layers[1:]), rel=1e-5)
        rw.remove_lambda_skip(model)


def test_where_no_scale_removes_the_collapse_the_best_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommendation, "TRIED", (0.25, 0.5))
    model = stack_of(2.0)
    rw.add_lambda_skip(model, init=0.1, example=START)
    choice = choose_lambda(model, START, "blocks")
    assert not choice.removes_collapse
    assert choice.value == max(choice.tried, key=lambda trial: trial[1])[0]
    (finding,) = collapse_of(advised(model, START))
    assert f"|λ| = {choice.value:g} is best, and COLLAPSE remains" in finding.meaning
    exec(finding.remedy, {"rw": rw, "model": model})
    (after,) = collapse_of(rw.audit(model, [START]))
    lowest = finding.evidence["relative_spread_lowest_tried"]
    rounding = 16 * torch.finfo(torch.float32).eps  # of the states, whose differences are as small as that
    assert after.evidence["relative_spread_lowest"] == pytest.approx(lowest, abs=rounding)
    assert lowest > 10 * rounding
    assert lowest > finding.evidence["relative_spread_lowest"]


@pytest.mark.parametrize("behind", [False, True], ids=["no norm", "norm"])
def test_what_is_proved_is_the_largest_bound_of_the_layers(behind: bool) -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=not behind)
    model = nn.TransformerEncoder(block, 3, enable_nested_tensor=False).eval()
    choice, layers = choose_lambda(model, tokens(), "layers"), rw.certify_skip(model, tokens(), 0.5).layers
    name = "min_lambda_proved" if behind else "min_lambda_proved_relative"  # COLLAPSE is about μ/‖Y‖
    assert {layer.norm for layer in layers} == {"LayerNorm" if behind else "none"}
    assert choice.proved == max(getattr(layer, name) for layer in layers)


def test_nothing_is_proved_if_one_layer_has_no_bound() -> None:
    """λ that differs by channel before a norm."""
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(block, 3, enable_nested_tensor=False).eval()
    skips = rw.add_lambda_skip(model, per="channel", example=tokens())
    assert choose_lambda(model, tokens(), "layers").proved is not None
    with torch.no_grad():
        skips[list(skips)[1]].copy_(torch.linspace(1, 20, 8))
    assert choose_lambda(model, tokens(), "layers").proved is None


def test_mixing_fades_with_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shares = stack_of(), []
    for value in (1.0, 100.0):
        monkeypatch.setattr(recommendation, "TRIED", (value,))
        shares.append(choose_lambda(model, START, "blocks").mixing_share)
    assert 0 < 20 * shares[1] < shares[0]


@pytest.mark.parametrize("per", ["layer", "channel"])
def test_trials_are_models_with_these_scales(per: Any) -> None:
    """Signs stay, 0 counts as positive, larger ones stay; nothing is written."""
    model = stack_of()
    skips = rw.add_lambda_skip(model, per=per, example=START)
    given = [-0.5, 0.0, 3.0, -3.0, 0.5, 1.0]
    with torch.no_grad():
        for skip, value in zip(skips.values(), given, strict=True):
            skip.fill_(value)
    sites = list(skips.sites.values())
    raised = recommendation._raised(lambdas_of(model, sites), 2.0)
    with untouched(model), with_lambdas(model, sites, raised), torch.no_grad():
        tried = model(START)
    with torch.no_grad():
        for skip, value in zip(skips.values(), [-2.0, 2.0, 3.0, -3.0, 2.0, 2.0], strict=True):
            skip.fill_(value)
        torch.testing.assert_close(model(START), tried)


def test_a_stack_that_is_not_there_is_refused() -> None:
    for model in (stack_of(), Stack([Average(0.01)]).eval()):  # the second has no residual connection
        with pytest.raises(InputError, match="`stack`"):
            choose_lambda(model, START, "others")


# --- remedies --------------------------------------------------------------------------------------------


def test_a_collapse_has_the_statements_apart_and_a_call_that_repairs() -> None:
    model = stack_of(1.0)
    (finding,) = collapse_of(advised(model, START))
    choice = choose_lambda(model, START, finding.where.stack)
    assert finding.evidence["lambda_tried"] == choice.value
    assert finding.evidence["lambda_proved"] == choice.proved
    assert finding.evidence["mixing_share"] == choice.mixing_share
    assert finding.evidence["relative_spread_lowest_tried"] == choice.tried[-1][1]
    assert f"|λ| = {choice.value:g} removes COLLAPSE" in finding.meaning
    assert finding.meaning.endswith("Nothing is known about training with such a λ.")
    assert recommendation.TRAINS in advised(model, START).provenance.notes
    exec(finding.remedy, {"rw": rw, "model": model, "batch": START})  # a tensor: no command takes it
    assert collapse_of(rw.audit(model, [START])) == []


@pytest.mark.parametrize("sign", [1, -1])
def test_skips_below_the_choice_are_raised_and_no_others(sign: int) -> None:
    model = stack_of(0.1)
    skips = rw.add_lambda_skip(model, example=START)
    with torch.no_grad():
        for skip, value in zip(skips.values(), [0.01, 0.02, 0.01, 0.01, 5.0, 5.0], strict=True):
            skip.fill_(sign * value)
    (finding,) = collapse_of(advised(model, START))
    exec(finding.remedy, {"rw": rw, "model": model})
    value = sign * finding.evidence["lambda_tried"]
    assert [float(skip.detach()) for skip in skips.values()] == [value] * 4 + [sign * 5.0] * 2
    assert collapse_of(rw.audit(model, [START])) == []


@pytest.mark.parametrize("low", [range(3), range(1)], ids=["all", "some"])
def test_a_dict_gets_a_command_that_names_sites_if_others_are_to_stay(low: range) -> None:
    model = hugging_face("BertModel", **BERT)()
    skips = rw.add_lambda_skip(model)
    for at in low:
        skips[list(skips)[at]].data.fill_(0.01)
    where = HeadId(stack="encoder.layer", site="encoder.layer.0")
    one = recommendation._advised(
        finding().model_copy(update={"where": where}), model, text_inputs(), list(skips.sites.values())
    )
    words, value = shlex.split(one.remedy), one.evidence["lambda_tried"]
    assert words[:5] == ["rankwise", "skip", "MODEL", "--init", f"{value:g}"]
    below = [name for name, skip in skips.items() if float(skip.detach()) < value]
    named = [words[at + 1] for at, word in enumerate(words) if word == "--sites"]
    assert named == (below if len(below) < len(skips) else [])


def raise_as_told(finding: Finding, skips: rw.skips.Skips, words: str) -> None:
    """Follow a remedy in words: each |λ| below the choice is raised to it, with its sign."""
    value = finding.evidence["lambda_tried"]
    assert finding.remedy.startswith(f"raise |λ| below {value:g} to {value:g}, with its sign, in `")
    assert finding.remedy.endswith(words)
    with torch.no_grad():
        for skip in skips.values():
            skip.copy_(torch.where(skip < 0, -1, 1) * skip.abs().clamp(min=value))


def test_skips_of_both_signs_keep_their_signs() -> None:
    model = stack_of(0.1)
    skips = rw.add_lambda_skip(model, example=START)
    with torch.no_grad():
        for skip, value in zip(skips.values(), [0.01, -0.02, 0.01, -0.01, 5.0, 5.0], strict=True):
            skip.fill_(value)
    (finding,) = collapse_of(advised(model, START))
    raise_as_told(finding, skips, "`rw.skips.skips_of(model)['blocks.0'].data` and at 3 more sites")
    assert collapse_of(rw.audit(model, [START])) == []


def test_channels_above_the_choice_are_not_lowered() -> None:
    model = stack_of(1.0)
    skips = rw.add_lambda_skip(model, per="channel", example=START)
    with torch.no_grad():
        skips["blocks.0"][0] = 30.0
    (finding,) = collapse_of(advised(model, START))
    raise_as_told(finding, skips, "`rw.skips.skips_of(model)['blocks.0'].data` and at 5 more sites")
    assert float(skips["blocks.0"][0].detach()) == 30
    assert collapse_of(rw.audit(model, [START])) == []


class Two(nn.Module):
    """Two stacks, of which the second collapses, and with ``both`` the first as well."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.first = nn.ModuleList(
            [Average(1.0, strength=1.0 if both else 0.05) for _ in range(6 if both else 2)]
        )
        self.second = nn.ModuleList([Average(1.0) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.first, *self.second):
            x = block(x)
        return x


def test_a_stack_next_to_another_one_gets_a_call_of_its_own() -> None:
    model = Two().eval()
    (finding,) = collapse_of(advised(model, START))
    assert finding.where.stack == "second"
    exec(finding.remedy, {"rw": rw, "model": model, "batch": START})
    assert list(rw.skips.skips_of(model)) == choose_lambda(model, START, "second").sites
    assert collapse_of(rw.audit(model, [START])) == []


@pytest.mark.parametrize("per", ["layer", "channel"])
def test_a_stack_without_skips_gets_a_call_although_another_stack_has_skips(per: Any) -> None:
    model = Two().eval()
    fitted = rw.add_lambda_skip(model, init=3, per=per, sites="first", example=START)
    (finding,) = collapse_of(advised(model, START))
    assert finding.remedy.startswith(f"rw.add_lambda_skip(model, init={finding.evidence['lambda_tried']:g}")
    exec(finding.remedy, {"rw": rw, "model": model, "batch": START})
    skips = rw.skips.skips_of(model)
    assert {name.partition(".")[0] for name in skips} == {"first", "second"}
    assert all(skips[name] is value and value.eq(3).all() for name, value in fitted.items())
    assert collapse_of(rw.audit(model, [START])) == []


@pytest.mark.parametrize("order", [1, -1], ids=["first first", "second first"])
def test_two_collapsed_stacks_each_get_a_call_that_works_after_the_other(order: int) -> None:
    model = Two(both=True).eval()
    findings = collapse_of(advised(model, START))
    assert {one.where.stack for one in findings} == {"first", "second"}
    for one in findings[::order]:
        exec(one.remedy, {"rw": rw, "model": model, "batch": START})
    skips = rw.skips.skips_of(model)
    for one in findings:
        sites = choose_lambda(model, START, one.where.stack).sites
        assert [float(skips[name].detach()) for name in sites] == [one.evidence["lambda_tried"]] * 6
    assert list(skips) == [f"{stack}.{at}" for stack in ("first", "second") for at in range(6)]
    assert collapse_of(rw.audit(model, [START])) == []


def test_a_command_names_a_stack_next_to_another_one() -> None:
    model = Two().eval()
    (finding,) = collapse_of(advised(model, {"x": START}))
    value = finding.evidence["lambda_tried"]
    assert finding.remedy == f"rankwise skip MODEL --init {value:g} --sites second --text TEXT --out DIR"
    rw.add_lambda_skip(model, init=value, sites=["second"], example=START)  # as the command does
    assert collapse_of(rw.audit(model, [START])) == []


class Pool(nn.Module):
    """Tokens are drawn to their mean between the mixers, where no λ is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True) + 0.3 * (x - x.mean(1, keepdim=True))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.pool = Average(1.0, strength=-0.5), Pool()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.mixer(x))


@pytest.mark.parametrize("given", [None, 20.0], ids=["plain", "above all that is tried"])
def test_where_no_larger_scale_helps_none_is_named(given: float | None) -> None:
    model = Stack([Parts() for _ in range(4)]).eval()
    if given is not None:
        rw.add_lambda_skip(model, init=given, example=START)
    (finding,) = collapse_of(advised(model, START))
    assert "Tried on this batch: no larger |λ| is better, and COLLAPSE remains." in finding.meaning
    assert finding.remedy == recommendation.UNHELPFUL
    for part in model.blocks:
        part.pool = nn.Identity()
    assert collapse_of(rw.audit(model, [START])) == []


def test_a_batch_without_a_collapse_is_said_to_have_none() -> None:
    """The audit has one in other batches."""
    model = stack_of(1.0)
    centred = tokens() - tokens().mean(1, keepdim=True)
    audit = rw.audit(model, [centred, *[START] * 9])
    (finding,) = collapse_of(rw.skips.recommend(audit, model, centred))
    assert "Tried on this batch: no COLLAPSE." in finding.meaning
    call = finding.remedy.removeprefix("pass a batch that collapses to ").strip("`")
    choice = eval(call, {"rw": rw, "model": model, "batch": START})
    assert choice.removes_collapse
    assert choice.value > 1


def test_a_model_without_residual_connections_gets_words() -> None:
    """λ x is no plain sum."""
    audit = advised(Stack([Average(0.01) for _ in range(3)]).eval(), START)
    (finding,) = collapse_of(audit)
    assert finding.remedy == recommendation.BY_HAND
    assert recommendation.TRAINS not in audit.provenance.notes  # no λ was tried
    assert collapse_of(rw.audit(Stack([Average(8.0) for _ in range(3)]).eval(), [START])) == []


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}
BATCH = text_inputs()


def tost(**settings: Any) -> ToSTForCausalLM:
    torch.manual_seed(0)
    return ToSTForCausalLM(ToSTConfig(**SIZES, layer_types="softmax", **settings)).eval()


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
    model = tost(skip=skip, skip_init=init)
    with untouched(model):
        (finding,) = collapse_of(advised(model, BATCH))
    assert finding.remedy.startswith(words)
    other = tost(**repaired)
    other.load_state_dict(model.state_dict())
    assert collapse_of(rw.audit(other, [BATCH])) == []


@pytest.mark.parametrize("skip", ["learned", "channel"])
def test_learned_scales_are_named_by_their_weights(skip: str) -> None:
    model = tost(skip=skip, skip_init=0.01)
    skips = {name: one for name, one in model.named_modules() if isinstance(one, LambdaSkip)}
    last = list(skips)[-1]
    with torch.no_grad():
        skips[last].weight.fill_(3)
    (finding,) = collapse_of(advised(model, BATCH))
    first = f"{next(iter(skips))}.weight"
    assert finding.remedy == f"raise |λ| below 1 to 1 in the learned `{first}` and {len(skips) - 2} more"
    with torch.no_grad():
        for name, one in skips.items():
            assert one.weight.eq(3 if name == last else 0.01).all()
            one.weight.clamp_(min=1)
    assert collapse_of(rw.audit(model, [BATCH])) == []


@pytest.mark.parametrize("skip", ["fixed", "none", "learned", "channel", "shared"])
def test_scales_of_tost_are_certified_as_hooks_of_the_same_scale_are(skip: str) -> None:
    model = tost(skip=skip, skip_init=1.5)
    sites, _ = sites_in(model, BATCH)
    assert len(sites) == SIZES["num_hidden_layers"]
    certificate = rw.certify_skip(model, BATCH)
    for layer in certificate.layers:
        assert layer.kept_lower_bound <= layer.kept * (1 + 1e-9)
    hooked = tost()
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


def test_a_suppressed_mixer_is_found_next_to_a_feed_forward_part_at_work() -> None:
    model, batch = hugging_face("BertModel", **BERT)(), text_inputs()
    skips = rw.add_lambda_skip(model)
    assert inactive(advised(model, batch)) == []
    site = list(skips)[1]
    with torch.no_grad():
        skips[site].fill_(1e5)
    audit = advised(model, batch)
    assert inactive(audit) == [site]
    assert min(layer.relative_update for layer in audit.layers[1:]) > INACTIVE_TURN
    (finding,) = [one for one in audit.findings if one.code == "INACTIVE_BLOCK"]
    certified = next(one for one in rw.certify_skip(model, batch).layers if one.site == site)
    assert finding.evidence["mixer_share"] == pytest.approx(certified.mixing_share, rel=0.2)


def test_a_suppressed_mixer_that_is_the_model_is_called_so() -> None:
    model = Average(1.0).eval()
    rw.add_lambda_skip(model, example=tokens())[""].data.fill_(1e5)
    (finding,) = [one for one in advised(model, tokens()).findings if one.code == "INACTIVE_BLOCK"]
    assert finding.meaning.startswith("The mixer at the model itself barely changes its tokens")


def test_a_suppressed_mixer_of_tost_is_found() -> None:
    model = tost(skip="learned")
    with torch.no_grad():
        model.get_parameter("model.layers.5.skip.weight").fill_(1e5)
    (block,) = inactive(advised(model, BATCH))
    assert block.startswith("model.layers.5")


def test_a_block_that_is_switched_off_is_one_finding() -> None:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True) for _ in range(3)]
    model = Stack(blocks).eval()
    skips = rw.add_lambda_skip(model, example=tokens())
    with torch.no_grad():
        skips[list(skips)[2]].fill_(1e5)
        for weight in (blocks[2].linear2.weight, blocks[2].linear2.bias):
            weight.zero_()
    assert inactive(advised(model, tokens())) == ["blocks.2"]


def test_a_mixer_is_suppressed_from_a_hundredth_on() -> None:
    """‖b‖/‖λy + b‖ falls as 1/λ."""
    torch.manual_seed(0)
    model = Stack([nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)]).eval()
    skips = rw.add_lambda_skip(model, init=1e4, example=tokens())
    ((site, share),) = shares(model, tokens()).items()
    for part, found in ((0.9, [site]), (1.1, [])):
        with torch.no_grad():
            skips[site].fill_(1e4 * share / (part * INACTIVE_TURN))
        assert shares(model, tokens())[site] == pytest.approx(part * INACTIVE_TURN, rel=0.01)
        assert inactive(advised(model, tokens())) == found


def test_a_share_is_the_mean_over_tokens() -> None:
    model = Stack([Average(1.0)]).eval()
    rw.add_lambda_skip(model, init=3, example=tokens())
    one, other = (shares(model, row[None])["blocks.0"] for row in tokens())
    assert one != pytest.approx(other)
    assert shares(model, tokens())["blocks.0"] == pytest.approx((one + other) / 2)


def test_padding_has_no_share() -> None:
    model, batch = hugging_face("BertModel", **BERT)(), text_inputs()
    rw.add_lambda_skip(model, init=3)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][:, 7:] = 0
    whole = shares(model, {name: value[:, :7] for name, value in batch.items()})
    assert shares(model, batch) == pytest.approx(whole)


def shares(model: nn.Module, batch: Any) -> dict[str, float]:
    return recommendation._shares(model, batch, sites_in(model, batch)[0])


class Times(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return self.by * x


@pytest.mark.parametrize("by", [100.0, 0.01], ids=["less later", "more later"])
def test_a_mixer_at_work_in_one_of_its_calls_is_at_work(by: float) -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    model, start = Stack([block, Times(by), block]).eval(), tokens() / min(1, by)
    rw.add_lambda_skip(model, init=2, example=start)
    (share,) = shares(model, start).values()
    alone = Stack([block]).eval()
    rw.remove_lambda_skip(model)
    rw.add_lambda_skip(alone, init=2, example=start)
    (small,) = shares(alone, 100 * tokens()).values()
    assert share > 10 * small


def test_half_precision_does_not_lose_long_states() -> None:
    """Of 8 channels of 3e4, the norm is beyond float16."""
    model, start = Stack([Average(1.0, strength=0.1)]).eval().half(), tokens().sign().half() * 3e4
    rw.add_lambda_skip(model, example=start)
    (share,) = shares(model, start).values()
    assert share > INACTIVE_TURN


def test_models_without_a_collapse_and_skips_are_not_run_again() -> None:
    runs: list[int] = []
    model = stack_of(0.1, blocks=1)
    audit = rw.audit(model, [tokens()])
    model.register_forward_hook(lambda *_: runs.append(1))
    assert rw.skips.recommend(audit, model, tokens()).provenance.notes == audit.provenance.notes
    assert runs == []


# --- arguments -------------------------------------------------------------------------------------------


def holding(*findings: Finding) -> rw.Audit:
    about = Provenance(model="m", delta=0.01)
    return rw.Audit(provenance=about, heads=[], layers=[], findings=findings)


def finding(code: str = "COLLAPSE", severity: Any = "error") -> Finding:
    where = HeadId(stack="h", layer=1, site="h.0")
    return Finding(code=code, severity=severity, where=where, evidence={}, meaning="", remedy="")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"audit": None}, r"`audit`: expected an audit, got NoneType\. .*rw\.Audit\.load"),
        ({"audit": "audit.json"}, r"`audit`: expected an audit, got str\. .*rw\.Audit\.load"),
        ({"audit": [finding()]}, r"`audit`: expected an audit, got list\."),
        ({"model": None}, r"`model`: expected a torch\.nn\.Module, got NoneType\."),
        ({"batch": None}, r"`batch`: expected a batch, got NoneType\. Pass one of the batches"),
        ({"batch": "a text"}, "`batch`: expected a batch, got str"),
        ({"batch": [{"input_ids": torch.ones(1, 2)}]}, "`batch`: expected a batch, got list"),
        ({"batch": {}}, "`batch`: expected a batch, got dict"),
    ],
)
def test_arguments_that_are_something_else_are_refused(change: dict[str, Any], match: str) -> None:
    given = {"audit": holding(), "model": nn.Identity(), "batch": tokens()} | change
    with unchecked(), pytest.raises(InputError, match=match):
        rw.skips.recommend(**given)


def test_a_batch_that_the_model_does_not_take_is_refused_with_the_fix() -> None:
    model = hugging_face("BertModel", **BERT)()
    rw.add_lambda_skip(model)
    audit, wrong = rw.audit(model, [text_inputs()]), {"input_idz": text_inputs()["input_ids"]}
    with pytest.raises(InputError, match=r"`batch`: expected a batch that BertModel runs on.*no input_idz"):
        rw.skips.recommend(audit, model, wrong)


def test_labels_that_the_model_has_no_place_for_are_left_out_as_in_an_audit() -> None:
    model = Stack([Average(1.0) for _ in range(6)]).eval()
    batch = (tokens() + 1, torch.zeros(len(tokens()), dtype=torch.long))
    audit = rw.audit(model, [batch])
    assert (
        rw.skips.recommend(audit, model, batch).findings
        == rw.skips.recommend(audit, model, batch[0]).findings
    )


@pytest.mark.parametrize(
    "error", [RankwiseError("x", expected="a", got="b", fix="c"), KeyError("y"), KeyboardInterrupt()]
)
def test_what_cannot_be_told_is_an_error_and_the_audit_stays(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(recommendation, "_choose", fail)
    audit = holding(finding())
    with pytest.raises(type(error)):
        rw.skips.recommend(audit, nn.Identity(), tokens())
    assert audit == holding(finding())


def test_states_that_are_not_finite_are_an_error() -> None:
    model = stack_of()
    with torch.no_grad():
        model.blocks[1].attention.out_proj.weight[0, 0] = math.inf
    with pytest.raises(SkipError, match="finite"):
        choose_lambda(model, START, "blocks")


def test_advice_on_advice_is_the_same() -> None:
    model = stack_of(1.0)
    once = advised(model, START)
    assert rw.skips.recommend(once, model, START) == once
    suppressed = hugging_face("BertModel", **BERT)()
    skips = rw.add_lambda_skip(suppressed)
    with torch.no_grad():
        skips[list(skips)[1]].fill_(1e5)
    once = advised(suppressed, text_inputs())
    again = rw.skips.recommend(once, suppressed, text_inputs())
    assert (len(inactive(once)), again.findings, again.provenance) == (1, once.findings, once.provenance)


def test_audits_that_it_cannot_advise_on_are_refused() -> None:
    model = Stack([Average(1.0)]).eval()
    audit = rw.audit(model, [tokens()])
    with pytest.raises(InputError, match=r"expected an audit of a torch\.nn.*Identity, got one of a .*Stack"):
        rw.skips.recommend(audit, nn.Identity(), tokens())
    with pytest.raises(InputError, match="expected a complete audit"):
        rw.skips.recommend(audit.model_copy(update={"complete": False}), model, tokens())


@pytest.mark.parametrize("make", ["skips", "train", "collapse"])
def test_the_model_is_as_it_was_bit_for_bit(make: str) -> None:
    if make == "collapse":
        model, batch = stack_of(1.0), START
    else:
        model, batch = hugging_face("BertModel", **BERT)(), text_inputs()
        rw.add_lambda_skip(model, init=3)
    audit = rw.audit(model, [batch])
    model.train(make == "train")
    with untouched(model):
        rw.skips.recommend(audit, model, batch)
