"""Remedies of findings work: commands and calls are run, advice in words is followed."""

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.modules import Average, Block, Stack
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import rankwise as rw
from rankwise.auditing import FINDING_RULES, Finding
from rankwise.cli import app
from rankwise.cli.load_model import demo_text
from rankwise.compression import Compression
from rankwise.report.format import split_code

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 120
T, HEADS = 32, 5
SINK, CONSTANT, IDENTITY, TWIN, OTHER = range(HEADS)
WIDTH = T + 2


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.query, self.key, self.value = (nn.Linear(WIDTH, HEADS * WIDTH, bias=False) for _ in range(3))
        self.output = nn.Linear(HEADS * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            weights(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
            for weights in (self.query, self.key, self.value)
        )
        scores = query @ key.mT / math.sqrt(WIDTH)
        if self.causal:
            scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        mixed = torch.softmax(scores, -1) @ value
        return self.output(mixed.transpose(1, 2).flatten(2))


def tokens() -> Tensor:
    first = torch.zeros(T, 1)
    first[0] = 1
    return torch.cat([torch.ones(T, 1), first, torch.eye(T)], -1)[None].repeat(2, 1, 1)


@torch.no_grad()
def designed(causal: bool = False, layers: int = 1) -> Stack:
    """Return blocks with heads that are a sink, constant, the identity, and two that are alike."""
    torch.manual_seed(0)
    model = Stack(Block(Attention(causal)) for _ in range(layers)).eval()
    attention = model.blocks[0].mixer
    query, key = (weights.weight.view(HEADS, WIDTH, WIDTH) for weights in (attention.query, attention.key))
    query[[SINK, CONSTANT, IDENTITY]] = key[[SINK, CONSTANT, IDENTITY]] = 0
    query[SINK, 0, 0] = key[SINK, 0, 1] = 16  # queries match the key of the first token
    for at in range(2, WIDTH):
        query[IDENTITY, at, at] = key[IDENTITY, at, at] = 16
    query[TWIN] *= 40
    query[OTHER], key[OTHER] = query[TWIN] + 1e-3, key[TWIN]
    return model


def codes(audit: rw.Audit) -> list[str]:
    return [finding.code for finding in audit.findings]


def of(code: str, audit: rw.Audit) -> Finding:
    return next(finding for finding in audit.findings if finding.code == code)


def read_by_output(attention: Attention, head: int) -> Tensor:
    return attention.output.weight[:, head * WIDTH : (head + 1) * WIDTH]


def contribution(model: Stack, head: int) -> Tensor:
    """Return the sum that a head adds to the tokens."""
    other = designed()
    other.load_state_dict(model.state_dict())
    for at in set(range(HEADS)) - {head}:
        read_by_output(other.blocks[0].mixer, at).zero_()
    return other(tokens()) - tokens()


@torch.no_grad()
def folded(finding: Finding) -> None:
    model = designed()
    assert finding.where.head == IDENTITY
    attention = model.blocks[0].mixer
    value = attention.value.weight.view(HEADS, WIDTH, WIDTH)[IDENTITY]
    mapped = tokens() @ (read_by_output(attention, IDENTITY) @ value).T
    assert (contribution(model, IDENTITY) - mapped).norm() < 0.2 * mapped.norm()


@torch.no_grad()
def merged(finding: Finding) -> None:
    model, before = designed(), designed()(tokens())
    assert finding.heads == [TWIN, OTHER]
    attention = model.blocks[0].mixer
    for weights in (attention.query.weight, attention.key.weight):
        by_head = weights.view(HEADS, WIDTH, WIDTH)
        by_head[OTHER] = by_head[TWIN]
    assert (model(tokens()) - before).norm() < 0.1 * contribution(model, TWIN).norm()


@torch.no_grad()
def without_block(finding: Finding) -> None:
    model = switched_off()
    before = model(tokens())
    assert finding.where.layer == 1
    del model.blocks[1]
    assert (model(tokens()) - before).norm() < 0.05 * before.norm()


@torch.no_grad()
def without_mixer(finding: Finding) -> None:
    model, batch = drowned()
    before = model(**batch)[0]
    model.get_submodule(finding.where.site).get_parameter("output.dense.weight").zero_()
    assert (model(**batch)[0] - before).norm() < 0.05 * before.norm()


def raised(finding: Finding) -> None:
    assert "COLLAPSE" in codes(rw.audit(averages(), [tokens()]))
    assert "COLLAPSE" not in codes(rw.audit(averages(skip=2), [tokens()]))


def renamed(finding: Finding) -> None:
    model = bert()
    others = {name.replace("self.query", "self.q"): weight for name, weight in model.state_dict().items()}
    model.save_pretrained("others", state_dict={**others})
    _, loading = type(model).from_pretrained("others", output_loading_info=True)
    assert loading["missing_keys"]
    names = dict(zip(sorted(loading["unexpected_keys"]), sorted(loading["missing_keys"]), strict=True))
    model.save_pretrained("renamed", state_dict={names.get(at, at): one for at, one in others.items()})
    assert not type(model).from_pretrained("renamed", output_loading_info=True)[1]["missing_keys"]


def compared(finding: Finding) -> None:
    batch = ids() | {"labels": ids()["input_ids"]}
    runs = rw.skips.try_lambdas(collapsed, [batch], steps=1, alternatives={"pre-norm": bert})
    assert list(runs) == ["as it is", "λ = 2", "λ = 4", "λ = 8", "λ = 16", "pre-norm"]


FOLLOWED: dict[str, Callable[[Finding], None]] = {
    "replace it with a linear map of each token, the product of its output and value projections, "
    "and compare the loss": folded,
    f"give head {OTHER} the query and key weights of head {TWIN}, and compare the loss": merged,
    ", and save it under the names of the model": renamed,
    "raise λ in the config or the skip connections of the model, if it has λ": raised,
    "nothing that was tried helps; compare the model to one with pre-norm, by rw.skips.try_lambdas": compared,
    "or take the block out of its list and compare the loss": without_block,
    "or set the weights of its output projection to 0 and compare the loss": without_mixer,
}
LEADS = (
    "see which names the checkpoint has instead, ",
    "write a function that returns its operator (docs/reference/models.md, sites by hand), then ",
    "see whether half precision overflowed, ",
    "if it did not, the cause is in the inputs or the weights, ",
    "the cause is in the inputs or the weights, ",
    "see how much mixing its skip connection leaves, ",
    "see what training did: ",
    "train it with each λ (add the --lr of your training): ",
    "to add the least λ that keeps tokens apart here: ",
    "then add the line “load:” that it prints to the factory",
    "see what the model loses without it: ",
    "remove heads one by one, ",
    "nothing: that is too little to notice; to do it anyway, ",
    " (it chooses heads again)",
    " (it chooses heads again), if heads come from nn.Linear",
    ", if heads come from nn.Linear",
)
"""Words around commands and calls."""


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=160, pad_token_id=0,
    )  # fmt: skip
    return BertForMaskedLM(config).eval()


