"""`rankwise audit --shards`: equal to one audit of all sequences; Ctrl-C, failures, `--resume`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.auditing.same_audits import compared
from tests.support.nets import NETS
from typer.testing import Result

from rankwise.auditing import Audit
from rankwise.cli import audit_job
from rankwise.errors import InputError, RankwiseError

Run = Callable[..., Result]
DATA = ("--text", "text.txt", "--tokens", 16, "--batch-size", 2, "--sequences", 5)
NAMED = {"file_digests", "data", "forward"}
"""Fields that differ: digests, absolute paths, and the number of passes."""


@pytest.fixture
def whole(run: Run, tiny: Path) -> Audit:
    assert run("audit", tiny, *DATA, "--loss", "--out", "whole").exit_code == 0
    return Audit.load("whole")


def test_shards_become_the_audit_of_all_sequences(run: Run, tiny: Path, whole: Audit) -> None:
    result = run("audit", tiny, *DATA, "--loss", "--shards", 2, "--out", "out")
    assert result.exit_code == 0, result.output
    merged = Audit.load("out/tiny")
    assert compared(whole, merged, NAMED) == []
    assert merged.provenance.sequences == 5
    assert merged.provenance.command.endswith("--shards 2 --loss")
    assert [finding.code for finding in merged.findings] == [finding.code for finding in whole.findings]
    assert {path.name for path in Path("out/tiny").glob("shard-*/audit.json")} == {"audit.json"}
    assert Path("out/index.html").exists()
    kept = run("audit", tiny, *DATA, "--loss", "--shards", 2, "--out", "out", "--resume")
    assert "audited 0, kept 1, failed 0" in kept.output


def test_single_shards_are_merged_by_the_command(run: Run, tiny: Path, whole: Audit) -> None:
    for shard in ("1/2", "2/2"):
        assert run("audit", tiny, *DATA, "--loss", "--shards", shard, "--out", shard).exit_code == 0
    assert run("merge", "1/2", "2/2/audit.json", "--out", "out").exit_code == 0
    assert compared(whole, Audit.load("out"), NAMED) == []


def test_ctrl_c_keeps_finished_shards_and_resume_audits_the_others(
    run: Run, tiny: Path, whole: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, calls = audit_job.load_model, iter(range(9))

    def interrupted(*arguments: object, **options: object) -> object:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return load(*arguments, **options)  # type: ignore[arg-type]

    words = ("audit", tiny, *DATA, "--loss", "--shards", 3, "--out", "out", "--resume")
    monkeypatch.setattr(audit_job, "load_model", interrupted)
    stopped = run(*words)
    assert (stopped.exit_code, "`--resume` audits what is left" in stopped.stderr) == (130, True)
    assert [path.parent.name for path in Path("out").rglob("audit.json")] == ["shard-1-of-3"]
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert next(calls) == 4, "the first shard is not audited again"
    assert compared(whole, Audit.load("out/tiny"), NAMED) == []


def test_a_shard_that_fails_costs_its_model_alone(run: Run, tiny: Path) -> None:
    refused = run("audit", tiny, *DATA, "--shards", 6, "--out", "out")
    assert isinstance(refused.exception, InputError)
    assert "expected an iterable of at least one batch" in refused.stderr
    assert len(list(Path("out/tiny").glob("shard-*/audit.json"))) == 5
    assert not Path("out/tiny/audit.json").exists()


def test_batches_of_a_factory_are_split(run: Run) -> None:
    assert run("audit", f"{NETS}:several", "--shards", 2, "--out", "out").exit_code == 0
    merged = Audit.load("out/nets.py-several")
    assert (merged.provenance.sequences, merged.heads[0].sequences) == (3, 3)
    drawn = run("audit", f"{NETS}:drawn", "--shards", 2, "--out", "drawn")
    assert isinstance(drawn.exception, RankwiseError)
    assert "expected the same weights_digest in all of them" in drawn.stderr
