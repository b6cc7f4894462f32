"""TSSA against eager, softmax attention, a linear-attention kernel and the limit of the machine, in one run.

    python benchmarks/tssa.py tssa --quick
    python benchmarks/tssa.py tssa --out tssa.json --plot tssa.html
    python benchmarks/tssa.py tssa --device cuda --dtype bfloat16 --out h200.json

The same as `rankwise bench`: what is measured lives in `rankwise.ops.tssa.bench`, since it belongs to those
who have the package and not this folder. Every contender has its turn in every round, so that whatever else
the machine does hits all of them; ratios are of medians. Answers are compared with float64 in the same run.
"""

import typer

from rankwise.cli.bench import command

if __name__ == "__main__":
    typer.run(command)