def ids() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 200, (2, 40), generator=torch.Generator().manual_seed(1))}


def redundant() -> nn.Module:
    """Return a BERT with a head that nothing reads."""
    model = bert()
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.output.dense.weight[:, :8] = 0
    return model


def over_wide() -> nn.Module:
    """Return a BERT with a head whose queries use two of eight channels."""
    model = bert()
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.attention.self.query.weight *= 40
            layer.attention.self.key.weight *= 40
        model.bert.encoder.layer[1].attention.self.query.weight[2:8] = 0
    return model


def drowned() -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = bert(), ids()
    skips = rw.add_lambda_skip(model)
    with torch.no_grad():
        skips[list(skips)[1]].fill_(1e5)
    return model, batch


def switched_off() -> Stack:
    model = designed(layers=3)
    with torch.no_grad():
        model.blocks[1].mixer.output.weight *= 1e-5
    return model


def collapsed(by: float = 25) -> nn.Module:
    """Return a BERT in which every token gets a multiple of the mean."""
    model = bert()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "attention.self.query" in name:
                weight.zero_()
            if "attention.self.value.weight" in name or "attention.output.dense.weight" in name:
                weight *= by
    return model


def averages(skip: float = 0.01) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Average(skip, 0.5, WIDTH) for _ in range(3))).eval()


