"""The text of a recipe in bytes and tokens: exact where the run has shards already, estimated where it has not."""

from dataclasses import dataclass

from modicum.data.index import ShardsInfo, read_index
from modicum.recipe import Recipe
from modicum.road.context import Road
from modicum.road.estimate import Talk, bytes_per_token, source_text, talk
from modicum.road.prepare import HELDOUT, TRAIN, corpus_inputs, shards_folder, shards_inputs, tokenizer_inputs
from modicum.road.start import starting_checkpoint
from modicum.store import UserError
from modicum.tokenizer import load_tokenizer

# In their order: the later ones look at what the earlier ones have made.
_BEFORE_TRAINING = (("corpus", corpus_inputs), ("tokenizer", tokenizer_inputs), ("shards", shards_inputs))


@dataclass(frozen=True)
class Text:
    """What there is to train on. bytes and tokens: of all sources, once; None when a Hub data set hides its size.

    exact: counted in the run's shards; otherwise before cleaning, with tokens from `bytes_per_token`. epochs: how
    often pretraining reads each source's tokens, and `max_epochs` how often it may. heldout_tokens: None where bytes
    is. talk: the conversations, or None.
    """

    vocab_size: int
    bytes: int | None
    tokens: int | None
    heldout_tokens: int | None
    bytes_per_token: float
    exact: bool
    epochs: dict[str, float]
    max_epochs: dict[str, float]
    talk: Talk | None


def text_of(recipe: Recipe) -> Text:
    """Look at the recipe's files. Raises UserError, as the run would, for those that cannot be read."""
    road = Road(recipe)
    stays = _shards_stay(road)
    shards, heldout = (_index(road, split) if stays else None for split in (TRAIN, HELDOUT))
    vocab_size = shards.vocab_size if shards else _vocab_size(recipe)
    if shards is not None:
        tokens = {name: source.tokens for name, source in shards.sources.items()}
        size: int | None = shards.bytes
        rate = shards.bytes / max(1, shards.tokens)
    else:
        sizes = {source.name: source_text(source).bytes for source in recipe.corpus.sources}
        rate = bytes_per_token(vocab_size)
        kept = 1 - recipe.corpus.heldout_fraction
        tokens = {name: round(kept * known / rate) for name, known in sizes.items() if known is not None}
        known_sizes = [known for known in sizes.values() if known is not None]
        size = sum(known_sizes) if len(known_sizes) == len(sizes) else None
    complete = size is not None
    return Text(
        vocab_size=vocab_size,
        bytes=size,
        tokens=sum(tokens.values()) if complete else None,
        heldout_tokens=_heldout(recipe, sum(tokens.values()), heldout) if complete else None,
        bytes_per_token=rate,
        exact=shards is not None,
        epochs=_epochs(recipe, tokens) if complete else {},
        max_epochs={source.name: source.max_epochs for source in recipe.corpus.sources},
        talk=_talk(recipe, vocab_size),
    )


def _epochs(recipe: Recipe, tokens: dict[str, int]) -> dict[str, float]:
    """How often each source is read: passes over the corpus by the source's weight in one."""
    weights = {source.name: source.weight for source in recipe.corpus.sources if source.name in tokens}
    a_pass = sum(weights[name] * tokens[name] for name in weights)
    settings = recipe.pretrain
    read = settings.steps * settings.batch_size * settings.sequence_length
    return {name: weight * read / a_pass for name, weight in weights.items()} if a_pass else {}


def _heldout(recipe: Recipe, tokens: int, shards: ShardsInfo | None) -> int:
    share = recipe.corpus.heldout_fraction
    return shards.tokens if shards is not None else round(tokens * share / (1 - share))


def _shards_stay(road: Road) -> bool:
    """Whether the run has shards, and a run of this recipe would leave them as they are."""
    if not (shards_folder(road, TRAIN) / "index.json").exists():
        return False
    try:
        return all(road.run.stage(name).changed_inputs(inputs(road)) == [] for name, inputs in _BEFORE_TRAINING)
    except (UserError, OSError):
        return False  # something that they are made of is damaged or gone


def _index(road: Road, split: str) -> ShardsInfo | None:
    try:
        return read_index(shards_folder(road, split))
    except UserError:
        return None


def _vocab_size(recipe: Recipe) -> int:
    """Ids of the tokenizer that the recipe takes over, loads or trains."""
    start = starting_checkpoint(recipe)
    if start is not None:
        return start.tokenizer.vocab_size
    if recipe.tokenizer.path is not None:
        return load_tokenizer(recipe.tokenizer.path, missing=recipe.tokenizer.missing_special_tokens).vocab_size
    wanted = recipe.tokenizer.vocab_size or recipe.model.vocab_size
    return -(-wanted // 64) * 64


def _talk(recipe: Recipe, vocab_size: int) -> Talk | None:
    settings = recipe.sft
    if settings is None or not settings.data:
        return None
    return talk(
        settings.data,
        vocab_size=vocab_size,
        sequence_length=settings.sequence_length,
        heldout_fraction=settings.heldout_fraction,
    )
