"""The model card: README.md beside the weights."""

import json
from typing import Any

CARD = """---
library_name: transformers
tags: [rankwise]
---

# {name}: {model}

{claim}

## Results

| | |
| --- | --- |
{scores}

{parameters:,} weights, of the checkpoint at step {best_step} of {steps}: the best of those evaluated.

## Data

{data}

## How it was made

    {command}

Seed {seed}, {minutes:.1f} minutes, {processor} ({threads} threads{gpu}),
torch {torch}, transformers {transformers}, rankwise {rankwise} (commit {commit}).

```json
{configuration}
```

## How to load it

```python
import rankwise.models  # knows the model types that transformers does not
from transformers import {auto}

model = {auto}.from_pretrained("FOLDER")
```
"""
AUTO = {
    "language": "AutoModelForCausalLM",
    "sequence": "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
}


def card(results: dict[str, Any]) -> str:
    """Write the card of a run.

    Args:
        results: what `rankwise.train.train` writes as results.json.
    """
    made, settings = results["provenance"], results["configuration"]
    machine = made["hardware"]
    return CARD.format(
        name=results["recipe"],
        model=settings["model"]["name"],
        claim=settings["claim"],
        scores="\n".join(
            f"| {name.replace('_', ' ')} | {score:.4f} |" for name, score in results["scores"].items()
        ),
        best_step=results["best_step"],
        steps=settings["steps"],
        parameters=results["parameters"],
        data="\n".join(f"- {name}: {value}" for name, value in results["data"].items()),
        command=made["command"],
        seed=made["seed"],
        minutes=results["seconds"] / 60,
        processor=machine["processor"],
        threads=machine["threads"],
        gpu=f", {machine['gpu']}" if "gpu" in machine else "",
        torch=made["torch"],
        transformers=made["transformers"],
        rankwise=made["rankwise"],
        commit=made["commit"] or "unknown",
        configuration=json.dumps(settings, indent=1),
        auto=AUTO[results["kind"]],
    )
