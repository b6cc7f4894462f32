"""Statistics of several processes become one audit."""

import pickle

import torch
from tests.auditing.same_audits import compared
from torch import nn

import rankwise as rw
from rankwise.auditing import AuditSettings
from rankwise.auditing.result import NO_WIDTH
from rankwise.auditing.run import build_audit, collect
from rankwise.auditing.settings import chosen_heads
from rankwise.cli.audit_job import ShardResult, merge_shards
from rankwise.errors import RankwiseError


def narrow_second_head(layer: nn.TransformerEncoderLayer) -> None:
    """Set three of four channels of the keys to 0, and scale scores so that the channels matter."""
    with torch.no_grad():
        layer.self_attn.in_proj_weight[:16] *= 5
        layer.self_attn.in_proj_weight[13:16] = 0
        layer.self_attn.in_proj_bias[13:16] = 0


def share(layer: nn.Module, batch: torch.Tensor) -> ShardResult:
    return ShardResult(collect(layer, [batch], AuditSettings.of(matrices="all")))


def merged(*shares: ShardResult) -> tuple[ShardResult, rw.Audit | None]:
    """Merge shares as another process receives them."""
    found = merge_shards(pickle.loads(pickle.dumps(shares)))
    return found, None if found.statistics is None else build_audit(found.statistics, chosen_heads("all"))


def test_shares_of_processes_become_an_audit() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    batches = [torch.randn(1, 9, 8) for _ in range(2)]
    narrow_second_head(layer)
    shares = [share(layer, batches[0]), ShardResult(), share(layer, batches[1])]
    found, audit = merged(*shares)
    assert found.error is None
    whole = rw.audit(layer, batches)
    assert compared(audit, whole, of_all=set()) == []
    [finding] = [finding for finding in audit.findings if finding.code == "OVERSIZED_HEADS"]
    assert finding.heads == [1], "only both shares together have enough tokens per channel"
    alone = rw.Audit.from_statistics(shares[0].statistics)
    assert "OVERSIZED_HEADS" not in {finding.code for finding in alone.findings}
    assert NO_WIDTH not in audit.provenance.notes
    assert audit.heads[0].attention_map is not None
    flagged = {finding.where.head for finding in audit.findings}
    kept = build_audit(found.statistics, chosen_heads("flagged")).heads
    assert all((head.attention_map is not None) == (head.head in flagged) for head in kept)


def test_a_share_that_failed_or_was_interrupted_leaves_an_incomplete_audit() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    whole = share(layer, torch.randn(1, 9, 8))
    gone = ShardResult(error=RankwiseError("audit", expected="no error", got="OSError: gone", fix=""))
    failed, audit = merged(whole, gone, share(layer, torch.randn(1, 9, 8)))
    assert "process 1 of 3: audit: expected no error, got OSError: gone" in str(failed.error)
    assert not audit.complete
    stopped, audit = merged(whole, ShardResult(interrupted=True))
    assert (stopped.interrupted, audit.complete) == (True, False)
    assert merged(gone)[1] is None


def test_merged_baselines_equal_the_baseline_on_all_sequences() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    batches = [torch.randn(2, length, 8) for length in (9, 9, 12)]
    settings = AuditSettings.of(baseline=2)
    _, audit = merged(*(ShardResult(collect(layer, [batch], settings)) for batch in batches))
    whole = rw.audit(layer, batches, baseline=2)
    assert compared(audit, whole, of_all=set()) == []
    assert whole.heads[0].baseline.judged
    assert whole.heads[0].baseline.band[2].pairs == 2 * 6
    settings = [AuditSettings.of(baseline=seeds) for seeds in (3, 2, 3)]
    some = [collect(layer, [batch], one) for batch, one in zip(batches, settings, strict=True)]
    _, fewer = merged(*map(ShardResult, some))
    assert compared(fewer, audit, of_all=set()) == [], "seeds that a share lacks are left out"