def broken() -> nn.Module:
    model = bert()
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.query.weight[0, 0] = math.nan
    return model


class Sums(nn.Module):
    """Mixer that no operator is known for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, 1) / 2


def unseen() -> nn.Module:
    return Stack([Block(Attention(False)), Block(Sums())])


def operator_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> rw.operators.DenseMixing:
    (x,) = args
    return rw.operators.DenseMixing((torch.ones(x.shape[1], x.shape[1]).tril() / 2).expand(len(x), 1, -1, -1))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "COLLAPSE": (collapsed, ids),
    "COLLAPSE advised": (collapsed, ids),
    "COLLAPSE advised, with labels": (collapsed, lambda: ids() | {"labels": ids()["input_ids"]}),
    "COLLAPSE unnamed": (averages, tokens),
    "COLLAPSE unnamed, with every λ": (lambda: collapsed(100), ids),
    "INACTIVE_BLOCK": (switched_off, tokens),
    "INACTIVE_BLOCK advised": (lambda: drowned()[0], ids),
    "SINK": (designed, tokens),
    "CONSTANT": (designed, tokens),
    "IDENTITY": (designed, tokens),
    "DUPLICATE_HEADS": (designed, tokens),
    "OVERSIZED_HEADS": (over_wide, ids),
    "REMOVABLE": (redundant, ids),
    "NONFINITE": (broken, ids),
    "NONFINITE in half": (lambda: broken().bfloat16(), ids),
    "NOT_CAPTURED": (unseen, tokens),
    "RANDOM_WEIGHTS": (bert, ids),
    "SINK estimated": (designed, tokens),
}
WITH_COSTS = ("REMOVABLE", "SINK estimated")
LACKS = {
    "model": "lacks", "model_class": "transformers.models.bert.modeling_bert.BertForMaskedLM",
    "random_weights": ["bert.encoder.layer.0.attention.self.query.weight"],
}  # fmt: skip
"""Provenance of a model from a checkpoint that lacks a weight."""
FACTORY = """from tests.auditing import test_remedies
def build():
    made, inputs = test_remedies.CASES[{case!r}]
    return made(), [inputs(), inputs()]
