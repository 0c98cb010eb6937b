"""The corpus report says under which licences the training text stands."""

import json

from modicum.corpus import prepare_corpus, read_documents
from modicum.recipe import CorpusSettings


def test_the_report_counts_training_documents_and_bytes_by_licence(tmp_path):
    texts = [f"Chapter {number}: a paragraph of its own about subject number {number * 7919}." for number in range(60)]
    names = ["MIT", "CC0-1.0", None]
    lines = [json.dumps({"text": text, "licence": names[number % 3]}) for number, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), "utf-8")
    settings = CorpusSettings.model_validate(
        {"sources": [{"name": "a", "path": tmp_path / "a.jsonl"}], "heldout_fraction": 0.2}
    )
    report = prepare_corpus(settings, tmp_path / "out", seed=0, decontaminate_against=[])
    expected = {}
    for document in read_documents(tmp_path / "out", "train"):
        entry = expected.setdefault(document.licence or "not named", {"documents": 0, "bytes": 0})
        entry["documents"] += 1
        entry["bytes"] += len(document.text.encode("utf-8"))
    assert report.documents_heldout > 0
    assert report.sources[0].licences == expected
    assert set(expected) == {"MIT", "CC0-1.0", "not named"}
