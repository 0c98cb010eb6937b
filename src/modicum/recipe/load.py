"""Read a recipe: YAML in, settings out, or every fault at once with its dotted path."""

import difflib
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from modicum.recipe.paths import RecipePath
from modicum.recipe.presets import PRESETS
from modicum.recipe.settings import (
    ChatSettings,
    CorpusSettings,
    EvaluateSettings,
    ModelSettings,
    Name,
    PretrainSettings,
    Settings,
    SftSettings,
    SourceSettings,
    TokenizerSettings,
)
from modicum.store import UserError


class Recipe(Settings):
    """One run, from text to chat model. `output` is the folder that holds the run's own folder."""

    name: Name
    seed: int = Field(default=0, ge=0, lt=2**32)
    output: RecipePath
    corpus: CorpusSettings
    tokenizer: TokenizerSettings = TokenizerSettings()
    chat: ChatSettings = ChatSettings()
    model: ModelSettings = ModelSettings()
    pretrain: PretrainSettings = PretrainSettings()
    sft: SftSettings | None = None
    evaluate: EvaluateSettings = EvaluateSettings()

    @property
    def run_folder(self) -> Path:
        return self.output / self.name

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_hang_together(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        model, pretrain = values.get("model"), values.get("pretrain", {})
        begun = isinstance(model, dict) and model.get("checkpoint") is not None
        if begun and isinstance(pretrain, dict) and pretrain.get("optimizer") != "adamw":
            # what others learnt in an embedding would be lost in a few updates of ten times the rate
            values = {**values, "pretrain": {"embedding_learning_rate_factor": 1.0, **pretrain}}
        return {"output": "runs", **values}

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        faults = _length_faults(self.model_dump())
        faults += _place_faults(self.corpus.sources, self.run_folder)
        if self.model.checkpoint is not None:
            faults += [
                f"tokenizer.{name}: the tokenizer is that of model.checkpoint; leave this out"
                for name in sorted(self.tokenizer.model_fields_set)
            ]
        elif not self.pretrain.steps:
            faults.append("pretrain.steps: 0 updates teach a fresh model nothing; 0 goes with model.checkpoint alone")
        if faults:
            raise ValueError("\n".join(faults))
        return self


def _place_faults(sources: list[SourceSettings], run: Path) -> list[str]:
    """Sources that would take what the run itself writes for text."""
    faults = []
    for number, source in enumerate(sources):
        path = source.path
        if path is not None and run.is_relative_to(path) and not _is_hidden(run.relative_to(path)):
            faults.append(
                f"corpus.sources.{number}.path: {path} holds the run's own folder {run}, which would be read as text; "
                "set output to a folder outside of it"
            )
        elif path is not None and path.is_relative_to(run):
            faults.append(f"corpus.sources.{number}.path: {path} lies in the run's own folder; move it out of {run}")
    return faults


def _is_hidden(path: Path) -> bool:
    """Whether nothing reads it in a folder of text."""
    return any(part.startswith(".") for part in path.parts)


def _length_faults(values: dict[str, Any]) -> list[str]:
    """Training windows longer than the model's positions. Works on unvalidated values too, so that this fault is told
    together with the others and not after them."""
    given = values.get("model")
    model: dict[str, Any] = given if isinstance(given, dict) else {}
    if model.get("checkpoint") is not None:
        return []  # its positions stand in its own files, which are read where they are used
    preset = PRESETS.get(str(model.get("preset", "micro")), {})
    positions = {"max_position_embeddings": 2048, **preset, **model}["max_position_embeddings"]
    faults = []
    for name in ("pretrain", "sft"):
        part = values.get(name)
        length = part.get("sequence_length", 512) if isinstance(part, dict) else 512
        if isinstance(length, int) and isinstance(positions, int) and length > positions and (part or name != "sft"):
            faults.append(
                f"{name}.sequence_length: {length} tokens are longer than model.max_position_embeddings {positions}"
            )
    return faults


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars: only true and false are booleans, 1e-3 is a number; JSON's types alone; and a key may
    not come twice."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":float", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if not str(tag).endswith((":binary", ":timestamp", ":omap", ":pairs", ":set"))
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))(?:[eE][-+]?\d+)?$"),
    list("-+.0123456789"),
)


def _unique_keys(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} comes twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_keys)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around the texts that the loader would take for something else."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _parse_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UserError(f"{origin}{where}: not valid YAML: {error.problem}") from None
    except RecursionError:
        raise UserError(f"{origin}: not valid YAML: nested too deeply") from None
    except Exception as error:  # of any kind, where a text does not fit its tag, as in `!!int ""`
        raise UserError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from None


def load_recipe(path: Path, overrides: list[str] | None = None) -> Recipe:
    """The recipe at `path` with `overrides` ("pretrain.steps=500") applied.

    Raises UserError with one line for each fault: where it is, what was expected, and the nearest known key.
    """
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe; `modicum new DIR` writes one to start from") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder, not a recipe; name the YAML file in it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from None
    values = _parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected keys and values (name:, corpus:, ...), found {type(values).__name__}")
    for override in overrides or []:
        _apply_override(values, override)
    try:
        return Recipe.model_validate(values, context={"folder": path.parent.resolve()})
    except ValidationError as error:
        lines = _fault_lines(error)
        lines += [line for line in _length_faults(values) if line not in lines]
        raise UserError("\n".join(f"{path}: {line}" for line in lines)) from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, raw = override.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"--set {override}: expected key=value, such as pretrain.steps=500")
    value = _parse_yaml(raw, f"--set {key}") if raw else None
    place: Any = values
    *parents, last = key.split(".")
    for parent in parents:
        if isinstance(place, list):
            place = place[_index(place, parent, key)]
        else:
            if place.get(parent) is None:
                place[parent] = {}
            place = place[parent]
        if not isinstance(place, dict | list):
            raise UserError(f"--set {key}: {parent} holds a value, not keys")
    if isinstance(place, list):
        place[_index(place, last, key)] = value
    else:
        place[last] = value


def _index(items: list[Any], part: str, key: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise UserError(f"--set {key}: {part} is not one of the {len(items)} entries (they count from 0)")
    return int(part)


def _fault_lines(error: ValidationError) -> list[str]:
    """One line a fault: dotted path, what is wrong, and for an unknown key the nearest known one."""
    lines = []
    for fault in error.errors(include_url=False):
        where = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            known = _known_keys(fault["loc"][:-1])
            near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
            lines.append(f"{where}: unknown key; {hint}")
        elif fault["type"] == "missing":
            lines.append(f"{where}: missing")
        elif fault["type"] == "value_error":
            lines += [f"{where}: {line}" if where else line for line in message.split("\n")]
        else:
            lines.append(f"{where}: {message[0].lower() + message[1:]}, found {fault['input']!r}")
    return lines


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """Field names of the settings class that stands at this place in the recipe."""
    here: type[BaseModel] = Recipe
    for part in location:
        if isinstance(part, str) and part in here.model_fields:
            inner = _settings_class(here.model_fields[part].annotation)
            here = inner or here
    return list(here.model_fields)


def _settings_class(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _settings_class(argument)
        if found is not None:
            return found
    return None


def resolved_yaml(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out; loading it again gives an equal recipe."""
    plain = recipe.model_dump(mode="json")
    if recipe.model.checkpoint is not None:  # shape and tokenizer are the checkpoint's, and may not stand beside it
        plain["model"] = recipe.model.model_dump(mode="json", exclude_unset=True)
        del plain["tokenizer"]
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
