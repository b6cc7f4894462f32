"""Capture sees the mixers of every architecture of transformers, or says which not, and why.

Each model type that the installed transformers can build (no download) is built tiny with random float32
weights in its own process, within a limit of CPU time and memory. Recorded are

- the inputs on which it ran, or the first error;
- outputs with and without capture, bit by bit;
- the number of called mixers that were captured, and the reasons in `uncaptured` for the others;
- modules whose class looks like a mixer and that capture does not mention;
- the number of matrices in `output_attentions` of the eager model that are among the captured matrices;
- λ-skips: outputs at λ = 1, and after their removal.

Expected: outputs are bit-identical if a model runs, and every mixer is captured or listed with its reason.
"""

import json
import multiprocessing
import re
import resource
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
from torch import Tensor, nn

import rankwise as rw
from experiments.coverage.families import difference, tensors
from experiments.render import markdown_table
from experiments.results import RESULTS
from experiments.study import Report, Study
from experiments.zoo.any_architecture import find_inputs, tiny_variants
from rankwise._internals.files import write_file
from rankwise._internals.torch_private import forward_hooks

ATTENTION_LIKE = re.compile(
    r"Attention|Attn|Mixer|Mamba|SSM|S4D|Retention|Hyena|RWKV|Rwkv|Delta|LRU|Lru|ShortConv|FourierTransform"
    r"|Correlation|LSTM|GRU|RNN"
)
"""Class names of modules that may mix tokens: more than capture looks for."""
NO_MIXER = re.compile(
    r"(Output|Norm|Mask|Embeddings?|Bias|Pool(ing|er)|Mlp|MLP|FeedForward|Block|Layer|Model|Encoder|Decoder|Head"
    r"|Patchify|Scaler)$"
)
CLOSE = 1e-4
"""Softmaxes of float32 scores of size ≤ 40 by two kernels: some hundred roundings of 6e-8, tenfold."""
SECONDS, MEMORY = 60.0, 8 << 30
PROGRESS = RESULTS / "every_architecture.part"
PRELOADED = ["transformers.modeling_utils", "transformers.models.auto.modeling_auto", __name__]
Entry = dict[str, Any]

# --- one model type --------------------------------------------------------------------------------------


def check_architecture(model_type: str) -> Entry:
    """Build one model type, run it, and compare it with itself under capture and with λ-skips."""
    start, entry = time.perf_counter(), Entry(ran=False)
    try:
        model, batch, size = _running(model_type)
    except Exception as error:
        return entry | {"why": _first_line(error)}
    entry |= {"ran": True, "model": type(model).__name__, "size": size, "inputs": sorted(batch)}
    entry |= compare_captured(model, batch)
    entry |= _skips(model, batch)
    return entry | {"seconds": round(time.perf_counter() - start, 1)}


def _running(model_type: str) -> tuple[nn.Module, dict[str, Tensor], str]:
    """Return a model of this type, a batch that it accepts, and its size."""
    first: Exception | None = None
    for size, model in tiny_variants(model_type):
        batch, error = find_inputs(model)
        if error is None:
            return model, batch, size
        first = first or error
    raise first or RuntimeError("it is not built")


@torch.no_grad()
def _run(model: nn.Module, batch: dict[str, Any], **settings: Any) -> Any:
    torch.manual_seed(2)  # some models draw noise
    return model(**batch, **settings)


def compare_captured(model: nn.Module, batch: dict[str, Tensor]) -> Entry:
    """Return the captured and the uncaptured mixers, and if outputs are the same under capture."""
    with _called(model) as called:
        alone = tensors(_run(model, batch))
    watched: list[Tensor] = []
    refused: Entry = {}
    try:
        with rw.capture(model) as trace:
            watched = tensors(_run(model, batch))
    except rw.RankwiseError as error:  # no mixer was seen: the trace lists the modules
        refused = {"capture_why": _first_line(error)}
    seen = {site.name for site in trace.mixers}
    left = {one.name: one for one in trace.uncaptured if one.name in called}
    types = {name: type(module).__name__ for name, module in called.items()}
    silent = {
        kind
        for name, kind in types.items()
        if ATTENTION_LIKE.search(kind) and not NO_MIXER.search(kind)
        if not any(_related(name, other) for other in (*seen, *left))
    }
    return {
        "identical": _same(alone, watched),
        "captured": len(seen),
        "there": len(seen) + len(left),
        "kinds": sorted({site.kind for site in trace.mixers}),
        "uncaptured": {one.type: one.reason for one in left.values()},
        "silent": sorted(silent),
        **refused,
        **_reported(model, batch, trace),
    }