"""
MODEL, FILE = "my models/net's weights", "my text.txt"
"""Names that a shell splits."""
PLACEHOLDER = re.compile(r"\b(MODEL|TEXT|DIR|FILE|NAME)\b")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my models").mkdir()
    (tmp_path / FILE).write_text(TEXT)
    return tmp_path


def save(model: Any, without: str = "") -> None:
    """Save a model with its λ-skips and a tokenizer, without one of its weights if it is named."""
    from transformers import ByT5Tokenizer

    if rw.skips.skips_of(model):
        rw.skips.save_skips(model, MODEL)
        rw.remove_lambda_skip(model)
    kept = {name: weight for name, weight in model.state_dict().items() if name != without}
    model.save_pretrained(MODEL, state_dict=kept if without else None)
    ByT5Tokenizer(extra_ids=0).save_pretrained(MODEL)


def run(command: str) -> Result:
    """Run a command as it is printed."""
    words = shlex.split(command)
    assert words[0] == "rankwise"
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, (command, result.output, result.exception)
    return result


def audited(*words: str) -> rw.Audit:
    """Audit by the command."""
    run(shlex.join(["rankwise", "audit", *words]))
    return rw.Audit.load("rankwise-audit")


def audited_in_folder(case: str, *options: str) -> rw.Audit:
    """Audit the model of a case, saved in a folder, by the command."""
    save(CASES[case][0](), without=LACKS["random_weights"][0] if case == "RANDOM_WEIGHTS" else "")
    options += ("--importance",) * (case in WITH_COSTS)
    return audited(MODEL, "--text", FILE, "--tokens", "40", "--sequences", "4", *options)


def follow(finding: Finding, names: dict[str, Any]) -> None:
    """Run the commands and the code of a remedy as they are printed, and follow its words."""
    assert finding.remedy
    assert not PLACEHOLDER.search(finding.remedy)
    for words, is_code in split_code(finding.remedy):
        if is_code and words.startswith("rankwise "):
            run(words)
        elif is_code and words.startswith("python "):
            exec(shlex.split(words)[2], {})
        elif is_code:
            exec(words, names)
        else:
            left = words.removeprefix("; ")
            if left not in LEADS:
                FOLLOWED[left](finding)


@pytest.mark.parametrize("case", CASES)
def test_every_remedy_can_be_followed_in_python(case: str, folder: Path) -> None:
    made, inputs = CASES[case]
    model, batch = made(), inputs()
    about = LACKS if case == "RANDOM_WEIGHTS" else None
    bert().save_pretrained(LACKS["model"])
    audit = rw.audit(model, [batch], importance=case in WITH_COSTS, provenance=about)
    if "advised" in case or "unnamed" in case:
        audit = rw.skips.recommend(audit, model, batch)
    names = {
        "rw": rw,
        "model": model,
        "batches": [batch],
        "batch": batch,
        "audit": audit,
        "operator_of": operator_of,
    }
    finding = of(case.split()[0], audit)
    assert "rankwise " not in finding.remedy
    assert ("try_lambdas(lambda" in finding.remedy) == ("with labels" in case)
    follow(finding, names)


@pytest.mark.parametrize("case", [case for case in CASES if case != "RANDOM_WEIGHTS"])
def test_every_remedy_of_a_factory_can_be_followed(case: str, folder: Path) -> None:
    (folder / "my models" / "net.py").write_text(FACTORY.format(case=case))
    audit = audited("my models/net.py:build", *["--importance"] * (case in WITH_COSTS))
    finding, model = of(case.split()[0], audit), CASES[case][0]()
    shell = ("COLLAPSE", "INACTIVE_BLOCK", "OVERSIZED", "REMOVABLE", "in half", "SINK", "CONSTANT")
    assert ("rankwise " in finding.remedy) == ("unnamed" not in case and any(map(case.count, shell)))
    follow(finding, {"rw": rw, "model": model, "batches": [tokens()], "operator_of": operator_of})


IN_FOLDERS = (
    "COLLAPSE", "INACTIVE_BLOCK advised", "OVERSIZED_HEADS", "REMOVABLE", "NONFINITE in half",
    "RANDOM_WEIGHTS",
)  # fmt: skip


@pytest.mark.parametrize("case", IN_FOLDERS)
def test_every_remedy_of_a_folder_can_be_followed(case: str, folder: Path) -> None:
    finding = of(case.split()[0], audited_in_folder(case))
    assert shlex.quote(MODEL) in finding.remedy or case == "RANDOM_WEIGHTS"
    assert "  " not in finding.remedy
    follow(finding, {"model": CASES[case][0]()})


def vision(kind: str) -> nn.Module:
    """Return a model of pictures with a head that nothing reads: ViT, a tower of CLIP, or all of CLIP."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sizes |= {"image_size": 32, "patch_size": 8}
    config = getattr(transformers, f"{kind}Config")
    made = config(vision_config=sizes) if kind == "CLIP" else config(**sizes)
    model = getattr(transformers, f"{kind}Model")(made).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"layers\.1\..*(o_proj|out_proj)\.weight", name) and "text" not in name:
                weight[:, :8] = 0
    return model


def photos(folder: Path) -> str:
    image = pytest.importorskip("PIL.Image")
    (folder / "my photos").mkdir()
    for at in range(4):
        image.effect_noise((40, 50), 60 + at).convert("RGB").save(folder / "my photos" / f"{at}.png")
    return "my photos"


def rows(folder: Path) -> str:
    (folder / "my rows.jsonl").write_text("\n".join(json.dumps({"line": TEXT[at:]}) for at in range(8)))
    return "my rows.jsonl:train:line"


def of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Save a model as version v1 of a model of the Hub that was downloaded before; return its name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    save(redundant())
    home = folder / "hub" / "models--some--net"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "v1").write_text("0" * 40)
    shutil.copytree(MODEL, home / "snapshots" / ("0" * 40))
    return "some/net"


