"""Run the experiments on training, and write their page.

    python -m experiments list
    python -m experiments run language --data data --rows tost transformer --seeds 0 1 2
    python -m experiments render --check

`run` trains what has no run yet and keeps it in experiments/results/NAME.jsonl. An interrupted run resumes.
The folder of `--data` holds tiny_shakespeare/input.txt, wikitext2/valid.txt, cifar10/cifar10.npz and
imdb/{train,test}.jsonl.gz. Checkpoints and the best models are in `--folder`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.experiment import run_missing
from experiments.registry import EXPERIMENTS
from experiments.render import PAGE, page
from experiments.results import RESULTS
from rankwise._internals.files import write_file
from rankwise.errors import RankwiseError


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if all runs succeeded, or the page is that of the runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the experiments")
    run = commands.add_parser("run", help="train what has no run yet")
    run.add_argument("experiment", choices=EXPERIMENTS)
    run.add_argument("--rows", nargs="+", metavar="LABEL", help="default: all")
    run.add_argument("--seeds", nargs="+", type=int, help="default: those of the experiment")
    run.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets")
    run.add_argument("--folder", type=Path, default=Path("runs"), help="folder of checkpoints and models")
    run.add_argument("--results", type=Path, default=RESULTS)
    render = commands.add_parser("render", help="write docs/results.md")
    render.add_argument("--check", action="store_true", help="compare with the page in place of writing it")
    given = parser.parse_args(arguments)
    if given.command == "list":
        for one in EXPERIMENTS.values():
            print(f"{one.name:22} {one.title}: {', '.join([*one.rows, *one.large])}")
        return 0
    try:
        if given.command == "render":
            return _render(check=given.check)
        experiment = EXPERIMENTS[given.experiment]
        rows = given.rows or list(experiment.rows)
        if unknown := [label for label in rows if label not in {**experiment.rows, **experiment.large}]:
            parser.error(f"no rows {', '.join(unknown)}; see `python -m experiments list`")
        seeds = experiment.seeds if given.seeds is None else given.seeds
        succeeded = run_missing(
            experiment, given.data, rows, seeds, folder=given.folder, results=given.results
        )
        return 0 if succeeded else 1
    except RankwiseError as error:
        parser.error(str(error))


def _render(*, check: bool) -> int:
    text = page(list(EXPERIMENTS.values()))
    if check:
        same = PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE} is {'' if same else 'not '}that of the runs")
        return 0 if same else 1
    print(f"wrote {write_file(PAGE, text, 'page')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
