"""Peak memory of one contender, for `memory.fresh_peak`: python -m rankwise.ops.tssa.bench.peak JSON."""

import json
import sys

import torch

from rankwise.ops.tssa.bench.contenders import contenders, inputs
from rankwise.ops.tssa.bench.memory import peak_bytes


def main() -> None:
    """Warm up on a short text, then measure one call and print its bytes."""
    job = json.loads(sys.argv[1])
    dtype = getattr(torch, job["dtype"])
    for tokens in (64, job["tokens"]):
        x = inputs(tokens, job["causal"], job["device"], dtype)
        if job["backward"]:
            x.w.requires_grad_()
        run = contenders(x)[job["name"]]
        given = torch.ones_like(x.w)

        def call(run=run, given=given) -> None:  # type: ignore[no-untyped-def]
            output = run()
            if job["backward"]:
                output.backward(given)

        found = peak_bytes(call, x.w.device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
