"""Remedies of findings work: commands and code are run as printed, advice without code is followed."""

import math
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.modules import Average, Block, Stack
from torch import Tensor, nn
from typer.main import get_command
from typer.testing import CliRunner

import rankwise as rw
from rankwise.auditing import FINDING_RULES, Finding, Provenance, remedy_text
from rankwise.auditing.remedies import COMMANDS, EXACTLY, LINEAR
from rankwise.cli import app
from rankwise.compression import Compression
from rankwise.importance import ImportanceSettings

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 120
T, HEADS = 32, 4
SINK, CONSTANT, IDENTITY = range(3)
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
    """Return blocks with heads that are a sink, constant, the identity, and random."""
    torch.manual_seed(0)
    model = Stack(Block(Attention(causal)) for _ in range(layers)).eval()
    attention = model.blocks[0].mixer
    query, key = (weights.weight.view(HEADS, WIDTH, WIDTH) for weights in (attention.query, attention.key))
    query[[SINK, CONSTANT, IDENTITY]] = key[[SINK, CONSTANT, IDENTITY]] = 0
    query[SINK, 0, 0] = key[SINK, 0, 1] = 16  # queries match the key of the first token
    for at in range(2, WIDTH):
        query[IDENTITY, at, at] = key[IDENTITY, at, at] = 16
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
    "save the checkpoint under the names of the model": renamed,
    "raise λ in the config or the skip connections of the model, if it has λ": raised,
    "nothing that was tried helps; compare the model to one with pre-norm, by rw.skips.try_lambdas": compared,
    "or take the block out of its list and compare the loss": without_block,
    "or set the weights of its output projection to 0 and compare the loss": without_mixer,
    "paste the printed `load:` line into your factory": lambda finding: None,  # a test below does it
}


def bert() -> nn.Module:
    """Return a BERT of little else than attention."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=8,
        max_position_embeddings=48, pad_token_id=0,
    )  # fmt: skip
    return BertForMaskedLM(config).eval()


def ids() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 200, (2, 40), generator=torch.Generator().manual_seed(1))}


@torch.no_grad()
def spare() -> nn.Module:
    """Return a BERT that needs neither all heads nor all channels of queries and keys."""
    model = bert()
    model.bert.embeddings.word_embeddings.weight *= 25
    for layer in model.bert.encoder.layer:
        layer.attention.self.value.weight *= 20
        layer.attention.self.query.weight *= 40
        layer.attention.self.key.weight *= 40
        layer.attention.self.query.weight.unflatten(0, (4, 8))[:, 2:] = 0
        layer.attention.output.dense.weight *= 20
    model.bert.encoder.layer[1].attention.output.dense.weight[:, :16] = 0
    return model


def drowned() -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = spare(), ids()
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


class SumsAttention(nn.Module):
    """Mixer that no operator is known for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, 1) / 2


def unseen() -> nn.Module:
    return Stack([Block(Attention(False)), Block(SumsAttention())])


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
    "OVERSIZED_HEADS": (spare, ids),
    "REMOVABLE": (spare, ids),
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


def run(command: str) -> str:
    """Run a command as it is printed, and return its output."""
    words = shlex.split(command)
    assert words[0] == "rankwise"
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, (command, result.output, result.exception)
    return result.output


def audited(*words: str) -> rw.Audit:
    """Audit by the command."""
    run(shlex.join(["rankwise", "audit", *words]))
    return rw.Audit.load("rankwise-audit")


def printed(finding: Finding, about: Provenance) -> list[str]:
    """Return the code of each step of a remedy as it is printed; an empty string for advice without code."""
    assert finding.remedy is not None
    alone = [step.model_copy(update={"then": []}) for step in (finding.remedy, *finding.remedy.then)]
    texts = [remedy_text(step, about) for step in alone]
    assert [text in remedy_text(finding.remedy, about) or text[1:] for text in texts]
    has_code = [bool(step.verb or step.code) for step in alone]
    return [text.split("`")[-2] if has else "" for text, has in zip(texts, has_code, strict=True)]


def follow(finding: Finding, about: Provenance, names: dict[str, Any]) -> None:
    """Run the commands and the code of a remedy as they are printed, and follow its words.

    A trial takes 3 steps in place of 100.
    """
    assert finding.remedy is not None
    steps = [finding.remedy, *finding.remedy.then]
    for step, code in zip(steps, printed(finding, about), strict=True):
        if code.startswith("rankwise "):
            run(code.replace("--try-steps 100", "--try-steps 3"))
        elif code.startswith("python "):
            exec(shlex.split(code)[2], {})
        elif code:
            exec(code, names)
        else:
            FOLLOWED[step.words](finding)