@pytest.mark.parametrize("option", ["--images", "--dataset", "--device", "--revision"])
def test_commands_repeat_where_model_and_data_are(
    option: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = MODEL, ["--text", FILE, "--tokens", "40", "--sequences", "4", "--importance"]
    if option == "--revision":
        model, value = of_the_hub(folder, monkeypatch), "v1"
        given += [option, value]
    elif option == "--images":
        vision("ViT").save_pretrained(MODEL)
        given = [option, (value := photos(folder)), "--importance"]
    else:
        save(redundant())
        value = "cpu:0" if option == "--device" else rows(folder)
        given = [*(given if option == "--device" else given[2:]), option, value]
    finding = of("REMOVABLE", audited(model, *given))
    assert shlex.join([option, value]) in finding.remedy
    follow(finding, {})


@pytest.mark.parametrize("kind", ["a tower", "both towers"])
def test_the_remedy_for_a_tower_of_clip_can_be_followed(kind: str, folder: Path) -> None:
    """A command changes a tower that a factory returns; a tower of a model is changed by Python code."""
    batches = [{"pixel_values": torch.randn(2, 3, 32, 32)}]
    if kind == "a tower":
        code = "import torch\nfrom tests.auditing.test_remedies import vision\ntorch.manual_seed(0)\n"
        code += "def build():\n    return vision('CLIPVision'), [torch.randn(4, 3, 32, 32)] * 2\n"
        (folder / "net.py").write_text(code)
        finding = of("REMOVABLE", audited("net.py:build", "--importance"))
        assert "`rankwise compress net.py:build" in finding.remedy
        follow(finding, {})
        return
    vision("CLIP").save_pretrained(MODEL)
    finding = of("REMOVABLE", audited(MODEL, "--images", photos(folder), "--importance"))
    assert "rankwise " not in finding.remedy
    follow(finding, {"rw": rw, "model": vision("CLIP").vision_model, "batches": batches})


def test_the_command_against_a_collapse_removes_it(folder: Path) -> None:
    save(collapsed())
    data = ("--text", FILE, "--tokens", "40", "--sequences", "4")
    finding = of("COLLAPSE", audited(MODEL, *data))
    assert "removes COLLAPSE" in finding.meaning
    run(finding.remedy)
    assert "COLLAPSE" not in codes(audited("net-s-weights-skips", *data))


@pytest.mark.parametrize("case", ["COLLAPSE", "COLLAPSE advised, with labels"])
def test_the_remedy_of_a_factory_ends_the_advice(case: str, folder: Path) -> None:
    (folder / "net.py").write_text(FACTORY.format(case=case))
    (command,) = [
        words
        for words, _ in split_code(of("COLLAPSE", audited("net.py:build")).remedy)
        if "--lambda" in words
    ]
    (line,) = [line for line in run(command).output.splitlines() if line.startswith("load: ")]
    load = line.removeprefix("load: ").partition("   #")[0]
    code = FACTORY.format(case=case).replace("return made(), ", f"model = made(); {load}\n    return model, ")
    (folder / "repaired.py").write_text(code)
    audit = audited("repaired.py:build")
    assert "COLLAPSE" not in codes(audit)
    assert not any("skip" in action for action in audit.verdict.actions)


def test_there_is_a_case_for_every_code() -> None:
    assert {case.split()[0] for case in CASES} == set(FINDING_RULES)


def test_the_remedy_for_an_uncaptured_module_captures_it() -> None:
    model, batch = unseen(), tokens()
    finding = of("NOT_CAPTURED", rw.audit(model, [batch]))
    (code,) = [words for words, is_code in split_code(finding.remedy) if is_code]
    again = eval(code, {"rw": rw, "model": model, "batches": [batch], "operator_of": operator_of})
    assert "NOT_CAPTURED" not in codes(again)
    assert finding.where.site in {head.site for head in again.heads}


def torch_layers() -> nn.Module:
    """Return layers of PyTorch with a head that nothing reads, and a head with two channels of queries."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for attention in (one.self_attn for one in model.layers):
            attention.in_proj_weight[:64] *= 3
            attention.in_proj_weight[2:8] = 0
            attention.out_proj.weight[:, 8:16] = 0
    return model


def both() -> nn.Module:
    model = over_wide()
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.output.dense.weight[:, 8:16] = 0
    return model


def test_layers_of_pytorch_have_no_action_that_compress_refuses() -> None:
    audit = rw.audit(torch_layers(), [torch.randn(4, 64, 32)], importance=True)
    for code in ("REMOVABLE", "OVERSIZED_HEADS"):
        assert "refuses this model, because nn.MultiheadAttention" in of(code, audit).remedy
    assert not any("compress" in action for action in audit.verdict.actions)


def test_an_action_with_a_condition_is_not_the_first() -> None:
    about = {"model": "m", "parameters": 4_100}
    audit = rw.audit(redundant(), [ids()], importance=True, provenance=about)
    pair = [of("REMOVABLE", audit), of("IDENTITY", rw.audit(designed(), [tokens()]))]
    other, conditional = audit.model_copy(update={"findings": pair}).verdict.actions
    assert other.endswith(pair[1].remedy)
    assert conditional.endswith("if heads come from nn.Linear")


class Outcome(NamedTuple):
    code: str
    command: str
    promised: str
    measured: str
    holds: bool


def outcomes(audit: rw.Audit) -> list[Outcome]:
    """Run the command of each remedy, and compare what its finding promises with what comes out."""
    code = [(one, words) for one in audit.findings for words, is_code in split_code(one.remedy) if is_code]
    return [outcome(*pair) for pair in code if pair[1].startswith(("rankwise compress", "rankwise audit"))]


def outcome(finding: Finding, command: str) -> Outcome:
    run(command)
    numbers, folder = finding.evidence, shlex.split(command)[-1]
    if " audit " in command:
        costs = [head.importance for head in rw.Audit.load(folder).heads]
        measured = f"costs of {sum(cost is not None for cost in costs)} heads"
        return Outcome(finding.code, command, "costs of heads", measured, all(costs))
    done = Compression.load(folder)
    saved = 1 - done.parameters_after / done.parameters_before
    if finding.code == "OVERSIZED_HEADS":
        limit = numbers["tolerance"]
        share = numbers["parameters"]
        promised = f"KL at most {limit:g}, about {share:.1%} of parameters"
        measured = f"KL {done.kl:.4f}, {saved:.1%} of parameters"
        holds = 0.8 * share <= saved <= 1.25 * share and done.kl <= 1.5 * limit
        return Outcome(finding.code, command, promised, measured, holds)
    limit = float(command.split("--tolerance ")[1].split()[0])
    removed = [one for one in done.heads if not one.width]
    cost = done.output_error**2 if math.isnan(done.loss_before) else done.loss_after / done.loss_before - 1
    promised = f"{numbers['heads']:g} heads, {numbers['relative']:+.2%}, at most {numbers['parameters']:.1%}"
    measured = f"{len(removed)} heads, {cost:+.2%}, {saved:.1%}"
    most = len(removed) * numbers["parameters"] / numbers["heads"]
    most *= 1.05 if len(removed) < numbers["heads"] else 1 + 1e-9  # groups may not be whole in the finding
    holds = cost <= 1.5 * limit and len(removed) > 0 and 0.85 * most < saved <= most
    return Outcome(finding.code, command, promised, measured, holds)


@pytest.mark.parametrize("case", ["REMOVABLE", "OVERSIZED_HEADS"])
def test_what_a_finding_promises_comes_out(case: str, folder: Path) -> None:
    found = [one for one in outcomes(audited_in_folder(case)) if one.code == case]
    assert found
    assert all(one.holds for one in found), found


def llama(key_heads: int) -> nn.Module:
    """Return a Llama with one group of four heads, of eight, that nothing reads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=key_heads, head_dim=8, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, :32] = 0
    return model


