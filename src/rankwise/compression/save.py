"""Save and load compressed models. After import of this module, ``from_pretrained`` loads them, too.

The structure of a compressed model is data: records that suffice to build the empty model before its weights
are loaded. In transformers, a configuration can name a class that prepares the empty model, as for quantized
models. A compressed model is prepared in the same way, but nothing is quantized.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
import transformers
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from rankwise._internals.files import check_unused, write_files
from rankwise._internals.forward import Change, config_value, preserve_random_state
from rankwise.compression import heads_modules, kv_modules, width_modules
from rankwise.compression.heads_modules import RemovedHeads
from rankwise.compression.kv_modules import LatentLayer
from rankwise.compression.records import Compression
from rankwise.compression.width_modules import NarrowedKeys, NarrowedLinear
from rankwise.errors import CompressionError, InputError, first_line, readable_file

WEIGHTS, STRUCTURE, RECORD = "model.safetensors", "structure.json", "compression.json"
NAME = "rankwise, after `from rankwise.compression import load_compressed`"
"""Name of the method in config.json. transformers prints it if nobody has registered the method."""
README = """This model is compressed: the weights of its original class do not fit.

Load it with `rankwise.load_compressed(folder)`, after `pip install rankwise`. For a module that is not from
transformers, pass a new one: `rankwise.load_compressed(folder, model=Own())`.

Do not set `ignore_mismatched_sizes=True`, as an error of transformers may advise: the compressed weights
would be random.
"""
PLAIN = "_changed_configuration"
"""Attribute of a model whose changed configuration describes some of its changes, or all of them."""
KEY = "quantization_config"
"""Field of a configuration that names the class that prepares the empty model."""

SavedChange = Annotated[
    RemovedHeads | NarrowedLinear | NarrowedKeys | LatentLayer, Field(discriminator="kind")
]
KINDS: dict[str, tuple[str, Callable[..., Change]]] = {
    "heads": (heads_modules.RECORD, heads_modules.build),  # first: other records count remaining heads
    "narrow": (width_modules.NARROWED, width_modules.build),
    "keys": (width_modules.RECORD, width_modules.build_keys),
    "latent": (kv_modules.RECORD, kv_modules.build),
}
"""For each `kind` of `SavedChange`: attribute of a module that keeps the record, and function that builds the
change of a record. Changes are built in this order."""


class Structure(BaseModel, extra="forbid"):
    """All changes of a model, in the order in which they are built."""

    format: Literal[3] = 3
    changes: list[SavedChange]


def pretrained_models(model: nn.Module) -> list[PreTrainedModel]:
    """Return the outermost models of transformers in a module: the module itself, or the models it wraps."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [inner for child in model.children() for inner in pretrained_models(child)]


def structure_of(model: nn.Module) -> Structure:
    """Return the changes that the modules of a model record, under the current names of the modules."""
    named = [
        (name, vars(module).get(record))
        for record, _ in KINDS.values()
        for name, module in model.named_modules()
    ]
    return Structure(changes=[_renamed(change, name) for name, change in named if change is not None])


def _renamed(change: Any, module: str) -> Any:
    """Return a change under a new module name, after a model was added to or removed from another."""
    before = change.module.removesuffix(module) if change.module.endswith(module) else ""
    after = module.removesuffix(change.module) if module.endswith(change.module) else ""

    def moved(name: str) -> str:
        return after + name.removeprefix(before)

    update: dict[str, Any] = {"module": module}
    if isinstance(change, LatentLayer) and change.rotary:
        update["rotary"] = moved(change.rotary)
    if isinstance(change, RemovedHeads):
        update["cuts"] = [cut.model_copy(update={"module": moved(cut.module)}) for cut in change.cuts]
    return change.model_copy(update=update)


