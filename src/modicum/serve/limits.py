"""How much one client may ask for."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Limits:
    """body_bytes: of one request. body_seconds: in which it must arrive. choices: `n`, and the prompts of one
    completion request times `n`. stops and stop_characters: of `stop`. tools: functions of one request. schema_bytes,
    schema_depth, schema_seconds: of one JSON Schema or grammar and its compilation. grammars: how many compiled ones
    are kept. seconds: of one answer and its wait for a slot; then it ends with finish_reason "length", or is refused
    where it has no token yet. retry_seconds: what a client is told then, and when the queue is full.
    """

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    choices: int = 8
    stops: int = 16
    stop_characters: int = 1000
    tools: int = 64
    schema_bytes: int = 64 << 10
    schema_depth: int = 48
    schema_seconds: float = 5.0
    grammars: int = 64
    seconds: float = 600.0
    retry_seconds: int = 1

    def for_tools(self) -> "Limits":
        """Of the grammar that many tools make together; each schema has been measured by itself."""
        return replace(self, schema_bytes=4 * self.schema_bytes)