@pytest.mark.parametrize("key_heads", [1, 2])
def test_what_is_promised_for_shared_key_heads_comes_out(key_heads: int, folder: Path) -> None:
    save(llama(key_heads))
    audit = audited(MODEL, "--text", FILE, "--tokens", "40", "--sequences", "4", "--importance", "exact")
    assert {head.heads_per_group for head in audit.heads} == {8 // key_heads}
    found = [one for one in outcomes(audit) if one.code == "REMOVABLE"]
    assert found
    assert all(one.holds for one in found), found


def test_the_remedies_of_the_demo_keep_their_promises(folder: Path) -> None:
    found = outcomes(audited("--tokens", "64", "--attention-maps", "0:0", "--at-init-seeds", "1"))
    assert "REMOVABLE" in {one.code for one in found}
    assert all(one.holds for one in found), found


@torch.no_grad()
def small() -> nn.Module:
    """Return a BERT of little else than attention, which needs neither all heads nor all channels of keys."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=8,
        max_position_embeddings=48, pad_token_id=0,
    )  # fmt: skip
    model = BertForMaskedLM(config).eval()
    model.bert.embeddings.word_embeddings.weight *= 25
    for layer in model.bert.encoder.layer:
        layer.attention.self.value.weight *= 20
        layer.attention.self.query.weight *= 40
        layer.attention.self.key.weight *= 40
        layer.attention.self.query.weight.unflatten(0, (4, 8))[:, 2:] = 0
        layer.attention.output.dense.weight *= 20
    model.bert.encoder.layer[1].attention.output.dense.weight[:, :16] = 0
    return model


def test_heads_and_widths_are_compressed_by_one_command(folder: Path) -> None:
    code = "from tests.auditing import test_remedies\n"
    code += "def build():\n    return test_remedies.small(), [test_remedies.ids()] * 4\n"
    (folder / "net.py").write_text(code)
    audit = audited("net.py:build", "--importance", "exact")
    acting = [finding for finding in audit.findings if not finding.remedy.startswith("nothing: ")]
    assert {"REMOVABLE", "OVERSIZED_HEADS"} <= {finding.code for finding in acting}
    (action,) = [action for action in audit.verdict.actions if "compress" in action]
    (command,) = [words for words, is_code in split_code(action) if is_code]
    assert "--parts heads,width" in command
    run(command)
    done = Compression.load(shlex.split(command)[-1])
    wide, fewer = (of(code, audit).evidence["parameters"] for code in ("OVERSIZED_HEADS", "REMOVABLE"))
    assert max(wide, fewer) < 1 - done.parameters_after / done.parameters_before <= wide + fewer


@pytest.mark.parametrize(("parameters", "acts"), [(2_000, True), (41_000, False)])
def test_widths_that_save_too_little_are_no_action(parameters: int, acts: bool) -> None:
    audit = rw.audit(over_wide(), [ids()], provenance={"model": "m", "parameters": parameters})
    finding = of("OVERSIZED_HEADS", audit)
    assert (finding.evidence["parameters"] >= 0.05) == acts
    assert (finding.remedy in audit.verdict.actions) == acts
    assert finding.remedy.startswith("nothing: ") == (not acts)


@pytest.mark.parametrize(("parameters", "acts"), [(41_000, True), (410_000, False)])
def test_heads_that_save_too_little_are_no_action(parameters: int, acts: bool) -> None:
    about = {"model": "m", "parameters": parameters}
    audit = rw.audit(redundant(), [ids()], importance=True, provenance=about)
    finding = of("REMOVABLE", audit)
    assert (finding.evidence["parameters"] >= 0.05) == acts
    assert (finding.remedy in audit.verdict.actions) == acts
    assert finding.remedy.startswith("nothing: ") == (not acts)


def table() -> str:
    """Return what findings of the demo and of all-MiniLM-L6-v2 promise, and what their commands measure."""
    from experiments.real_models import require_minilm
    from experiments.render import markdown_table

    minilm = (str(require_minilm()), "--text", str(demo_text()), "--importance", "exact")
    audits = {"demo": (), "demo without costs": ("--importance", "none"), "all-MiniLM-L6-v2": minilm}
    rows = [(name, *map(str, one)) for name, words in audits.items() for one in outcomes(audited(*words))]
    return markdown_table(("model", "finding", "command", "promised", "measured", "holds"), rows)


if __name__ == "__main__":  # python -m tests.auditing.test_remedies
    with TemporaryDirectory() as scratch, chdir(scratch):
        print(table())
