"""Run experiments and studies, and write their pages.

    python -m experiments list
    python -m experiments run language --data data --rows tost transformer --seeds 0 1 2
    python -m experiments run collapse_depth
    python -m experiments render --check

`run` trains the rows of an experiment that have no run yet, and keeps them in experiments/results/NAME.jsonl;
an interrupted run resumes. It measures a study anew, keeps its report in experiments/results/NAME.jsonl, and
writes its page. `render` writes all pages from the kept results. The folder of `--data` holds
tiny_shakespeare/input.txt, wikitext2/valid.txt, cifar10/cifar10.npz and imdb/{train,test}.jsonl.gz.
Checkpoints and the best models are in `--folder`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import evidence, reference
from experiments.experiment import run_missing
from experiments.registry import EXPERIMENTS, STUDIES
from experiments.render import DOCS, pages
from experiments.results import RESULTS
from experiments.study import Study
from experiments.training.cost import needs
from rankwise._internals.files import write_file
from rankwise.errors import RankwiseError


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if all runs succeeded, or all pages agree with the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list experiments and studies")
    run = commands.add_parser("run", help="run an experiment or a study")
    run.add_argument("name", choices=[*EXPERIMENTS, *STUDIES])
    run.add_argument("--rows", nargs="+", metavar="LABEL", help="default: all")
    run.add_argument("--seeds", nargs="+", type=int, help="default: all of the experiment")
    run.add_argument("--large", action="store_true", help="run rows at the size of the paper, on a GPU")
    run.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets")
    run.add_argument("--folder", type=Path, default=Path("runs"), help="folder of checkpoints and models")
    run.add_argument("--results", type=Path, default=RESULTS)
    render = commands.add_parser("render", help="write all pages")
    render.add_argument("--check", action="store_true", help="compare them in place of writing them")
    given = parser.parse_args(arguments)
    if given.command == "list":
        for one in EXPERIMENTS.values():
            print(f"{one.name:22} {one.title}: {'; '.join(one.rows)}")
            if one.large:
                print(f"{'':22} not run here: {'; '.join(one.large)}: {needs(one.large.values())}")
        for study in STUDIES.values():
            print(f"{study.name:22} {study.claim}")
        return 0
    try:
        if given.command == "render":
            return _render(check=given.check)
        if given.name in STUDIES:
            usual = vars(run.parse_args([given.name, "--data", str(given.data)]))
            if unused := [f"--{name}" for name, value in usual.items() if getattr(given, name) != value]:
                parser.error(f"{given.name}: expected no option but --data, got {', '.join(unused)}")
            _run_study(STUDIES[given.name], given.data)
            return 0
        experiment = EXPERIMENTS[given.name]
        rows = given.rows or list(experiment.rows)
        if unknown := [label for label in rows if label not in {**experiment.rows, **experiment.large}]:
            parser.error(f"no rows {', '.join(unknown)}; see `python -m experiments list`")
        if not given.large and (large := [label for label in rows if label in experiment.large]):
            required = "; ".join(f"{label}: {needs([experiment.large[label]])}" for label in large)
            parser.error(
                f"{', '.join(large)}: expected rows that run on a CPU, got rows at the size of the paper. "
                f"Estimate of experiments/training/cost.py: {required}. Pass --large to run them."
            )
        seeds = experiment.seeds if given.seeds is None else given.seeds
        succeeded = run_missing(
            experiment, given.data, rows, seeds, folder=given.folder, results=given.results
        )
        return 0 if succeeded else 1
    except (RankwiseError, FileNotFoundError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last complete checkpoint", file=sys.stderr)
        return 130


def _run_study(study: Study, data: Path) -> None:
    report = study.run(data)
    for path, text in study.files(report).items():
        print(f"wrote {write_file(path, text, 'page')}")
    if not study.page:
        print("\n\n".join(f"{name}\n\n{table}" for name, table in study.tables(report).items()))


def _render(*, check: bool) -> int:
    """Write all pages and figures, or compare them with the files."""
    files = pages(list(EXPERIMENTS.values()))
    files |= {DOCS / f"reference/{name}.md": text for name, text in reference.pages().items()}
    for study in STUDIES.values():
        files |= study.files(study.kept())
    files |= {DOCS / "images" / name: figure for name, figure in evidence.figures().items()}
    if check:
        stale = [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
        for path in stale:
            print(f"{path} does not agree with the results: python -m experiments render", file=sys.stderr)
        return 1 if stale else 0
    for path, text in files.items():
        write_file(path, text, "page")
    print(f"wrote {len(files)} pages and figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