@contextmanager
def rebuilt(model: nn.Module, structure: Structure) -> Iterator[None]:
    """Context manager that applies saved changes to a new model, and undoes them if the block raises.

    The weights of added modules are not loaded yet.
    """
    with ExitStack() as applied:
        for saved in structure.changes:
            applied.enter_context(KINDS[saved.kind][1](model, saved))
        yield
        applied.pop_all()


def read_structure(content: Any, where: str) -> Structure:
    """Return the structure in JSON content from `where`. Raise `CompressionError` if it is invalid."""
    try:
        return Structure.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise CompressionError(
            where,
            expected="the structure of a compressed model, as `save_compressed` writes it",
            got=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            fix="Save the model again, with the same version of Rankwise.",
        ) from error


# --- files -----------------------------------------------------------------------------------------------


def check_config(model: PreTrainedModel) -> None:
    """Raise `CompressionError` if the configuration of a model cannot be saved."""
    with TemporaryDirectory() as folder:
        try:
            copy.deepcopy(model.config).save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        except Exception as error:  # transformers raises errors of many classes
            raise CompressionError(
                f"model {type(model).__name__}",
                expected="a configuration that can be saved",
                got=" ".join(str(error).split()),
                fix="Change the configuration.",
            ) from error


def new_of_class(model: PreTrainedModel) -> PreTrainedModel:
    """Return a new model of the class and the configuration of a model, without memory for weights."""
    with torch.device("meta"), preserve_random_state(model), initialization.meta_device_safe_creation_ops():
        return type(model)(copy.deepcopy(model.config))


def is_changed(model: nn.Module) -> bool:
    """Return True if a model has changes, in its structure or in its configuration."""
    return bool(structure_of(model).changes) or hasattr(model, PLAIN)


def _expected_weights(model: PreTrainedModel, structure: Structure) -> dict[str, Tensor]:
    """Return the weights of a model. Raise `CompressionError` if a new model of its class lacks a weight."""
    state = model.state_dict()
    try:
        new = new_of_class(model)
    except TypeError:  # the class needs arguments that only `load_compressed` gets
        return state
    with torch.device("meta"), preserve_random_state(model), rebuilt(new, structure):
        names = set(new.state_dict())
    if extra := state.keys() - names:
        raise CompressionError(
            f"model {type(model).__name__}",
            expected="the weights of a model of its class",
            got=f"{len(extra)} more, such as {min(extra)!r}",
            fix="Remove them and save them apart; λ-skips by `save_skips` and `remove_lambda_skip`.",
        )
    return state


def save_compressed(model: nn.Module, folder: str | Path, record: Compression | None = None) -> Path:
    """Write a compressed model and its record into a new or empty folder; return the folder.

    A model that its changed configuration describes is written as a plain checkpoint. Other models of
    transformers are written by their ``save_pretrained``, which also works alone: the structure is in
    ``config.json``. Other modules are written as ``model.safetensors`` and ``structure.json``.
    Example: `load_compressed`.

    Raises:
        CompressionError: if the model is not compressed, or has weights that a new model of its class lacks.
        InputError: if the folder has files, or cannot be written.
    """
    folder, structure = Path(folder), structure_of(model)
    if not is_changed(model):
        raise CompressionError(
            f"model {type(model).__name__}",
            expected="a compressed model",
            got="a model without changes",
            fix="Compress it first: `rw.compress(model, batches)`. If it was, nothing was changed at these "
            "targets: lower `keep` or raise `tolerance`.",
        )
    check_unused(folder, "folder")
    weights = _expected_weights(model, structure) if isinstance(model, PreTrainedModel) else {}

    def write(new: Path) -> None:
        if isinstance(model, PreTrainedModel):
            note_structure(model)
            model.save_pretrained(new, state_dict=weights)
        else:
            save_model(model, str(new / WEIGHTS))
            (new / STRUCTURE).write_text(structure.model_dump_json(), encoding="utf-8")
        if structure.changes:
            (new / "README.md").write_text(README, encoding="utf-8")
        if record is not None:
            record.save(new / RECORD)

    write_files(folder, write, "folder")
    return folder


