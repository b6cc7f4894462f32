"""Peak memory of one contender, in MiB, for `memory.fresh_peak`: python -m benchmarks.tssa.peak JSON."""

import json
import sys

import torch
from benchmarks.harness import peak_mib
from benchmarks.tssa.contenders import contenders, inputs


def main() -> None:
    """Warm up on a short text, then measure one call and print its MiB."""
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

        found = peak_mib(call, x.w.device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