@pytest.mark.parametrize("case", CASES)
def test_every_remedy_can_be_followed_in_python(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_steps = partial(rw.skips.try_lambdas, steps=2)
    monkeypatch.setattr(rw.skips, "try_lambdas", few_steps)
    made, inputs = CASES[case]
    model, batch = made(), inputs()
    about = LACKS if case == "RANDOM_WEIGHTS" else None
    if about is not None:
        bert().save_pretrained(LACKS["model"])
    costs = ImportanceSettings(exact=False) if "estimated" in case else case in WITH_COSTS
    audit = rw.audit(model, [batch], importance=costs, provenance=about)
    if "advised" in case or "unnamed" in case:
        audit = rw.skips.recommend(audit, model, batch)
    finding = of(case.split()[0], audit)
    shown = printed(finding, audit.provenance)
    assert not any(code.startswith("rankwise ") for code in shown)
    assert any("try_lambdas(lambda" in code for code in shown) == ("with labels" in case)
    names = {"rw": rw, "model": model, "batches": [batch], "batch": batch, "operator_of": operator_of}
    follow(finding, audit.provenance, names | {"audit": audit})


BY_COMMAND = (
    "COLLAPSE advised, with labels", "INACTIVE_BLOCK advised", "SINK", "SINK estimated", "OVERSIZED_HEADS",
    "NONFINITE in half",
)  # fmt: skip


@pytest.mark.parametrize("case", BY_COMMAND)
def test_every_remedy_of_a_factory_can_be_followed(case: str, folder: Path) -> None:
    (folder / "my models" / "net.py").write_text(FACTORY.format(case=case))
    audit = audited("my models/net.py:build", *["--importance", "estimate"] * (case in WITH_COSTS))
    finding = of(case.split()[0], audit)
    assert printed(finding, audit.provenance)[0].startswith("rankwise ")
    follow(finding, audit.provenance, {"model": CASES[case][0]()})


@pytest.mark.parametrize("case", ["COLLAPSE", "RANDOM_WEIGHTS"])
def test_every_remedy_of_a_folder_can_be_followed(case: str, folder: Path) -> None:
    save(CASES[case][0](), without=LACKS["random_weights"][0] if case == "RANDOM_WEIGHTS" else "")
    data = ("--text", FILE, "--tokens", "40", "--sequences", "4")
    audit = audited(MODEL, *data)
    finding = of(case, audit)
    follow(finding, audit.provenance, {})
    if case == "COLLAPSE":
        assert "removes COLLAPSE" in finding.meaning
        assert "COLLAPSE" not in codes(audited("net-s-weights-skips", *data))


def test_commands_repeat_the_options_that_they_have() -> None:
    """Options that a command lacks lead to Python code instead."""
    known = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in get_command(app).commands.items()
    }
    assert set(COMMANDS) < known["audit"]
    for option, verbs in COMMANDS.items():
        assert {verb for verb in ("compress", "skip") if option in known[verb]} == set(verbs)


def test_the_remedies_for_a_tower_of_clip_can_be_followed(folder: Path) -> None:
    """No command can change a part of a model, so that remedy is Python code; audits are commands."""
    from transformers import CLIPConfig, CLIPModel

    image = pytest.importorskip("PIL.Image")
    (folder / "photos").mkdir()
    for number in range(4):
        image.effect_noise((40, 50), 60 + number).convert("RGB").save(folder / "photos" / f"{number}.png")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = CLIPModel(CLIPConfig(vision_config=sizes | {"image_size": 32, "patch_size": 8})).eval()
    with torch.no_grad():
        model.vision_model.encoder.layers[1].self_attn.out_proj.weight[:, :8] = 0
    model.save_pretrained(MODEL)
    audit = audited(MODEL, "--images", "photos", "--importance")
    batches = [{"pixel_values": torch.randn(2, 3, 32, 32)}]
    assert printed(of("REMOVABLE", audit), audit.provenance)[0].startswith("rw.")
    names = {"rw": rw, "model": model.vision_model, "batches": batches}
    follow(of("REMOVABLE", audit), audit.provenance, names)
    command = remedy_text(EXACTLY, audit.provenance).split("`")[1]
    assert "photos" in command
    run(command)


def test_a_repeated_audit_omits_unnecessary_measurements(folder: Path) -> None:
    save(llama(1))
    data = ("--text", FILE, "--tokens", "40", "--sequences", "4")
    audit = audited(MODEL, *data, "--at-init", "--attention-maps", "all", "--importance")
    command = remedy_text(EXACTLY, audit.provenance).split("`")[1]
    assert "--at-init" not in command
    assert "--attention-maps" not in command
    run(command)


def test_no_head_is_removed_from_a_model_that_barely_predicts_better_than_chance(folder: Path) -> None:
    untrained, batch = llama(1), {"input_ids": torch.randint(0, 259, (4, 40))}
    audit = rw.audit(untrained, [batch], importance="exact")
    assert audit.importance is not None
    assert audit.importance.chance == pytest.approx(math.log(untrained.config.vocab_size))
    assert audit.importance.is_chance
    assert "hardly better than chance" in of("REMOVABLE", audit).remedy.no_action
    assert not any("compress" in action for action in audit.verdict.actions)