def _reported(model: nn.Module, batch: dict[str, Tensor], trace: rw.Trace) -> Entry:
    """Count the matrices in `output_attentions` of the eager model, and those among the captured matrices."""
    captured = [site.operator.dense() for site in trace.mixers]
    entry: Entry = {"told": None, "equal": None}
    for made in (_switched, _twin):  # some models build another class of attention if they are built eager
        try:
            output = _run(made(model), batch, output_attentions=True)
        except Exception as error:
            entry.setdefault("told_why", _first_line(error))
            continue
        maps = [value for name, value in output.items() if "attentions" in name]
        matrices = [matrix for matrix in tensors(maps) if matrix.dim() == 4]
        equal = sum(any(difference(one, matrix) <= CLOSE for one in captured) for matrix in matrices)
        if entry["equal"] is None or equal > entry["equal"]:
            entry = {"told": len(matrices), "equal": equal}
        if equal == len(matrices):
            break
    return entry


def _switched(model: nn.Module) -> nn.Module:
    """Return the model itself, switched to attention step by step."""
    model.set_attn_implementation("eager")
    return model


def _twin(model: nn.Module) -> nn.Module:
    """Return a model with the same weights, built with attention step by step."""
    twin: nn.Module = type(model)._from_config(model.config, attn_implementation="eager")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def _skips(model: nn.Module, batch: dict[str, Tensor]) -> Entry:
    """Return if λ-skips at λ = 1 change nothing, and if nothing is left after their removal."""
    before, names, hooks = tensors(_run(model, batch)), list(model.state_dict()), _hooks(model)
    try:
        skips = rw.add_lambda_skip(model, example=batch)
    except Exception as error:
        return {"skips": 0, "skips_why": _first_line(error)}
    no_op = _same(tensors(_run(model, batch)), before)
    rw.remove_lambda_skip(model)
    undone = _same(tensors(_run(model, batch)), before) and list(model.state_dict()) == names
    return {"skips": len(skips), "no_op": no_op, "undone": undone and _hooks(model) == hooks}


def _hooks(model: nn.Module) -> int:
    return sum(len(forward_hooks(module)) for module in model.modules())


@contextmanager
def _called(model: nn.Module) -> Any:
    """Collect the modules that are called until the block ends, by name."""
    names, called = {id(module): name for name, module in model.named_modules()}, {}

    def note(module: nn.Module, args: Any) -> None:
        if id(module) in names:
            called[names[id(module)]] = module

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        handle.remove()


def _related(one: str, other: str) -> bool:
    """Return if one module is the other, inside it, or around it; "" is the model."""
    return not one or not other or f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Compare bit by bit; NaN equals NaN."""
    return len(one) == len(other) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(one, other, strict=True)
    )


def _first_line(error: Exception) -> str:
    """Return an error without the paths of this machine."""
    text = re.sub(r"/\S*/site-packages/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


# --- all model types -------------------------------------------------------------------------------------


def model_types() -> list[str]:
    """Return every model type that `AutoModel` of the installed transformers builds."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(set(MODEL_MAPPING_NAMES) - {"tost"})  # which `rankwise.models` registers


def run_one(name: str, seconds: float = SECONDS) -> Entry:
    """Check one model type in its own process: seconds of CPU time, thirty times as many by the clock."""
    context = multiprocessing.get_context("forkserver")
    answers, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(name, seconds, sender), daemon=True)
    process.start()
    sender.close()
    entry: Entry | None = None
    try:
        if answers.poll(30 * seconds):
            entry = answers.recv()
        else:
            process.kill()
    except EOFError:  # it ended without an answer
        pass
    process.join()
    if entry is None:
        late = process.exitcode in (-9, -24)  # killed, or out of CPU time
        why = f"not done in {seconds:.0f} s" if late else f"its process ended with {process.exitcode}"
        entry = {"ran": False, "why": why}
    return entry


def _answer(name: str, seconds: float, answers: Connection) -> None:
    import transformers

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    answers.send(check_architecture(name))


def measure() -> Report:
    """Check every model type, two at a time; an interrupted run resumes."""
    every = model_types()
    entries: dict[str, Entry] = json.loads(PROGRESS.read_text(encoding="utf-8")) if PROGRESS.exists() else {}
    missing = [name for name in every if name not in entries]
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with ThreadPool(2) as pool:
        for name, entry in zip(missing, pool.imap(run_one, missing), strict=True):
            entries[name] = entry
            print(f"{len(entries)}/{len(every)} {name}: {entry.get('why') or 'ran'}", flush=True)
            write_file(PROGRESS, json.dumps(entries), "progress")
    PROGRESS.unlink()
    return {"model_types": len(every), "entries": dict(sorted(entries.items()))}


