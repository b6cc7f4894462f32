"""Which modules are blocks, how layers are numbered, and what the token states are."""

import pytest
import torch
from capture_zoo import (
    BATCH,
    HEADS,
    TOKENS,
    WIDTH,
    Attention,
    Block,
    CrossStack,
    Head,
    InPlace,
    ManyHeads,
    Residual,
    ResidualOutside,
    Shared,
    Stack,
    Stages,
    SublayerBlock,
    TokensFirst,
    Towers,
    Twins,
    Unbatched,
    fused,
    hidden,
    plain,
    scores,
    seen,
    stack_of,
)
from torch import nn

import rankwise as rw
from rankwise.errors import InputError
from rankwise.tracing.block_finder import block_ranks, matches
from rankwise.tracing.block_finder import stack_of as stack_name

CAUSAL = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool).tril()


def captured(model, *inputs, **options):
    model.eval()
    with torch.no_grad():
        alone = model(*(one.clone() for one in inputs))
        with rw.capture(model, **options) as trace:
            watched = model(*(one.clone() for one in inputs))
    assert torch.equal(alone, watched)
    return trace


def inputs_of(model, names, *inputs):
    """Copies of inputs and outputs of modules."""
    read, gave, handles = {}, {}, []
    for name in names:
        module = model.get_submodule(name)

        def before(module, args, name=name):
            read.setdefault(name, []).append(args[0].clone())

        def after(module, args, output, name=name):
            gave.setdefault(name, []).append(output.clone())

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    with torch.no_grad():
        model.eval()(*(one.clone() for one in inputs))
    for handle in handles:
        handle.remove()
    return read, gave


LINKED = {
    "plain": (lambda: stack_of(), "blocks.{}", 3),
    "fused": (lambda: stack_of(fused), "blocks.{}", 3),
    "one block": (lambda: stack_of(depth=1), "blocks.{}", 1),
    "heads side by side": (lambda: Stack(lambda: Block(ManyHeads(3, 8))), "blocks.{}", 3),
    "one head alone": (lambda: Stack(lambda: Block(ManyHeads(1, WIDTH))), "blocks.{}", 3),
    "one head, one block": (lambda: Stack(lambda: Block(ManyHeads(1, WIDTH)), 1), "blocks.{}", 1),
    "heads as wide as the model": (lambda: Stack(lambda: Block(ManyHeads(3, WIDTH))), "blocks.{}", 3),
    "nn.Sequential of blocks": (
        lambda: nn.Sequential(*(Block(Attention(plain)) for _ in range(3)), nn.LayerNorm(WIDTH)),
        "{}",
        3,
    ),
    "blocks in place": (lambda: Stack(InPlace), "blocks.{}", 3),
    "blocks of residual halves": (
        lambda: Stack(lambda: nn.Sequential(Residual(Attention(plain)), Residual(nn.Linear(WIDTH, WIDTH)))),
        "blocks.{}",
        3,
    ),
    "blocks of a list of sublayers": (lambda: Stack(lambda: SublayerBlock(1)), "blocks.{}", 3),
    "blocks of a list of many sublayers": (lambda: Stack(lambda: SublayerBlock(2)), "blocks.{}", 3),
    "one block of many sublayers": (lambda: Stack(lambda: SublayerBlock(2), 1), "blocks.{}", 1),
    "mixed blocks": (
        lambda: nn.Sequential(Block(Attention(plain)), Residual(Attention(plain)), nn.LayerNorm(WIDTH)),
        "{}",
        2,
    ),
}


@pytest.mark.parametrize("case", LINKED)
def test_states_are_inputs_of_blocks_and_the_last_output(case):
    make, names, depth = LINKED[case]
    model, x = make(), hidden()
    names = [names.format(at) for at in range(depth)]
    read, gave = inputs_of(model, names, x)
    trace = captured(model, x)
    assert trace.notes == []
    assert [state.layer for state in trace.states] == list(range(depth + 1))
    assert [state.name for state in trace.states] == [names[0], *names]
    for name, state in zip(names, trace.states, strict=False):
        assert torch.equal(state.tokens, read[name][0])
    assert torch.equal(trace.states[-1].tokens, gave[names[-1]][0])
    assert sorted({site.layer for site in trace.mixers}) == list(range(depth))
    for site in trace.mixers:
        assert site.name.startswith(names[site.layer])
    assert len({state.stack for state in trace.states} | {site.stack for site in trace.mixers}) == 1


