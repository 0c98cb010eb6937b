"""The recipe: one YAML file, validated at once, every default written out. The only room that reads YAML.

Rooms above take values out of these settings and pass them on as plain arguments.
"""

from modicum.recipe.identity import identity
from modicum.recipe.load import Recipe, load_recipe, resolved_yaml
from modicum.recipe.presets import PRESETS
from modicum.recipe.settings import (
    ChatSettings,
    CorpusSettings,
    EvaluateSettings,
    FilterSettings,
    ModelSettings,
    PretrainSettings,
    SftSettings,
    SourceSettings,
    TokenizerSettings,
    TrainSettings,
)

__all__ = [
    "PRESETS",
    "ChatSettings",
    "CorpusSettings",
    "EvaluateSettings",
    "FilterSettings",
    "ModelSettings",
    "PretrainSettings",
    "Recipe",
    "SftSettings",
    "SourceSettings",
    "TokenizerSettings",
    "TrainSettings",
    "identity",
    "load_recipe",
    "resolved_yaml",
]