HEADINGS = ("model type", "operators", "mixers captured", "of `output_attentions`", "outputs bit-identical")


def tables(report: Report) -> dict[str, str]:
    """Return the totals, the table, and the reasons of uncaptured mixers and of failures."""
    entries = sorted(report["entries"].items())
    ran = {name: entry for name, entry in entries if entry["ran"]}
    failed = {name: entry["why"] for name, entry in entries if not entry["ran"]}
    reasons = _types_by(ran, lambda entry: entry["uncaptured"].values())
    classes = _types_by(ran, lambda entry: entry["silent"])
    whys = Counter(_short(entry["skips_why"]) for entry in ran.values() if "skips_why" in entry)
    uncaptured = [
        (reason, _some(_classes(ran, reason), code=True), _some(types))
        for reason, types in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    return {
        "sums": _sums(ran, failed, report["model_types"], len(classes)),
        "unseen": markdown_table(("reason in `uncaptured`", "classes", "model types"), uncaptured),
        "skips": markdown_table(
            ("why no λ-skip was added", "model types"),
            [(why, str(count)) for why, count in whys.most_common()],
        ),
        "failed": markdown_table(
            ("model type", "first error"), [(name, _cell(why)) for name, why in failed.items()]
        ),
        "table": markdown_table((*HEADINGS, "λ-skips: no-op, undone"), list(map(_row, ran.items()))),
    }


def _sums(ran: Mapping[str, Entry], failed: Mapping[str, str], types: int, silent: int) -> str:
    every = list(ran.values())
    reported, skipped = ([entry for entry in every if entry[key]] for key in ("told", "skips"))
    mixing = [entry for entry in every if entry["there"] or entry["silent"]]

    def total(entries: Iterable[Entry], key: str) -> int:
        return sum(entry[key] for entry in entries)

    rows = {
        "model types that `AutoModel` builds": types,
        "built tiny and ran": len(ran),
        "outputs bit-identical under capture": total(every, "identical"),
        "model types with a mixer": len(mixing),
        "of these, every called mixer captured": sum(
            entry["captured"] == entry["there"] and not entry["silent"] for entry in mixing
        ),
        "called mixers captured": f"{total(every, 'captured'):,} of {total(every, 'there'):,}",
        "classes that look like mixers, were called, and are not mentioned": silent,
        "matrices of `output_attentions` found among the captured": (
            f"{total(reported, 'equal'):,} of {total(reported, 'told'):,}"
        ),
        "model types that take λ-skips": len(skipped),
        "of these, no-op at λ = 1": total(skipped, "no_op"),
        "of these, undone": total(skipped, "undone"),
        "did not build, or took no input that was tried": len(failed),
        "not tried yet": types - len(ran) - len(failed),
    }
    return markdown_table(("", "number"), [(name, str(value)) for name, value in rows.items()])


def _row(item: tuple[str, Entry]) -> tuple[str, ...]:
    name, entry = item
    reported = "not offered"
    if entry["told"] is not None:
        reported = f"{entry['equal']} of {entry['told']}" if entry["told"] else "none given"
    skips = ", ".join(_yes(entry[key]) for key in ("no_op", "undone")) if entry["skips"] else "none"
    captured, kinds = f"{entry['captured']} of {entry['there']}", ", ".join(entry["kinds"]) or "none"
    return name, kinds, captured, reported, _yes(entry["identical"]), skips


def _types_by(ran: Mapping[str, Entry], keys: Any) -> dict[str, list[str]]:
    """Return the model types with each key of their entries."""
    found: dict[str, list[str]] = {}
    for name, entry in ran.items():
        for key in keys(entry):
            found.setdefault(key, []).append(name)
    return found


def _classes(ran: Mapping[str, Entry], reason: str) -> list[str]:
    pairs = [pair for entry in ran.values() for pair in entry["uncaptured"].items()]
    return [kind for kind, why in pairs if why == reason]


def _short(why: str) -> str:
    """Return an error without the names and numbers of one model."""
    _, _, got = why.partition("expected residual connections around mixers, got ")
    said = re.sub(r"^\d+", "some", got.split(".")[0].split(", in ")[0]) if got else why[:110]
    return _cell(said)


def _some(names: Iterable[str], code: bool = False) -> str:
    distinct = sorted(set(names))
    shown = [f"`{name}`" if code else name for name in distinct[:12]]
    return ", ".join(shown) + (f" and {len(distinct) - 12} more" if len(distinct) > 12 else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;").replace("\n", " ")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


STUDY = Study("every_architecture", lambda data: measure(), "evidence/architectures", tables)
