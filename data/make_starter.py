"""Cut the sample that `modicum new` ships out of data/small: only texts whose licence lets anyone use and pass them on.

Copyleft parts (GPL, GFDL, CC-BY-SA) stay in the repository, beside their licence texts, and never enter the wheel.
Run from the repository's root; the result is the same bytes every time.
"""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

SMALL = Path("data/small")
STARTER = Path("src/modicum/road/starter")
PERMISSIVE = ("MIT", "public domain", "MITRE", "CC0", "BSD", "ISC")
# Share of each kind of record that is kept, so that the sample stays under a megabyte.
KEPT_TEXTS, KEPT_CONVERSATIONS = 0.45, 0.5


def permissive(record: dict[str, Any]) -> bool:
    return str(record["licence"]).startswith(PERMISSIVE)


def chosen(record: dict[str, Any], share: float) -> bool:
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:4]) < share * 2**32


def cut(name: str, share: float) -> None:
    with gzip.open(SMALL / name, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    kept = [record for record in records if permissive(record) and chosen(record, share)]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
    (STARTER / name).write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))
    print(f"{name}: {len(kept)} of {len(records)} records, {len(text):,} characters")


def cut_questions() -> None:
    lines = (SMALL / "eval.jsonl").read_text("utf-8").splitlines()
    kept = [line for line in lines if json.loads(line)["source"].startswith(("CWE", "MITRE"))]
    (STARTER / "eval.jsonl").write_text("".join(line + "\n" for line in kept), "utf-8")
    print(f"eval.jsonl: {len(kept)} of {len(lines)} questions")


if __name__ == "__main__":
    cut("corpus.jsonl.gz", KEPT_TEXTS)
    cut("instruct.jsonl.gz", KEPT_CONVERSATIONS)
    cut_questions()
