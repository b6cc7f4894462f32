"""What an audit says of λ: a collapse names what each bound asks for, drowned blocks and mixers are found."""

import math
import random
import shlex
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments.tiny_models import BERT, hugging_face, text_inputs
from tests.auditing.fingerprint import fingerprint
from tests.unchecked import unchecked
from torch import Tensor, nn

import rankwise as rw
from rankwise.auditing import Finding, Provenance
from rankwise.auditing.findings import INACTIVE_TURN
from rankwise.errors import CaptureError, InputError, RankwiseError
from rankwise.skips import advice
from rankwise.skips import remedy as remedies
from rankwise.skips.remedy import collapse_with
from rankwise.skips.skips import choose
from rankwise.tracing import HeadId


class Average(nn.Module):
    """Every token gets the mean of all: with a weak skip, tokens become alike."""

    def __init__(self, skip: float, strength: float = 1.0) -> None:
        super().__init__()
        self.attention, self.skip = nn.MultiheadAttention(8, 1, batch_first=True), skip
        with torch.no_grad():
            self.attention.in_proj_weight[:16] = 0
            self.attention.in_proj_weight[16:] = torch.eye(8)
            self.attention.out_proj.weight.copy_(strength * torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(x, x, x)[0]
        return x + mixed if self.skip == 1 else self.skip * x + mixed


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tokens() -> Tensor:
    return torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))


def advised(model: nn.Module, batch: Any) -> rw.Audit:
    """Audited, then advised."""
    return rw.skips.recommend(rw.audit(model, [batch]), model, batch)


def test_what_is_looked_at_again_lies_where_the_model_is(device: torch.device) -> None:
    model = Stack([Average(1.0) for _ in range(6)]).eval().to(device)
    (finding,) = [one for one in advised(model, tokens() + 1).findings if one.code == "COLLAPSE"]
    assert "lambda_sound" in finding.evidence


def test_a_collapse_names_its_layer_the_scales_and_the_command() -> None:
    model = Stack([Average(1.0) for _ in range(6)]).eval()
    start = tokens() + 1
    audit = advised(model, start)
    (finding,) = [one for one in audit.findings if one.code == "COLLAPSE"]
    layers = {layer.layer: layer.relative_spread for layer in audit.layers}
    assert layers[finding.where.layer] == finding.evidence["relative_spread"]
    certificate = rw.certify_skip(model, start, advice.KEEP)
    at = next(one for one in certificate.layers if one.site == finding.where.site)
    assert finding.evidence["lambda_sound"] == pytest.approx(at.sound_scale_relative)
    assert finding.evidence["lambda"] == 1
    words = shlex.split(finding.remedy)
    assert words[:4] == ["rankwise", "skip", "MODEL", "--init"]
    init = max(2, at.sound_scale_relative)  # what is there already did not do
    assert init <= float(words[4]) <= 1.1 * init
    assert "--sites" not in words  # there are no λ that it could overwrite


@pytest.mark.parametrize(
    ("scales", "fault"),
    [
        ((0.9, 0.95, 1.1, 0.0, 0.0, 0.0), {3, 4, 5}),
        ((0.9, 0.9, 0.1, 0.1, 0.1, 1.2), {2, 3, 4}),  # found at 3, lost from 2 on
    ],
    ids=["cut", "weak"],
)
def test_the_remedy_repairs_and_leaves_what_is_sound(scales: tuple[float, ...], fault: set[int]) -> None:
    model, start = Stack([Average(1.0, strength=0.1) for _ in scales]).eval(), tokens() + 1
    skips = rw.add_lambda_skip(model, example=start)
    with torch.no_grad():
        for skip, scale in zip(skips.values(), scales, strict=True):
            skip.fill_(scale)
    (finding,) = [one for one in advised(model, start).findings if one.code == "COLLAPSE"]
    words = shlex.split(finding.remedy)
    named = [words[at + 1] for at, word in enumerate(words) if word == "--sites"]
    chosen = choose(list(skips.sites.values()), named)
    assert {list(skips).index(site.name) for site in chosen} == fault
    with torch.no_grad():
        for site in chosen:
            skips[site.name].fill_(float(words[words.index("--init") + 1]))
    assert all(one.code != "COLLAPSE" for one in advised(model, start).findings)


