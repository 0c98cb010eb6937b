"""SentencePiece models trained in a moment, as bytes."""

import io

import sentencepiece


def train(texts, **options):
    """A BPE model with byte fallback and pad 0, unk 1, bos 2, eos 3, unless `options` say otherwise."""
    lines = [line for text in texts for line in text.split("\n") if line.strip()]
    model = io.BytesIO()
    settings = {
        "vocab_size": 600,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "pad_id": 0,
        "unk_id": 1,
        "bos_id": 2,
        "eos_id": 3,
        "minloglevel": 2,
        "num_threads": 1,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **{**settings, **options}
    )
    return model.getvalue()