@pytest.mark.parametrize("heads", [1, 3])
def test_heads_that_are_modules_are_sites_of_one_head_in_the_layer_of_their_block(heads):
    trace = captured(Stack(lambda: Block(ManyHeads(heads, WIDTH // heads))), hidden())
    assert [(site.name, site.layer) for site in trace.mixers] == [
        (f"blocks.{layer}.attention.heads.{head}", layer) for layer in range(3) for head in range(heads)
    ]
    assert {tuple(site.operator.shape) for site in trace.mixers} == {(BATCH, 1, TOKENS, TOKENS)}
    assert all(
        site.operator.support().equal(torch.ones(BATCH, 1, 7, 7).tril().bool()) for site in trace.mixers
    )


def test_a_lone_head_is_not_taken_for_a_block_when_called_as_the_model():
    trace = captured(Head(WIDTH), hidden())
    assert [(site.name, site.layer) for site in trace.mixers] == [("", 0)]
    assert trace.states == []


# --- where the stream is not what blocks give ---------------------------------------------------------------


def test_states_are_inputs_of_sublayers_if_the_residual_is_added_outside():
    model, x = ResidualOutside(), hidden()
    names = [f"layers.{at}.0" for at in range(3)]
    read, gave = inputs_of(model, names, x)
    trace = captured(model, x)
    assert [state.layer for state in trace.states] == [0, 1, 2]
    for name, state in zip(names, trace.states, strict=True):
        assert torch.equal(state.tokens, read[name][0])
        assert not any(torch.equal(state.tokens, gave[other][0]) for other in names)
    assert [site.layer for site in trace.mixers] == [0, 1, 2]
    (note,) = trace.notes
    assert "the residual is added outside" in note
    assert "the last state is missing" in note


def test_a_lone_sublayer_gives_no_state_that_nobody_read():
    trace = captured(ResidualOutside(1), hidden())
    assert [state.layer for state in trace.states] == [0]
    (note,) = trace.notes
    assert "nothing read the output of its only block" in note


def test_items_without_a_mixer_carry_the_stream_on():
    parts = [Residual(part) for _ in range(2) for part in (Attention(plain), nn.Linear(WIDTH, WIDTH))]
    model, x = nn.Sequential(*parts, nn.LayerNorm(WIDTH)), hidden()
    read, gave = inputs_of(model, ["0", "2", "3"], x)
    trace = captured(model, x)
    assert [site.name for site in trace.mixers] == ["0.inner", "2.inner"]
    for state, tokens in zip(trace.states, (read["0"], read["2"], gave["3"]), strict=True):
        assert torch.equal(state.tokens, tokens[0])
    assert trace.notes == []


def test_states_survive_changes_in_place():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.norm = nn.ModuleList([InPlace() for _ in range(2)]), nn.LayerNorm(WIDTH)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            y = self.norm(x)
            x.zero_()
            return y

    model, x = Scaled(), hidden()
    _, gave = inputs_of(model, ["blocks.1"], x)
    trace = captured(model, x)
    assert torch.equal(trace.states[0].tokens, x)
    assert torch.equal(trace.states[-1].tokens, gave["blocks.1"][0])


# --- other axes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "batch"), [(6, 2), (2, 6), (9, 3)])
def test_tokens_on_the_first_axis(tokens, batch):
    x = hidden(tokens, batch)  # (T, B, D)
    trace = captured(Stack(TokensFirst), x)
    assert {tuple(site.operator.shape) for site in trace.mixers} == {(batch, HEADS, tokens, tokens)}
    assert {site.sequences for site in trace.mixers} == {batch}
    assert torch.equal(trace.states[0].tokens, x.transpose(0, 1))
    assert {tuple(state.tokens.shape) for state in trace.states} == {(batch, tokens, WIDTH)}


@pytest.mark.parametrize("mix", [plain, fused])
def test_a_model_without_a_batch_axis(mix):
    x = torch.randn(TOKENS, WIDTH)
    trace = captured(Stack(lambda: Unbatched(mix)), x)
    assert {tuple(site.operator.shape) for site in trace.mixers} == {(1, HEADS, TOKENS, TOKENS)}
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]
    assert torch.equal(trace.states[0].tokens, x[None])


# --- lists in lists, towers, the same block again -----------------------------------------------------------


@pytest.mark.parametrize("depths", [(2, 2), (1, 1), (1, 2), (3,), (1,)])
def test_stages_of_blocks_make_a_stack(depths):
    model, x = Stages(depths), hidden()
    names = [f"stages.{stage}.{at}" for stage, depth in enumerate(depths) for at in range(depth)]
    read, gave = inputs_of(model, names, x)
    trace = captured(model, x)
    assert [site.layer for site in trace.mixers] == list(range(sum(depths)))
    assert len(trace.states) == sum(depths) + 1
    for name, state in zip(names, trace.states, strict=False):
        assert torch.equal(state.tokens, read[name][0])
    assert torch.equal(trace.states[-1].tokens, gave[names[-1]][0])
    assert trace.notes == []


class Maps(nn.Module):
    """Stages on pictures, their tokens made inside."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([Picture() for _ in range(2)])

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


class Picture(nn.Module):
    """(B, D, H, W) → tokens → (B, D, H, W)."""

    def __init__(self):
        super().__init__()
        self.blocks = stack_of(depth=2)

    def forward(self, x):
        return self.blocks(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])


def test_stages_that_break_the_stream_are_stacks_of_their_own():
    trace = captured(Maps(), torch.randn(2, WIDTH, 3, 2))
    assert [(site.stack, site.layer) for site in trace.mixers] == [
        (f"stages.{stage}.blocks.blocks", at) for stage in range(2) for at in range(2)
    ]
    assert [state.layer for state in trace.states] == [0, 1, 2] * 2


def test_outputs_kept_by_request_are_safe_from_later_changes():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            q = self.proj(x)[:, None]
            values = x[:, None].clone()
            y = fused(q, q, values)
            y += 1
            values.zero_()
            return y[:, 0]

    trace = captured(Stack(lambda: Residual(Added())), hidden(), values=True)
    for site in trace.mixers:
        assert (site.operator @ site.values - site.output).abs().max() < 1e-5


def test_one_encoder_on_two_inputs_is_two_runs():
    model, a, b = Twins(), hidden(), hidden(tokens=5)
    trace = captured(model, a, b)
    for records, count in ((trace.mixers, 3), (trace.states, 4)):
        places = [(record.forward_pass, record.layer) for record in records]
        assert places == [(run, at) for run in (0, 1) for at in range(count)]
    assert torch.equal(trace.states[0].tokens, a)
    assert torch.equal(trace.states[4].tokens, b)
    assert {site.stack for site in trace.mixers} == {"encoder.blocks"}


def test_towers_side_by_side_are_two_stacks():
    a, b = hidden(), hidden()
    trace = captured(Towers(), a, b)
    assert [(site.stack, site.layer) for site in trace.mixers] == [
        (stack, at) for stack in ("towers.*.blocks", "towers.1.blocks") for at in range(3)
    ]
    first = {state.stack: state.tokens for state in trace.states if state.layer == 0}
    assert torch.equal(first["towers.*.blocks"], a)
    assert torch.equal(first["towers.1.blocks"], b)
    assert {state.forward_pass for state in trace.states} == {0}


@pytest.mark.parametrize("times", [1, 4])
def test_a_block_called_again_is_another_layer(times):
    model, x = Shared(times), hidden()
    read, gave = inputs_of(model, ["blocks.0"], x)
    trace = captured(model, x)
    assert [site.layer for site in trace.mixers] == list(range(times))
    assert {site.forward_pass for site in trace.mixers} == {0}
    for at, state in enumerate(trace.states[:-1]):
        assert torch.equal(state.tokens, read["blocks.0"][at])
    assert torch.equal(trace.states[-1].tokens, gave["blocks.0"][-1])


def test_two_mixers_of_one_block_share_its_layer():
    trace = captured(CrossStack(), hidden(), hidden(tokens=5))
    both = (False, True)
    assert [(site.layer, site.cross) for site in trace.mixers] == [
        (at, cross) for at in (0, 1) for cross in both
    ]
    assert [state.layer for state in trace.states] == [0, 1, 2]


def test_blocks_that_change_the_number_of_tokens_have_layers_but_no_states():
    class Halving(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention(plain)

        def forward(self, x):
            return self.attention(x)[:, ::2]

    trace = captured(Stack(Halving), hidden(tokens=16))
    assert [(site.layer, site.operator.shape[-1]) for site in trace.mixers] == [(0, 16), (1, 8), (2, 4)]
    assert trace.states == []


def test_an_uncaptured_block_still_counts_as_a_layer():
    class Untold(nn.Module):
        """An attention no mode can see."""

        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            weights = (self.q_proj(x) @ self.k_proj(x).mT).exp()
            return weights / weights.sum(-1, keepdim=True) @ x

    blocks = [Block(Attention(plain)), Block(Untold()), Block(Attention(plain))]
    model = nn.Sequential(*blocks, nn.LayerNorm(WIDTH))
    trace = captured(model, hidden())
    assert [(site.name, site.layer) for site in trace.mixers] == [("0.attention", 0), ("2.attention", 2)]
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]
    (uncaptured,) = trace.uncaptured
    assert (uncaptured.name, uncaptured.type) == ("1.attention", "Untold")
    assert "no softmax attention was seen inside it" in uncaptured.reason


# --- blocks by hand -----------------------------------------------------------------------------------------


class Named(nn.Module):
    """Blocks under names that nothing tells apart."""

    def __init__(self):
        super().__init__()
        self.start, self.middle, self.end = (Block(Attention(plain)) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(self.end(self.middle(self.start(x))))


def test_blocks_by_hand():
    trace = captured(Named(), hidden())
    assert trace.states == []
    trace = captured(Named(), hidden(), blocks="[sme]*")
    assert {state.stack for state in trace.states} == {"start", "middle", "end"}
    assert [state.layer for state in trace.states if state.stack == "middle"] == [0, 1]


def test_a_pattern_names_blocks_and_nothing_inside_them():
    model = stack_of()
    trace = captured(model, hidden(), blocks="blocks.*")
    assert [state.name for state in trace.states] == ["blocks.0", "blocks.0", "blocks.1", "blocks.2"]
    some = captured(model, hidden(), blocks="blocks.[01]")
    assert [state.name for state in some.states] == ["blocks.0", "blocks.0", "blocks.1"]
    assert len(some.mixers) == 3
    with pytest.raises(InputError, match=r"blocks 'layers\.\*'.*no match"):
        rw.capture(model, blocks="layers.*")


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("decoder.layers.3", "decoder.layers.*", True),
        ("decoder.layers.3.attention", "decoder.layers.*", False),
        ("decoder.layers.3.attention", "*.layers.?.attention", True),
        ("layers.12", "layers.?", False),
        ("block1", "block[12]", True),
    ],
)
def test_patterns(name, pattern, fits):
    assert matches(name, pattern) is fits


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("encoder.layer.3", "encoder.layer"),
        ("stages.1.blocks.0", "stages.*.blocks"),
        ("block2", "block*"),
        ("encoder1.layers.0", "encoder1.layers"),
        ("0", "*"),
        ("layers.0.1", "layers.*"),
    ],
)
def test_stack_names(name, stack):
    assert stack_name(name) == stack


def test_stack_names_keep_the_numbers_of_what_runs_the_blocks():
    assert stack_name("stages.1.blocks.0", "stages.1") == "stages.1.blocks"
    assert stack_name("stages.1.blocks.0", "stages") == "stages.*.blocks"


def test_ranks_prefer_lists_of_like_modules():
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList([nn.Identity(), nn.Identity()]),
            "mixed": nn.ModuleList([nn.Identity(), nn.ReLU()]),
            "block1": nn.Tanh(),
            "block2": nn.Tanh(),
            "conv1": nn.Sigmoid(),
        }
    )
    like, numbered = dict.fromkeys(["layers.0", "layers.1"], 0), dict.fromkeys(["block1", "block2"], 1)
    assert block_ranks(model, None) == like | numbered | dict.fromkeys(["mixed.0", "mixed.1"], 2)


def test_a_block_may_change_its_states_in_place_and_return_nothing():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention(lambda q, k, v: scores(q, k).softmax(-1) @ v)

        def forward(self, x):
            x.add_(self.attention(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([InPlace() for _ in range(3)])

        def forward(self, x):
            x = x.clone()
            for block in self.blocks:
                block(x)
            self.kept = x

    model, x = Model().eval(), hidden()
    trace = seen(model, x)
    assert [site.layer for site in trace.mixers] == [0, 1, 2]
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]
    assert torch.equal(trace.states[0].tokens, x)
    assert torch.equal(trace.states[3].tokens, model.kept)


def test_a_stock_layer_that_is_the_model_is_seen():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True).eval()
    trace = seen(layer, hidden())
    assert [site.name for site in trace.mixers] == [""]
    assert trace.uncaptured == []