def collapsed(scale: float = 0.1) -> tuple[nn.Module, rw.skips.Skips, Tensor]:
    """A model that λ = 1 does not repair: six times it keeps 1/1.3 of what tells tokens apart."""
    model, start = Stack([Average(1.0, strength=0.3) for _ in range(6)]).eval(), tokens() + 1
    return model, rw.add_lambda_skip(model, init=scale, example=start), start


def collapse_of(audit: rw.Audit) -> list[Finding]:
    return [one for one in audit.findings if one.code == "COLLAPSE"]


def test_where_1_does_not_repair_the_remedy_asks_for_more_and_that_does() -> None:
    model, skips, start = collapsed()
    (finding,) = collapse_of(advised(model, start))
    init, sites = remedy(finding)
    assert sites == []
    assert max(2, finding.evidence["lambda_sound"]) <= init
    with torch.no_grad():
        for skip in skips.values():
            skip.fill_(1)
    (left,) = collapse_of(rw.audit(model, [start]))
    lowest = pytest.approx(left.evidence["relative_spread_lowest"], rel=1e-5)
    assert finding.evidence["relative_spread_lowest_at_1"] == lowest
    with torch.no_grad():
        for skip in skips.values():
            skip.fill_(init)
    assert collapse_of(rw.audit(model, [start])) == []


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_a_scale_that_is_tried_gives_the_audit_of_a_model_that_has_it(scale: float) -> None:
    model, skips, start = collapsed()
    changed = list(skips)[2:]
    before = fingerprint(model)
    tried = collapse_with(model, start, "blocks", dict.fromkeys(changed, scale), pytest.fail)
    assert fingerprint(model) == before
    with torch.no_grad():
        for name in changed:
            skips[name].fill_(scale)
    (found,) = collapse_of(rw.audit(model, [start]))
    assert tried is not None
    assert tried.where == found.where
    assert tried.evidence == pytest.approx(found.evidence, rel=1e-5)  # float32, of another order of sums
    assert collapse_with(model, start, "others", {}, pytest.fail) is None
    assert collapse_with(model, start, "blocks", dict.fromkeys(skips, 3.0), pytest.fail) is None


