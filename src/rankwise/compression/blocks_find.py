"""Find blocks that a model of transformers works without, if its configuration has fewer layers.

A trial removes blocks. The outputs must equal the outputs with these blocks replaced by the identity, and the
class of the model must build the smaller model from the changed configuration. There is no list of families.
"""

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from rankwise._internals.batches import argument_names
from rankwise._internals.forward import Change, config_value
from rankwise._internals.torch_private import CHILDREN
from rankwise.compression.plain import change_configs, check_plain
from rankwise.compression.save import new_of_class
from rankwise.compression.trials import Found, check_some, main_output, relative_error
from rankwise.errors import CompressionError, first_line
from rankwise.importance.gated_passes import Removal
from rankwise.tracing import CapturedState, capture

NUMBER = re.compile(r"(layer|block)_(idx|id|index|number|num)$")
"""Names of attributes that contain the number of a block in its stack."""


@dataclass(frozen=True, eq=False)
class Stack:
    """List of blocks that a model runs in order."""

    name: str
    size: int
    counters: dict[str, list[str]]
    """Fields of configurations with the number of blocks, by the name of the module that reads them."""
    removable: list[int]
    """Numbers of the blocks that a trial removed alone, or with every second block."""

    def block(self, number: int) -> str:
        """Return the name of a block."""
        return f"{self.name}.{number}"


Plan = dict[str, set[int]]
"""Numbers of the blocks to remove, by the name of their stack."""


def find(model: nn.Module, batch: Any) -> Found[Stack]:
    """Return the stacks with blocks that can be removed, and why each other block stays.

    Every second block is removed at once, then the others. If a trial fails, each of its blocks is tried
    alone. Raise `NoLayersError` if no block passes.
    """
    names: list[str] = []

    def note(state: CapturedState) -> None:
        if state.layer > 0:  # state i + 1 is the output of block i
            names.append(state.name)

    with torch.no_grad(), capture(model, on_state=note):
        main_output(model, batch)
    stacks, skipped = list[Stack](), dict[str, str]()
    for name in dict.fromkeys(block.rpartition(".")[0] for block in names):
        size = len([*model.get_submodule(name).children()])
        ran = [block for block in names if block.rpartition(".")[0] == name]
        counters = _counters(model, name, size)
        reason = ""
        if ran != [f"{name}.{number}" for number in range(size)]:
            reason = "its blocks do not run once each, in the order of their list"
        elif size < 2:
            reason = "it is the only block of its stack"
        elif not counters:
            reason = "no field of a configuration of transformers is the number of blocks of its stack"
        if reason:
            skipped |= dict.fromkeys(ran, reason)
        else:
            stacks.append(Stack(name, size, counters, [*range(size)]))
    for start in (0, 1):
        plan = {stack.name: {*range(start, stack.size, 2)} for stack in stacks}
        if stacks and difference(model, stacks, plan, batch):
            for stack in stacks:
                for number in sorted(plan[stack.name]):
                    if reason := difference(model, stacks, {stack.name: {number}}, batch):
                        skipped[stack.block(number)] = reason
                        stack.removable.remove(number)
    stacks = [stack for stack in stacks if stack.removable]
    check_some(model, stacks, skipped, "a model of transformers that works without some of its blocks")
    return stacks, skipped


def _counters(model: nn.Module, stack: str, size: int) -> dict[str, list[str]]:
    """Return the fields of configurations that decide the number of blocks, by the name of their module.

    A field is one if a model whose field is smaller by 1 has a block less.
    """
    counters: dict[str, list[str]] = {}
    tried: set[int] = set()
    for name, module in model.named_modules():
        inside = f"{stack}.".startswith(f"{name}." if name else "")
        if not isinstance(module, PreTrainedModel) or not inside or id(module.config) in tried:
            continue
        tried.add(id(module.config))
        for field, value in vars(module.config).items():
            if type(value) is int and value == size:
                fewer = copy.deepcopy(module.config)
                setattr(fewer, field, size - 1)
                try:
                    with Change(module, attributes={"": {"config": fewer}}):
                        built = new_of_class(module).get_submodule(stack.removeprefix(f"{name}.".lstrip(".")))
                except Exception:  # a field of another meaning may raise any error
                    continue
                if len([*built.children()]) == size - 1:
                    counters.setdefault(name, []).append(field)
    return counters


