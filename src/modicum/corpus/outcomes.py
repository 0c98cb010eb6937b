"""What can become of a document. The number is what stands in a record; 0 and 1 stay, the others are dropped."""

from modicum.recipe import CorpusSettings, FilterSettings, SourceSettings

TRAIN, HELD_OUT = 0, 1
EMPTY, TOO_SHORT, TOO_LONG, REPETITIVE, CONTAMINATED, EXACT_DUPLICATE, NEAR_DUPLICATE = range(2, 9)

REASONS = {
    EMPTY: "empty",
    TOO_SHORT: "too short",
    TOO_LONG: "too long",
    REPETITIVE: "repetitive",
    CONTAMINATED: "contains an evaluation item",
    EXACT_DUPLICATE: "exact duplicate",
    NEAR_DUPLICATE: "near duplicate",
}


def filters_of(settings: CorpusSettings, source: SourceSettings) -> FilterSettings:
    """The filters of one source: what it sets itself, else what its language sets, else the corpus's."""
    chosen = settings.filters.model_dump()
    for override in (settings.languages.get(source.language), source.filters):
        if override is not None:
            chosen.update({name: value for name, value in override.model_dump().items() if value is not None})
    return FilterSettings(**chosen)