def test_the_remedy_of_a_factory_ends_the_advice(folder: Path) -> None:
    case = "COLLAPSE advised, with labels"
    (folder / "net.py").write_text(FACTORY.format(case=case))
    audit = audited("net.py:build")
    trial, command, _ = printed(of("COLLAPSE", audit), audit.provenance)
    assert trial == "rankwise skip net.py:build --try-steps 100"
    (line,) = [line for line in run(command).splitlines() if line.startswith("load: ")]
    load = line.removeprefix("load: ").partition("   #")[0]
    loaded = f"model, batch = made(), inputs()\n    {load}\n    return model, "
    code = FACTORY.format(case=case).replace("return made(), ", loaded)
    (folder / "repaired.py").write_text(code)
    audit = audited("repaired.py:build")
    assert "COLLAPSE" not in codes(audit)
    assert not any("skip" in action for action in audit.verdict.actions)


def test_there_is_a_case_for_every_code() -> None:
    """Nothing follows from massive tokens."""
    assert {case.split()[0] for case in CASES} == set(FINDING_RULES) - {"MASSIVE_TOKENS"}


def test_the_remedy_for_an_uncaptured_module_captures_it() -> None:
    model, batch = unseen(), tokens()
    audit = rw.audit(model, [batch])
    finding = of("NOT_CAPTURED", audit)
    (code,) = printed(finding, audit.provenance)
    again = eval(code, {"rw": rw, "model": model, "batches": [batch], "operator_of": operator_of})
    assert "NOT_CAPTURED" not in codes(again)
    assert finding.where.site in {head.site for head in again.heads}


def compressed(command: str) -> tuple[Compression, float]:
    """Run a command; return its record, and the share of the parameters that it saved."""
    run(command)
    done = Compression.load(shlex.split(command)[-1])
    return done, 1 - done.parameters_after / done.parameters_before


def check_removal(audit: rw.Audit) -> None:
    """Remove heads by the printed command, and compare the cost and the saving with the finding."""
    finding = of("REMOVABLE", audit)
    done, saved = compressed(*printed(finding, audit.provenance))
    heads, promised = finding.evidence["heads"], finding.evidence["parameters"]
    removed = sum(not head.width for head in done.heads)
    worst = done.worst
    cost = worst.output_error**2 if math.isnan(worst.loss_before) else worst.loss_added / worst.loss_before
    most = promised * removed / heads
    assert 0.85 * most < saved <= promised * (1 + 1e-9)  # groups save their key head, whole layers keep one
    assert removed > 0
    assert cost <= 1.5 * 0.01


def test_findings_on_heads_and_widths_keep_their_promises(folder: Path) -> None:
    """Each command saves what its finding says; the command of the verdict does both."""
    (folder / "net.py").write_text(FACTORY.format(case="REMOVABLE").replace("inputs(), inputs()", "inputs()"))
    audit = audited("net.py:build", "--importance", "exact")
    check_removal(audit)
    finding = of("OVERSIZED_HEADS", audit)
    wide, fewer = (of(code, audit).evidence["parameters"] for code in ("OVERSIZED_HEADS", "REMOVABLE"))
    done, saved = compressed(*printed(finding, audit.provenance))
    assert 0.8 * wide <= saved <= 1.25 * wide
    assert done.attention_kl <= 1.5 * finding.evidence["tolerance"]
    (action,) = [action for action in audit.verdict.actions if "compress" in action]
    assert action.endswith(f", if {LINEAR}")
    command = action.split("`")[1]
    assert "--parts heads,width" in command
    _, saved = compressed(command.replace("--out net", "--out both"))
    assert max(wide, fewer) < saved <= wide + fewer


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
def test_promises_for_shared_key_heads_are_kept(key_heads: int, folder: Path) -> None:
    save(llama(key_heads))
    audit = audited(MODEL, "--text", FILE, "--tokens", "40", "--sequences", "4", "--importance", "exact")
    assert {head.heads_per_group for head in audit.heads} == {8 // key_heads}
    check_removal(audit)


@pytest.mark.parametrize("code", ["OVERSIZED_HEADS", "REMOVABLE"])
@pytest.mark.parametrize("parameters", [2_000, 10**7])
def test_a_remedy_that_saves_too_little_is_not_an_action(code: str, parameters: int) -> None:
    about = {"model": "m", "parameters": parameters}
    audit = rw.audit(spare(), [ids()], importance=code == "REMOVABLE", provenance=about)
    finding, acts = of(code, audit), parameters == 2_000
    assert finding.remedy is not None
    assert finding.remedy.saves == finding.evidence["parameters"]
    assert (finding.remedy.saves >= 0.05) == acts
    assert (finding.remedy.no_action == "") == acts
    assert bool(audit.verdict.actions) == acts
