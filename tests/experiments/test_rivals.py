"""`rankwise.compress` loses less than other methods, which compute what their names promise."""

import torch
from experiments.rank.compress_cache import rivals as latent_rivals
from experiments.rank.compress_minilm import rivals
from experiments.rank.rivals import joint_components, key_components, random_directions
from tests.compression.compression_cases import bert, ids
from tests.compression.test_width import head

from rankwise.cli.load_model import demo_text
from rankwise.measures.required_width import LogitBases, logit_bases


def error(bases: LogitBases, rank: int) -> float:
    q, k = head()
    return float((q @ k.mT - (q @ bases.query[:, :rank]) @ (k @ bases.key[:, :rank]).mT).norm())


def test_the_closed_form_beats_other_bases_and_all_are_whole_at_full_width() -> None:
    q, k = head()
    moments = q.mT @ q, k.mT @ k
    ours = logit_bases(*moments)
    for other in (key_components(*moments), joint_components(*moments), random_directions(*moments, seed=3)):
        assert error(other, 8) < 1e-8
        assert all(error(ours, rank) < error(other, rank) for rank in (1, 3, 7))


def test_our_bases_cost_least_attention_on_the_data_they_are_of() -> None:
    costs = rivals(bert(), [ids(6, 30)], [ids(6, 30)], seed=0)
    assert {tuple(points) for points in costs.values()} == {("1", "2", "4", "6")}
    assert len(costs) == 6
    ours = sum(costs.pop("closed form, widths per head").values())
    assert all(ours < sum(points.values()) for points in costs.values())


def test_weighted_latents_beat_latents_of_tokens_or_weights_alone() -> None:
    tokens = torch.tensor([byte + 3 for byte in demo_text().read_bytes()[: 32 * 128]]).view(32, 128)
    costs = latent_rivals([{"input_ids": tokens[:20]}], [{"input_ids": tokens[20:]}], seed=0)
    for share in (
        "0.125",
        "0.25",
    ):  # at a half nothing is lost: tokens have 128 channels, keys and values 256
        ours, _, tokens_alone, weights_alone = (points[share] for points in costs.values())
        assert ours < tokens_alone < weights_alone
