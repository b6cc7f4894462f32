"""Write the numbers that one tree measures, for `benchmarks.same_numbers`.

    python benchmarks/measured_numbers.py FOLDER MINILM SUBJECT...

The tree is the one that `import rankwise` finds.
"""

import copy
import json
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

PADDED = 8
"""Tokens of padding at the end of a sequence."""
SUBJECTS = ("demo", "tost", "minilm", "faults", "t5", "vit", "tost_vit", "llama", "mamba", "mamba2")


def measure(subject: str, minilm: Path | None, out: Path) -> None:
    """Write what a subject's audits hold, one file per quantity."""
    import torch

    import rankwise as rw
    from rankwise.auditing.batches import model_batches

    def keep(quantity: str, record: Any) -> None:
        text = json.dumps(record) if isinstance(record, dict) else record.model_dump_json()
        (out / f"{subject}, {quantity}.json").write_text(text, encoding="utf-8")

    torch.manual_seed(0)
    model, batches, tokenizer = _subject(subject, minilm)
    model = model.double().eval()
    first, second, both = audits = [rw.audit(model, part) for part in (batches[:1], batches[1:], batches)]
    keep("first batch", first)
    keep("both batches", both)
    keep("merged", rw.Audit.merge([first, second]))
    keep("comparison", rw.compare(first, both))
    keep("estimated", rw.audit(model, batches[1:], rank_method="estimate"))
    if subject in ("demo", "t5", "vit"):
        parts = [rw.audit(model, part, importance=True) for part in (batches[:1], batches[1:])]
        keep("importance", rw.audit(model, batches, importance="exact"))
        keep("merged importance", rw.Audit.merge(parts))
        keep("compared importance", rw.compare(*parts))
    if subject in ("demo", "faults"):
        model.unused = None  # what the model never calls cannot be initialized anew
        keep("at_init", rw.audit(model, batches, at_init=2))
    if subject == "demo":
        text = _text()
        made, _ = model_batches(model, [text[:150], text[300:700]], tokenizer)
        named = rw.audit(model, made, tokenizer=tokenizer, attention_maps="0:0,3:1")
        keep("texts", named)
        keep("attention maps", {"maps": _maps(named)})
        logged, trained = _monitored(model, batches)
        keep("scalars", {"scalars": logged})
        for step, audit in trained:
            keep(f"training step {step}", audit)
        for history, called in ((rw.compare(*audits), "history"), (trained, "training")):
            keep(called, {"steps": history.steps, "curves": _curves(history)})
            keep(f"{called} comparison", history.comparison)


def _maps(audit: Any) -> list[dict[str, Any]]:
    """Return attention maps as numbers; their form in files is compressed."""
    maps = [(head.layer, head.head, head.attention_map) for head in audit.heads]
    return [
        {"layer": layer, "head": head, "map": kept.matrix().tolist()} for layer, head, kept in maps if kept
    ]


def _curves(history: Any) -> list[dict[str, Any]]:
    """Return the measures of each layer over the steps."""
    names = ("of", "stack", "layer", "cross", "measure")
    return [
        {name: getattr(key, name) for name in names if hasattr(key, name)}
        | {"value": [value for value, _ in pairs], "std": [std for _, std in pairs]}
        for key, pairs in history.curves().items()
    ]


def _monitored(model: Any, batches: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Any]:
    """Train a copy for three steps with a monitor; return its logged numbers and its history."""
    import torch

    import rankwise as rw

    model, logged = copy.deepcopy(model).train(), []
    monitor, optimizer = rw.RankMonitor(batches[0], every=1), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for name, value in rw.monitor.logged_numbers(monitor.step(model, step)).items():
            _, group, place = name.split("/")  # such as rank/heads_effective_rank/layers.00
            of, _, measure = group.partition("_")
            where = {"of": of, "measure": measure, "name": f"step {step} {place}"}
            logged.append(where | {"value": value})
        ids = batches[1]["input_ids"]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return logged, monitor.history