# --- removal ---------------------------------------------------------------------------------------------


def removal(model: nn.Module, stacks: list[Stack], plan: Plan) -> Change:
    """Return the change that removes blocks, numbers the others again, and cuts the configurations."""
    kept = {
        stack: [number for number in range(stack.size) if number not in plan.get(stack.name, ())]
        for stack in stacks
    }

    def edit(name: str, config: Any) -> None:
        for stack, left in kept.items():
            if name not in stack.counters:
                continue
            of_layers = {int(k): v for k, v in (config.to_dict().get("per_layer_config") or {}).items()}
            stages = getattr(config, "stage_names", None) or ()
            for field, value in list(vars(config).items()):
                if field in stack.counters[name]:
                    setattr(config, field, len(left))
                elif isinstance(value, list | tuple) and len(value) == stack.size:
                    setattr(config, field, type(value)(value[number] for number in left))
            if of_layers:
                config.per_layer_config = {left.index(k): v for k, v in of_layers.items() if k in left}
            if len(stages) == stack.size + 1:  # names of states; a backbone returns the last
                config.stage_names = stages[: len(left) + 1]
                config.set_output_features_output_indices(None, None)

    change = change_configs(model, [name for stack in stacks for name in stack.counters], edit)
    for stack, left in kept.items():
        for new, old in enumerate(left):
            for name, module in model.get_submodule(stack.block(old)).named_modules():
                numbers = {key for key, value in vars(module).items() if NUMBER.search(key) and value == old}
                path = f"{stack.block(old)}.{name}".rstrip(".")
                change.attributes.setdefault(path, {}).update(dict.fromkeys(numbers, new))
    for stack, left in kept.items():  # last, because the names above are the names before
        blocks = dict(model.get_submodule(stack.name).named_children())
        modules = {str(new): blocks[str(old)] for new, old in enumerate(left)}
        change.attributes[stack.name] = {CHILDREN: modules}
    return change


def difference(model: nn.Module, stacks: list[Stack], plan: Plan, batch: Any) -> str:
    """Return why a model does not work without some blocks, "" if it does.

    The reference are the outputs of the full model with the outputs of these blocks replaced by their inputs.
    """
    blocks = [stack.block(number) for stack in stacks for number in plan.get(stack.name, ())]
    with torch.no_grad(), capture(model, on_state=lambda state: None, intervention=Removal({}, blocks)):
        before = main_output(model, batch)
    try:
        with removal(model, stacks, plan):
            check_plain(model, batch)
            after = main_output(model, batch)
            if after.shape != before.shape:
                return f"outputs {tuple(after.shape)} instead of {tuple(before.shape)}"
            if not (off := relative_error(after, before)) <= torch.finfo(before.dtype).eps ** 0.5:
                return f"the other blocks compute something else: outputs are off by {off:.1e}"
    except CompressionError as error:
        return error.got
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        return first_line(error)
    return ""


def generation_error(model: Any, stacks: list[Stack], plan: Plan, batch: Any) -> str:
    """Return why an encoder-decoder does not generate without some blocks, "" if it does.

    T5 generates with a cache of as many layers as its encoder has.
    """
    if not (config_value(model, "is_encoder_decoder") and "past_key_values" in argument_names(model)):
        return ""
    try:
        with removal(model, stacks, plan):
            caches = (DynamicCache(config=model.config.get_text_config(decoder=True)) for _ in range(2))
            main_output(model, {**batch, "past_key_values": EncoderDecoderCache(*caches), "use_cache": True})
    except IndexError as error:
        return f"it does not generate: {first_line(error)}"
    return ""