def test_a_scale_that_cannot_be_tried_is_said_and_stays_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model whose mixers `rw.audit` finds by adapters only."""
    model, _, start = collapsed()
    audit = rw.audit(model, [start])

    def audit_without(*_: Any) -> None:
        raise CaptureError("model", expected="mixers", got="none", fix="name them")

    monkeypatch.setattr(remedies, "audit", audit_without)
    found = rw.skips.recommend(audit, model, start)
    assert remedy(collapse_of(found)[0])[0] == 1
    assert [note for note in found.provenance.notes if note.startswith(advice.UNTRIED)]
    assert rw.skips.recommend(found, model, start) == found


def test_where_every_skip_is_at_fault_none_is_named() -> None:
    model, start = Stack([Average(1.0, strength=0.1) for _ in range(4)]).eval(), tokens() + 1
    with pytest.warns(UserWarning, match="λ = 0"):
        rw.add_lambda_skip(model, init=0, example=start)
    (finding,) = [one for one in advised(model, start).findings if one.code == "COLLAPSE"]
    assert finding.remedy == "rankwise skip MODEL --init 1 --text TEXT --out DIR"


def test_a_model_that_cannot_be_certified_is_still_audited() -> None:
    """λ x is no plain sum: no residual connection is found."""
    audit = advised(Stack([Average(0.01) for _ in range(3)]).eval(), tokens() + 1)
    (finding,) = [one for one in audit.findings if one.code == "COLLAPSE"]
    assert "lambda_sound" not in finding.evidence
    assert finding.remedy == advice.BY_HAND  # the command would fail as the certificate did
    assert any(note.startswith("no λ is named for COLLAPSE") for note in audit.provenance.notes)


def test_a_block_that_gives_back_what_it_reads_is_found() -> None:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True) for _ in range(3)]
    with torch.no_grad():
        for weight in (blocks[1].self_attn.out_proj.weight, blocks[1].linear2.weight, blocks[1].linear2.bias):
            weight *= 1e-4
    audit = advised(Stack(blocks).eval(), tokens())
    found = [one for one in audit.findings if one.code == "INACTIVE_BLOCK"]
    assert [one.where.layer for one in found] == [2]
    assert found[0].evidence["relative_update"] < INACTIVE_TURN
    turns = [layer.relative_update for layer in audit.layers]
    assert turns[0] != turns[0]  # nothing lies before the first state
    assert min(turns[1], turns[3]) > INACTIVE_TURN


def switched_off(audit: rw.Audit) -> list[str]:
    return [one.where.site for one in audit.findings if one.code == "INACTIVE_BLOCK"]


def test_a_drowned_mixer_is_found_beside_a_feed_forward_part_at_work() -> None:
    model, batches = hugging_face("BertModel", **BERT)(), [text_inputs()]
    skips = rw.add_lambda_skip(model)
    assert switched_off(advised(model, batches[0])) == []
    site = list(skips)[1]
    with torch.no_grad():
        skips[site].fill_(1e5)
    audit = advised(model, batches[0])
    assert switched_off(audit) == [site]
    assert min(layer.relative_update for layer in audit.layers[1:]) > INACTIVE_TURN
    (finding,) = [one for one in audit.findings if one.code == "INACTIVE_BLOCK"]
    certified = next(one for one in rw.certify_skip(model, batches[0]).layers if one.site == site)
    assert finding.evidence["mixer_share"] == pytest.approx(certified.price, rel=0.2)


def test_a_drowned_mixer_that_is_the_model_is_called_so() -> None:
    model = Average(1.0).eval()
    rw.add_lambda_skip(model, example=tokens())[""].data.fill_(1e5)
    (finding,) = [one for one in advised(model, tokens()).findings if one.code == "INACTIVE_BLOCK"]
    assert finding.meaning.startswith("The mixer at the model itself adds hardly anything")


@pytest.mark.parametrize("scale", [0.0, 1e-5])
def test_a_mixer_that_layer_scale_closes_is_found(scale: float) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28}
    model, batches = hugging_face("Dinov2Model", **sizes, patch_size=7)(), [torch.randn(2, 3, 28, 28)]
    assert switched_off(advised(model, batches[0])) == []
    weight = model.get_parameter("encoder.layer.1.layer_scale1.lambda1")
    with torch.no_grad():
        weight.fill_(scale)
    audit = advised(model, batches[0])
    assert [site.startswith("encoder.layer.1.") for site in switched_off(audit)] == [True]
    assert (weight == scale).all()
    assert min(layer.relative_update for layer in audit.layers[1:]) > INACTIVE_TURN


def test_a_block_that_is_switched_off_is_one_finding() -> None:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True) for _ in range(3)]
    model = Stack(blocks).eval()
    skips = rw.add_lambda_skip(model, example=tokens())
    with torch.no_grad():
        skips[list(skips)[2]].fill_(1e5)
        for weight in (blocks[2].linear2.weight, blocks[2].linear2.bias):
            weight.zero_()
    assert switched_off(advised(model, tokens())) == ["blocks.2"]


def test_models_without_skips_to_look_at_are_run_once() -> None:
    runs: list[int] = []
    model = Stack([Average(1.0, strength=0.1)]).eval()
    model.register_forward_hook(lambda *_: runs.append(1))
    advised(model, tokens())
    assert len(runs) == 1


# --- the remedy, of certificates made up --------------------------------------------------------------------


def layer(site: str, scale: float = 1.0, kept: float = 1.0, **numbers: Any) -> SimpleNamespace:
    """What a certificate says of a layer; ``kept`` of μ/‖Y‖."""
    usual = {"norm": "none", "sound_scale": 5.0, "sound_scale_relative": 3.0, "paper_scale": 7.0}
    usual |= {"paper_scale_with_floor": 9.0, "relative_in": 0.8, "relative_out": 0.8 * kept}
    return SimpleNamespace(site=site, scale=scale, **usual | numbers)


def collapse(site: str, stack: str = "h") -> Finding:
    where = HeadId(stack=stack, layer=1, site=site)
    evidence = {"relative_spread": 0.1}
    return Finding(code="COLLAPSE", severity="error", where=where, evidence=evidence, meaning="", remedy="")


AGAIN = "the model ran again on the first batch, 2 sequences, for the certificate of a collapse"


def holding(*findings: Finding) -> rw.Audit:
    about = Provenance(model="m", delta=0.01)
    return rw.Audit(provenance=about, heads=[], layers=[], findings=findings)


Advise = Callable[..., Finding]


@pytest.fixture
def advise(monkeypatch: pytest.MonkeyPatch) -> Advise:
    """The finding as it is once a certificate with these layers is there."""

    def call(
        found: Finding, layers: list[SimpleNamespace], carries: bool = True, left: Finding | None = None
    ) -> Finding:
        def collapse_with(*given: Any) -> Finding | None:
            _, _, stack, scales, _ = given
            fault = [layer for layer in layers if layer.site in scales]
            assert stack == found.where.stack
            assert set(scales.values()) == {1}
            assert all(abs(layer.scale) < 1 for layer in fault)
            return left

        monkeypatch.setattr(advice, "collapse_with", collapse_with)
        monkeypatch.setattr(advice, "_shares", lambda model, batch: {})
        monkeypatch.setattr(advice, "certify_skip", lambda *_: SimpleNamespace(layers=layers))
        monkeypatch.setattr(advice, "skips_of", lambda model: {"λ": 1} if carries else {})
        audit = rw.skips.recommend(holding(found), nn.Identity(), tokens())
        assert all(note.startswith(advice.AGAIN) for note in audit.provenance.notes)
        return audit.findings[0]

    return call


def remedy(finding: Finding) -> tuple[float, list[str]]:
    """λ and the sites that it names."""
    words = shlex.split(finding.remedy)
    sites = [words[at + 1] for at, word in enumerate(words) if word == "--sites"]
    return float(words[words.index("--init") + 1]), sites


@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_a_remedy_raises_what_is_at_fault_and_nothing_else(advise: Advise, seed: int, carries: bool) -> None:
    draw = random.Random(seed)
    start = draw.randrange(6)
    sizes = [1, 1.01, 3.333, 12.34] if seed % 2 else [0, 0.7, 0.999, 1, 1.01, 3.333]
    scales = [draw.choice([-1, 1]) * draw.choice(sizes) for _ in range(6)]
    keeps = [draw.choice([0.65, 0.75, 1.0, 1.2]) for _ in range(6)]
    layers = [layer(f"h.{at}.attn", scales[at], keeps[at]) for at in range(6)]
    init, sites = remedy(advise(collapse(f"h.{start}"), layers, carries))
    # √½ = 0.71 of μ/‖Y‖ is what a layer is to keep
    suspects = [at for at in range(6) if at >= start or keeps[at] < 0.71]
    least = min(abs(scales[at]) for at in suspects)
    if least < 1:
        assert init == 1
    else:
        wanted = max(2 * least, 3)
        assert wanted <= init < wanted * 1.1
        assert float(f"{init:.1e}") == init  # two digits
    fault = [at for at in suspects if abs(scales[at]) < init]
    assert fault
    whole = len(fault) == len(layers) or not carries
    assert sites == ([] if whole else [f"h.{at}.attn" for at in fault])


@pytest.mark.parametrize("bound", [3.333, 1.2, None])
@pytest.mark.parametrize("stack", ["h", "h2"])
def test_where_1_does_not_do_all_layers_of_the_stack_get_what_the_bound_asks_for(
    advise: Advise, stack: str, bound: float | None
) -> None:
    scales = [0.5, -0.5, 7.0, 1.0, 0.5, 0.9]
    names = ["h.0", "h.1", "h.2", "h.3", "h2.0", "h2.1"]
    layers = [layer(*given, sound_scale_relative=bound) for given in zip(names, scales, strict=True)]
    left = collapse(f"{stack}.1", stack).model_copy(update={"evidence": {"relative_spread_lowest": 0.2}})
    found = advise(collapse(f"{stack}.1", stack), layers, left=left)
    wanted = 3.4 if bound == 3.333 else 2  # twice the 1 that did not do
    assert remedy(found) == (wanted, ["h.0", "h.1", "h.3"] if stack == "h" else ["h2.0", "h2.1"])
    assert found.evidence["relative_spread_lowest_at_1"] == 0.2


def test_a_scale_that_no_bound_asks_for_is_twice_what_did_not_do(advise: Advise) -> None:
    for unknown in (None, math.inf, math.nan):
        found = advise(collapse("h.0"), [layer("h.0", 1.5, sound_scale_relative=unknown)])
        assert remedy(found)[0] == 3
        assert "lambda_sound" not in found.evidence


def test_what_each_bound_asks_for_is_told_under_its_name(advise: Advise) -> None:
    found = advise(collapse("h.0"), [layer("h.0", -0.5)])
    assert found.evidence == {
        "relative_spread": 0.1,
        "lambda": -0.5,
        "lambda_sound": 3,  # of μ/‖Y‖
        "lambda_paper": 7,
        "lambda_paper_with_floor": 9,
    }
    behind = layer("h.0", norm="LayerNorm", sound_scale_relative=None)
    assert advise(collapse("h.0"), [behind]).evidence["lambda_sound"] == 5


LAYERS = ["h.1.self", "h.1.cross", "h.2.self", "h.10.self", "h2.1.self"]


@pytest.mark.parametrize(
    ("stack", "site", "told", "first"),
    [
        (
            "h",
            "h.1",
            1,
            0,
        ),  # of two mixers in a block the last gave what was measured, either may be at fault
        ("h", "h.2", 2, 2),
        ("h", "h.10", 3, 3),
        ("h", "h.9", 3, 0),  # a block without a mixer: all of its stack, and none but it
        ("h2", "h2.1", 4, 4),
        ("", "", 4, 0),  # a stack without a name is the model
    ],
)
def test_a_collapse_is_told_of_the_block_where_it_starts(
    advise: Advise, stack: str, site: str, told: int, first: int
) -> None:
    layers = [layer(name, scale=at / 10) for at, name in enumerate(LAYERS)]
    found = advise(collapse(site, stack), layers)
    assert found.evidence["lambda"] == told / 10
    inside = LAYERS[first:] if stack != "h" else LAYERS[first:4]
    assert remedy(found) == (1, inside if len(inside) < len(LAYERS) else [])


def test_a_mixer_that_is_called_twice_has_one_skip(advise: Advise) -> None:
    layers = [layer("h.0", 0.0), layer("h.0", 0.0), layer("h.1", 0.0)]
    assert remedy(advise(collapse("h.0"), layers)) == (1, [])
    layers[-1].scale = 1.0
    assert remedy(advise(collapse("h.0"), layers)) == (1, ["h.0"])


# --- what joins the findings --------------------------------------------------------------------------------


def test_other_findings_stay_as_they_are_and_the_gravest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "certify_skip", lambda *_: SimpleNamespace(layers=[layer("h.0")]))
    monkeypatch.setattr(advice, "_shares", lambda model, batch: {"h.0.attn": 0.0, "h.1.attn": 1.0})
    monkeypatch.setattr(advice, "skips_of", lambda model: {"λ": 1})
    info = collapse("h.0").model_copy(update={"code": "DUPLICATE_HEADS", "severity": "info"})
    found = rw.skips.recommend(holding(info, collapse("h.0")), nn.Identity(), tokens()).findings
    assert [one.code for one in found] == ["COLLAPSE", "INACTIVE_BLOCK", "DUPLICATE_HEADS"]
    assert found[2] == info


REFUSED = RankwiseError("x", expected="a", got="b", fix="c")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (REFUSED, str(REFUSED)),
        (RuntimeError("lost"), "lost"),
        (KeyError("y"), "KeyError('y')"),
        (MemoryError(), "MemoryError()"),
    ],
    ids=["refused", "lost", "key", "memory"],
)
def test_what_cannot_be_told_is_noted(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(advice, "_shares", fail)
    monkeypatch.setattr(advice, "certify_skip", fail)
    monkeypatch.setattr(advice, "skips_of", lambda model: {"λ": 1})
    told: list[str] = []
    audit = rw.skips.recommend(holding(collapse("h.0")), nn.Identity(), tokens(), on_failure=told.append)
    assert audit.findings == [collapse("h.0").model_copy(update={"remedy": advice.BY_HAND})]
    assert told == [
        f"not known whether λ or LayerScale drowns single mixers: {said}",
        f"no λ is named for COLLAPSE: {said}",
    ]
    assert audit.provenance.notes[:2] == told
    assert not audit.provenance.advised


@pytest.mark.parametrize("part", ["_shares", "certify_skip"])
@pytest.mark.parametrize("error", [REFUSED, KeyError("y")], ids=["refused", "key"])
def test_what_cannot_be_told_is_an_error(
    monkeypatch: pytest.MonkeyPatch, part: str, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(advice, part, fail)
    monkeypatch.setattr(advice, "skips_of", lambda model: {"λ": 1} if part == "_shares" else {})
    with pytest.raises(type(error)) as raised:
        rw.skips.recommend(holding(collapse("h.0")), nn.Identity(), tokens())
    assert raised.value is error


@pytest.mark.parametrize("on_failure", [None, lambda said: None], ids=["raised", "tolerated"])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"audit": None}, r"`audit`: expected an audit, got NoneType\. .*rw\.Audit\.load"),
        ({"audit": "audit.json"}, r"`audit`: expected an audit, got str\. .*rw\.Audit\.load"),
        ({"audit": [collapse("h.0")]}, r"`audit`: expected an audit, got list of Finding\."),
        ({"model": None}, r"`model`: expected a torch\.nn\.Module, got NoneType\."),
        ({"batch": None}, r"`batch`: expected a batch, got NoneType\. Pass one of the batches"),
        ({"batch": "a text"}, "`batch`: expected a batch, got str"),
        ({"batch": [{"input_ids": torch.ones(1, 2)}]}, "`batch`: expected a batch, got list of dict"),
        ({"batch": {}}, "`batch`: expected a batch, got dict"),
    ],
)
def test_arguments_that_are_something_else_are_refused(
    change: dict[str, Any], match: str, on_failure: Any
) -> None:
    given = {"audit": holding(), "model": nn.Identity(), "batch": tokens()} | change
    with unchecked(), pytest.raises(InputError, match=match):
        rw.skips.recommend(**given, on_failure=on_failure)


@pytest.mark.parametrize("found", ["COLLAPSE", "λ-skips"])
def test_a_batch_that_the_model_does_not_take_is_refused_with_the_cure(found: str) -> None:
    model = hugging_face("BertModel", **BERT)()
    audit = rw.audit(model, [text_inputs()])
    if found == "COLLAPSE":
        audit = audit.model_copy(update={"findings": [collapse("encoder.layer.0")]})
    else:
        rw.add_lambda_skip(model)
    wrong = {"input_idz": text_inputs()["input_ids"]}
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


@pytest.mark.parametrize("part", ["_shares", "certify_skip"])
def test_ctrl_c_stops_it_and_the_audit_is_as_it_was(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(advice, part, interrupted)
    monkeypatch.setattr(advice, "skips_of", lambda model: {"λ": 1} if part == "_shares" else {})
    audit = holding(collapse("h.0"))
    with pytest.raises(KeyboardInterrupt):
        rw.skips.recommend(audit, nn.Identity(), tokens())
    assert audit == holding(collapse("h.0"))


def test_advice_on_advice_is_the_same() -> None:
    model = Stack([Average(1.0) for _ in range(6)]).eval()
    once = advised(model, tokens() + 1)
    assert rw.skips.recommend(once, model, tokens() + 1) == once
    drowned = hugging_face("BertModel", **BERT)()
    skips = rw.add_lambda_skip(drowned)
    with torch.no_grad():
        skips[list(skips)[1]].fill_(1e5)
    once = advised(drowned, text_inputs())
    again = rw.skips.recommend(once, drowned, text_inputs())
    assert (len(switched_off(once)), again.findings, again.provenance) == (1, once.findings, once.provenance)


def test_what_it_did_is_said_as_it_comes_and_in_the_record() -> None:
    told: list[str] = []
    model = Stack([Average(1.0) for _ in range(6)]).eval()
    audit = rw.skips.recommend(rw.audit(model, [tokens() + 1]), model, tokens() + 1, told.append)
    assert told == ["the certificate of a collapse"]
    assert audit.provenance.notes[-1] == AGAIN
    assert audit.provenance.advised
    sound = Stack([Average(1.0, strength=0.1)]).eval()
    assert advised(sound, tokens()).provenance.notes == rw.audit(sound, [tokens()]).provenance.notes


def test_audits_that_it_cannot_advise_on_are_refused() -> None:
    model = Stack([Average(1.0)]).eval()
    audit = rw.audit(model, [tokens()])
    with pytest.raises(InputError, match=r"expected an audit of a torch\.nn.*Identity, got one of a .*Stack"):
        rw.skips.recommend(audit, nn.Identity(), tokens())
    with pytest.raises(InputError, match="expected a complete audit"):
        rw.skips.recommend(audit.model_copy(update={"complete": False}), model, tokens())


@pytest.mark.parametrize("make", ["dinov2", "skips", "train", "collapse"])
def test_the_model_is_as_it_was_bit_for_bit(make: str) -> None:
    """Also where LayerScale is closed, by zeros of either sign, and opened to look behind it."""
    torch.manual_seed(0)
    if make == "dinov2":
        sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28}
        model, batch = hugging_face("Dinov2Model", **sizes, patch_size=7)(), torch.randn(2, 3, 28, 28)
        with torch.no_grad():
            model.get_parameter("encoder.layer.1.layer_scale1.lambda1").fill_(-0.0)
    elif make == "collapse":
        model, batch = Stack([Average(1.0) for _ in range(6)]).eval(), tokens() + 1
    else:
        model, batch = hugging_face("BertModel", **BERT)(), text_inputs()
        rw.add_lambda_skip(model, init=3)
    audit = rw.audit(model, [batch])
    model.train(make == "train")
    before = fingerprint(model)
    rw.skips.recommend(audit, model, batch)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("code", "block", "told"),
    [
        ("INACTIVE_BLOCK", "h.1", ["h.10"]),
        ("INACTIVE_BLOCK", "h.1.attn", ["h.10"]),
        ("INACTIVE_BLOCK", "h", []),
        ("DUPLICATE_HEADS", "h.1", ["h.1.attn", "h.10"]),
    ],
)
def test_mixers_in_a_block_that_is_switched_off_are_told_with_it(
    monkeypatch: pytest.MonkeyPatch, code: str, block: str, told: list[str]
) -> None:
    monkeypatch.setattr(advice, "_shares", lambda model, batch: {"h.1.attn": 0.0, "h.10": 0.0})
    monkeypatch.setattr(advice, "skips_of", lambda model: {"λ": 1})
    there = collapse(block).model_copy(update={"code": code, "severity": "warning"})
    found = rw.skips.recommend(holding(there), nn.Identity(), tokens()).findings
    assert [one.where.site for one in found if one != there] == told


# --- how much a mixer adds ----------------------------------------------------------------------------------


def shares(model: nn.Module, batch: Any) -> dict[str, float]:
    return dict(advice._shares(model, batch))


def test_a_mixer_is_drowned_from_a_hundredth_on() -> None:
    """‖b‖/‖λy + b‖ falls as 1/λ."""
    torch.manual_seed(0)
    model = Stack([nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)]).eval()
    skips = rw.add_lambda_skip(model, init=1e4, example=tokens())
    ((site, share),) = shares(model, tokens()).items()
    for part, found in ((0.9, [site]), (1.1, [])):
        with torch.no_grad():
            skips[site].fill_(1e4 * share / (part * INACTIVE_TURN))
        assert shares(model, tokens())[site] == pytest.approx(part * INACTIVE_TURN, rel=0.01)
        assert switched_off(advised(model, tokens())) == found


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


def test_a_compiled_model_is_refused_only_if_there_is_something_to_see() -> None:
    model = Stack([Average(1.0)]).eval()
    rw.add_lambda_skip(model, example=tokens())
    plain = Stack([Average(1.0)]).eval()
    for one in (model, plain):
        one.compile()
    with pytest.raises(RankwiseError, match="not compiled yet"):
        shares(model, tokens())
    assert shares(plain, tokens()) == {}


class LayerScale(nn.Module):
    """As timm has it: under the name ``gamma``."""

    def __init__(self, start: list[float] | None = None) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(8) if start is None else torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Scaled(nn.Module):
    """Average with LayerScale on what it adds."""

    def __init__(self, scale: LayerScale) -> None:
        super().__init__()
        self.inner, self.scale = Average(1.0, strength=0.1), scale
        self.attention = self.inner.attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale(self.attention(x, x, x)[0])


def test_layer_scale_beside_skips_is_seen_at_their_scales() -> None:
    """λ of 4 in one block and LayerScale in the other: shares of both, with hooks off and λ kept."""
    model = Stack([Scaled(LayerScale()), Scaled(LayerScale([0.0] * 8))]).eval()
    skips = rw.add_lambda_skip(model, init=4, example=tokens(), sites="blocks.0")
    alone = {}
    for scale in (4.0, 1.0):
        with torch.no_grad():
            skips["blocks.0"].fill_(scale)
        alone[scale] = shares(model, tokens())
    assert list(alone[1.0]) == ["blocks.0", "blocks.1"]
    assert alone[4.0]["blocks.0"] == pytest.approx(alone[1.0]["blocks.0"] / 4, rel=0.2)
    assert alone[4.0]["blocks.1"] == 0


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("layer_scale_1", True),
        ("LayerScale2", True),
        ("lambda1", True),
        ("lambda_2", True),
        ("gamma_1", True),
        ("Gamma2", True),
        ("lambda_skip", False),
        ("lambda_1st", False),
        ("lambda_3", False),
        ("gamma", False),
        ("weight", False),
    ],
)
def test_layer_scale_is_known_by_its_name(name: str, found: bool) -> None:
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.ones(2)))
    around = nn.ModuleDict({"layer_scale": module})  # a name of a module is no name of a parameter
    assert [id(one) for one in advice._layer_scales(around)] == [id(getattr(module, name))] * found


def test_layer_scale_is_known_by_its_class_whatever_its_parameter_is_called() -> None:
    scale = LayerScale()
    assert [id(one) for one in advice._layer_scales(nn.Sequential(scale))] == [id(scale.gamma)]


@pytest.mark.parametrize("start", [[0.0] * 8, [0.0, 1.0] * 4, [-1e-9] + [0.0] * 7], ids=["0", "some", "less"])
def test_layer_scale_is_left_as_it_was(start: list[float]) -> None:
    scale = LayerScale(start)
    with advice._open([scale.gamma]):
        assert bool(scale.gamma.any())  # a derivative can pass
        assert any(start) == torch.equal(scale.gamma, torch.tensor(start))
    assert torch.equal(scale.gamma, torch.tensor(start))
