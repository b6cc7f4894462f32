"""What an audit says of λ: a collapse names what each bound asks for, a drowned block is found."""

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.audit import advice
from rankwise.audit.findings import TURN


class Average(nn.Module):
    """Every token gets the mean of all: with a weak skip, tokens become alike."""

    def __init__(self, skip: float) -> None:
        super().__init__()
        self.attention, self.skip = nn.MultiheadAttention(8, 1, batch_first=True), skip
        with torch.no_grad():
            self.attention.in_proj_weight[:16] = 0
            self.attention.in_proj_weight[16:] = torch.eye(8)
            self.attention.out_proj.weight.copy_(torch.eye(8))

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
    init = max(2, at.sound_scale_relative)  # what is there already did not do
    assert finding.remedy.startswith(f"rankwise skip MODEL --init {init:.2g} ")


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