def load_compressed(folder: str | Path, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """Load a compressed model, in evaluation mode.

    After ``from rankwise.compression import load_compressed``, ``AutoModel.from_pretrained(folder)`` and the
    other classes of transformers also load compressed models.

    Args:
        folder: folder that `save_compressed` or ``save_pretrained`` wrote.
        model: for a module that is not from transformers, a fresh module of the same class and sizes; it is
            changed in place.
        options: arguments of ``from_pretrained``, such as ``dtype=torch.bfloat16``.

    Raises:
        CompressionError: if the folder has no compressed model, or the weights do not fit.
        InputError: if a file cannot be read.

    Examples:
        >>> import tempfile, torch, rankwise as rw
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)).eval()
        >>> ids = torch.randint(0, 50, (2, 24))
        >>> done = rw.compress(model, [{"input_ids": ids}], keep=0.5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = rw.compression.save_compressed(model, folder, done)
        ...     again = rw.load_compressed(folder)
        >>> bool(torch.equal(model(ids).logits, again(ids).logits))
        True
    """
    folder = Path(folder)
    if model is not None:
        return _load_into(folder, model)
    content = _read_json(folder / "config.json")
    compressed = isinstance(content, dict) and _is_noted(content.get(KEY))
    if not compressed or not content.get("architectures"):
        raise CompressionError(
            f"folder {folder}",
            expected="a compressed model of transformers",
            got="a configuration without `architectures`" if compressed else "one without a compression",
            fix="Load it with `AutoModel.from_pretrained`; or pass `model=` for a module of your own.",
        )
    name = str(content["architectures"][0])
    loader = _known_class(name)
    if loader is None:
        raise CompressionError(
            f"folder {folder}",
            expected="a class of transformers or of `rankwise.models`",
            got=name,
            fix=f"Import the class and load the folder with it: `{name}.from_pretrained`. If the class is in "
            "the folder, read its code, then load it by an Auto class with `trust_remote_code=True`.",
        )
    try:
        loaded, loading = loader.from_pretrained(folder, output_loading_info=True, **options)
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder, error) from error
    check_complete(f"folder {folder}", loading["missing_keys"], loading["unexpected_keys"])
    complete: nn.Module = loaded.eval()
    return complete


def check_complete(subject: str, missing: Iterable[str], extra: Iterable[str] = ()) -> None:
    """Raise `CompressionError` if weights of a compressed model are missing (then random) or superfluous."""
    wrong = [*(f"no {name!r}" for name in sorted(missing)), *map(repr, sorted(extra))]
    if wrong:
        raise CompressionError(
            subject,
            expected="all weights of the compressed model",
            got=", ".join(wrong[:3]),
            fix="Save it by `save_compressed`, or pass the arguments of its class as options.",
        )


def _known_class(name: str) -> Any:
    """Return a model class of transformers or of `rankwise.models`. Return None if the name is unknown."""
    import rankwise.models

    return getattr(transformers, name, None) or getattr(rankwise.models, name, None)


def loading_line(model: nn.Module, folder: str, source: str) -> str:
    """Return the line of Python that loads a compressed model. `source` says how the original was built."""
    quoted, kind = json.dumps(folder, ensure_ascii=False), type(model)
    if isinstance(model, PreTrainedModel) and not structure_of(model).changes:
        if getattr(transformers, kind.__name__, None) is not kind:
            return f"model = {kind.__name__}.from_pretrained({quoted})   # plain: its class loads it"
        return f"model = transformers.{kind.__name__}.from_pretrained({quoted})   # without Rankwise"
    if not isinstance(model, PreTrainedModel):
        return f"model = rankwise.load_compressed({quoted}, model)   # model: new, as built by {source}"
    if _known_class(kind.__name__) is kind:
        return f"model = rankwise.load_compressed({quoted})"
    return f"model = {kind.__name__}.from_pretrained({quoted})   # after `import rankwise.compression.save`"