def _subject(subject: str, minilm: Path | None) -> tuple[Any, list[dict[str, Any]], Any]:
    """Return a model, two batches of two sequences each, and a tokenizer if the model has one."""
    import torch
    import transformers as tf

    tokenizer = None
    small: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    heads = small | {"num_attention_heads": 4, "intermediate_size": 64, "initializer_range": 0.2}
    if subject in ("demo", "tost", "minilm"):
        if subject == "tost":
            import_module("rankwise.models")  # makes the model's type known to transformers
        folder = minilm if subject == "minilm" else _asset("demo_tost" if subject == "tost" else "demo")
        tokenizer = tf.AutoTokenizer.from_pretrained(folder)
        kind = tf.AutoModel if subject == "minilm" else tf.AutoModelForCausalLM
        model = kind.from_pretrained(folder)
        ids = tokenizer(_text()[:8000], add_special_tokens=False, verbose=False)["input_ids"]
        tokens = torch.tensor(ids[: 4 * 64]).view(2, 2, 64)
    elif subject in ("vit", "tost_vit"):
        picture = (
            {"image_size": 32, "patch_size": 4} if subject == "vit" else {"patch_size": 8, "causal": False}
        )
        kinds = (tf.ViTConfig, tf.ViTModel)
        if subject == "tost_vit":
            models = import_module("rankwise.models")
            kinds = (models.ToSTConfig, models.ToSTForImageClassification)
        model = kinds[1](kinds[0](**heads | picture))
        pixels = torch.randn(2, 2, 3, 32, 32, dtype=torch.float64)
        return model, [{"pixel_values": part} for part in pixels], None
    else:
        if subject == "faults":
            model = _with_faults(tf.BertModel(tf.BertConfig(**heads | {"num_hidden_layers": 4})))
        elif subject == "t5":
            sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
            model = tf.T5ForConditionalGeneration(tf.T5Config(**sizes, decoder_start_token_id=0))
        elif subject == "llama":
            model = tf.LlamaForCausalLM(tf.LlamaConfig(**heads, num_key_value_heads=2))
        elif subject == "mamba":
            model = tf.MambaForCausalLM(tf.MambaConfig(**small, state_size=8))
        else:
            sizes = {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16}
            model = tf.Mamba2ForCausalLM(tf.Mamba2Config(**small, **sizes))
        tokens = torch.randint(64, (2, 2, 48))
    batches = [{"input_ids": part, "attention_mask": part.new_ones(part.shape)} for part in tokens]
    batches[1]["attention_mask"][0, -PADDED:] = 0
    if subject == "faults":  # NONFINITE: one sequence with NaN
        embed = model.embeddings.word_embeddings
        batches = [
            {
                "inputs_embeds": embed(batch["input_ids"]).detach().double(),
                "attention_mask": batch["attention_mask"],
            }
            for batch in batches
        ]
        batches[1]["inputs_embeds"][1] = torch.nan
    if subject == "t5":
        batches = [batch | {"labels": torch.randint(1, 64, (2, 24))} for batch in batches]
    return model, batches, tokenizer


def _with_faults(model: Any) -> Any:
    """Edit a BERT so that its audit has findings of most codes."""
    import torch

    with torch.no_grad():
        first, second, third, fourth = model.encoder.layer
        query, key = first.attention.self.query, first.attention.self.key
        places = torch.arange(512.0)[:, None] * torch.tensor([0.7, 1.0, 2.3, 3.1])
        code = torch.cat([places.cos(), places.sin()], dim=1)
        model.embeddings.position_embeddings.weight[:, :8] = 4 * code
        query.weight[:8] = 0  # CONSTANT: head 0 gives all tokens equal weights
        query.bias[:8] = 0
        for linear in (query, key):  # IDENTITY: heads 1 and 2 find their own place
            linear.weight[8:24] = 20 * torch.eye(8, 32).repeat(2, 1)
        for linear in (second.attention.self.query, second.attention.self.key):
            linear.weight[8:24] = linear.weight[:8].repeat(2, 1)
        key.weight[24:], key.weight[24:, :8] = 0, 5 * code[0]  # SINK: head 3 finds the first token
        query.bias[24:] = 20
        for linear in (third.attention.output.dense, third.output.dense):
            linear.weight.zero_()  # INACTIVE_BLOCK
        fourth.output.dense.bias += 40 * torch.randn(32)  # COLLAPSE
    model.unused = torch.nn.MultiheadAttention(32, 4)  # NOT_CAPTURED
    return model


def _asset(name: str) -> Path:
    import rankwise

    return Path(str(rankwise.__file__)).parent / "assets" / name


def _text() -> str:
    return (_asset("demo") / "text.txt").read_text(encoding="utf-8")


def main() -> int:
    """Measure the subjects on the command line; return 1 if one of them fails."""
    out, minilm, *subjects = sys.argv[1:]
    failed = 0
    for subject in subjects:
        try:
            measure(subject, Path(minilm) if minilm else None, Path(out))
        except Exception:
            print(f"{subject} could not be measured", file=sys.stderr)
            traceback.print_exc()
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
