"""What an audit says of λ: a collapse names what each bound asks for, drowned blocks and mixers are found."""

import shlex

import pytest
import torch
from recipes.tiny_models import BERT, hugging_face, text_inputs
from torch import Tensor, nn

import rankwise as rw
from rankwise.audit import advice
from rankwise.audit.findings import TURN
from rankwise.surgery.skips import choose


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


def test_a_collapse_names_its_layer_the_scales_and_the_command() -> None:
    model = Stack([Average(1.0) for _ in range(6)]).eval()
    start = tokens() + 1
    audit = rw.audit(model, [start])
    (finding,) = [one for one in audit.findings if one.code == "COLLAPSE"]
    layers = {layer.layer: layer.relative_collapse for layer in audit.layers}
    assert layers[finding.where.layer] == finding.evidence["relative_collapse"]
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
    (finding,) = [one for one in rw.audit(model, [start]).findings if one.code == "COLLAPSE"]
    words = shlex.split(finding.remedy)
    named = [words[at + 1] for at, word in enumerate(words) if word == "--sites"]
    chosen = choose(list(skips.sites.values()), named)
    assert {list(skips).index(site.name) for site in chosen} == fault
    with torch.no_grad():
        for site in chosen:
            skips[site.name].fill_(float(words[words.index("--init") + 1]))
    assert all(one.code != "COLLAPSE" for one in rw.audit(model, [start]).findings)


def test_where_every_skip_is_at_fault_none_is_named() -> None:
    model, start = Stack([Average(1.0, strength=0.1) for _ in range(4)]).eval(), tokens() + 1
    with pytest.warns(UserWarning, match="λ = 0"):
        rw.add_lambda_skip(model, init=0, example=start)
    (finding,) = [one for one in rw.audit(model, [start]).findings if one.code == "COLLAPSE"]
    assert finding.remedy == "rankwise skip MODEL --init 1 --text TEXT --out DIR"


def test_a_model_that_cannot_be_certified_is_still_audited() -> None:
    """λ x is no plain sum: no residual connection is found."""
    audit = rw.audit(Stack([Average(0.01) for _ in range(3)]).eval(), [tokens() + 1])
    (finding,) = [one for one in audit.findings if one.code == "COLLAPSE"]
    assert "lambda_sound" not in finding.evidence
    assert any(note.startswith("no λ is named for COLLAPSE") for note in audit.provenance.notes)


def test_a_block_that_gives_back_what_it_reads_is_found() -> None:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True) for _ in range(3)]
    with torch.no_grad():
        for weight in (blocks[1].self_attn.out_proj.weight, blocks[1].linear2.weight, blocks[1].linear2.bias):
            weight *= 1e-4
    audit = rw.audit(Stack(blocks).eval(), [tokens()])
    found = [one for one in audit.findings if one.code == "SWITCHED_OFF"]
    assert [one.where.layer for one in found] == [2]
    assert found[0].evidence["turn"] < TURN
    turns = [layer.turn for layer in audit.layers]
    assert turns[0] != turns[0]  # nothing lies before the first state
    assert min(turns[1], turns[3]) > TURN


def switched_off(audit: rw.Audit) -> list[str]:
    return [one.where.site for one in audit.findings if one.code == "SWITCHED_OFF"]


def test_a_drowned_mixer_is_found_beside_a_feed_forward_part_at_work() -> None:
    model, batches = hugging_face("BertModel", **BERT)(), [text_inputs()]
    skips = rw.add_lambda_skip(model)
    assert switched_off(rw.audit(model, batches)) == []
    site = list(skips)[1]
    with torch.no_grad():
        skips[site].fill_(1e5)
    audit = rw.audit(model, batches)
    assert switched_off(audit) == [site]
    assert min(layer.turn for layer in audit.layers[1:]) > TURN
    (finding,) = [one for one in audit.findings if one.code == "SWITCHED_OFF"]
    certified = next(one for one in rw.certify_skip(model, batches[0]).layers if one.site == site)
    assert finding.evidence["mixer_share"] == pytest.approx(certified.price, rel=0.2)


@pytest.mark.parametrize("scale", [0.0, 1e-5])
def test_a_mixer_that_layer_scale_closes_is_found(scale: float) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28}
    model, batches = hugging_face("Dinov2Model", **sizes, patch_size=7)(), [torch.randn(2, 3, 28, 28)]
    assert switched_off(rw.audit(model, batches)) == []
    weight = model.get_parameter("encoder.layer.1.layer_scale1.lambda1")
    with torch.no_grad():
        weight.fill_(scale)
    audit = rw.audit(model, batches)
    assert [site.startswith("encoder.layer.1.") for site in switched_off(audit)] == [True]
    assert (weight == scale).all()
    assert min(layer.turn for layer in audit.layers[1:]) > TURN


def test_a_block_that_is_switched_off_is_one_finding() -> None:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True) for _ in range(3)]
    model = Stack(blocks).eval()
    skips = rw.add_lambda_skip(model, example=tokens())
    with torch.no_grad():
        skips[list(skips)[2]].fill_(1e5)
        for weight in (blocks[2].linear2.weight, blocks[2].linear2.bias):
            weight.zero_()
    assert switched_off(rw.audit(model, [tokens()])) == ["blocks.2"]


def test_models_without_skips_to_look_at_are_run_once() -> None:
    runs: list[int] = []
    model = Stack([Average(1.0, strength=0.1)]).eval()
    model.register_forward_hook(lambda *_: runs.append(1))
    rw.audit(model, [tokens()])
    assert len(runs) == 1