def _load_into(folder: Path, model: nn.Module) -> nn.Module:
    """Load a saved module that is not from transformers into a fresh module."""
    structure = read_structure(_read_json(folder / STRUCTURE), str(folder / STRUCTURE))
    try:
        with preserve_random_state(model), rebuilt(model, structure):  # new layers draw random numbers
            load_model(model, folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder / WEIGHTS, error) from error
    except RuntimeError as error:
        raise CompressionError(
            f"weights {folder / WEIGHTS}",
            expected=f"weights of a {type(model).__name__} of the same sizes",
            got=" ".join(str(error).split()),
            fix="Build the model as it was built when it was saved.",
        ) from error
    return model.eval()


def _unreadable(path: Path, error: Exception) -> InputError:
    expected, got = "weights that `save_compressed` wrote", first_line(error)
    return InputError(f"weights {path}", expected=expected, got=got, fix="Save the model again.")


def _read_json(path: Path) -> Any:
    """Return the JSON content of a file."""
    fix = "Check the folder; for a module that is not from transformers, pass `model=`."
    data = readable_file(path, "JSON of a compressed model", fix=fix)
    try:
        return json.loads(data)
    except ValueError as error:
        raise InputError(
            f"file {path}", expected="JSON of a compressed model", got=first_line(error), fix=fix
        ) from error


# --- loader of transformers ------------------------------------------------------------------------------


class CompressionConfig(QuantizationConfigMixin):
    """Structure of a compressed model inside its configuration."""

    def __init__(self, structure: Any = None, **_: Any) -> None:
        self.quant_method = NAME
        self.structure = structure if isinstance(structure, dict) else {"changes": []}

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        return {"quant_method": NAME, "load": "rankwise.load_compressed(folder)", "structure": self.structure}


class CompressionBuilder(HfQuantizer):
    """Quantizer of transformers that builds the structure into the empty model before weights are loaded."""

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        structure = read_structure(self.quantization_config.structure, "the configuration")
        with rebuilt(model, _named_for(model, structure)):
            return model

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        # Remove every flag: `Trainer` and peft refuse to train quantized models.
        del model.hf_quantizer, model.quantization_method
        model.is_quantized = False  # type: ignore[assignment]
        for module in model.modules():
            if isinstance(module, width_modules.ReplacedLinear):
                module.set_guard()  # it was built without memory
            if config_value(module, "_is_quantized"):
                module.config._is_quantized = False  # type: ignore[union-attr]
        return model

    def is_serializable(self) -> bool:
        """Return True, so that transformers saves the model: its weights are ordinary tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True, so that Trainer trains the model: its weights are ordinary parameters."""
        return True


def _named_for(model: nn.Module, structure: Structure) -> Structure:
    """Return the structure with module names that fit a model with or without an output head.

    The names of the two models differ by a prefix.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    modules, changes = {name for name, _ in model.named_modules()}, []
    for change in structure.changes:
        names = (change.module, change.module.removeprefix(prefix), prefix + change.module)
        changes.append(_renamed(change, next((name for name in names if name in modules), change.module)))
    return structure.model_copy(update={"changes": changes})


def note_structure(model: Any) -> None:
    """Write the structure of a model into its configuration, or remove it if the model has no changes."""
    structure = structure_of(model)
    noted = config_value(model.config, KEY)
    if structure.changes:
        setattr(model.config, KEY, CompressionConfig(structure=structure.model_dump(mode="json")))
    elif _is_noted(noted):
        delattr(model.config, KEY)


def _is_noted(noted: Any) -> bool:
    """Return True for the structure of a model in a configuration, before or after it was read."""
    method = noted.get("quant_method") if isinstance(noted, dict) else getattr(noted, "quant_method", "")
    return bool(method == NAME)


if NAME not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(NAME)(CompressionConfig)
    register_quantizer(NAME)(CompressionBuilder)
