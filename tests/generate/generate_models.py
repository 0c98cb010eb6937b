"""Small models for the tests of this room."""

from modicum.model import Decoder, ModelConfig
from modicum.tokenizer import Tokenizer

CONTEXT = 64


def build_model(vocab_size: int, **changes: object) -> Decoder:
    """Two layers, grouped queries; weights so large that logits lie apart and no argmax is a matter of rounding."""
    sizes = dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96
    )
    sizes |= dict(max_position_embeddings=CONTEXT, initializer_range=0.3) | changes
    model = Decoder(ModelConfig(vocab_size=vocab_size, **sizes))
    model.init_weights(5)
    return model.eval()


def never_sampled(tokenizer: Tokenizer) -> list[int]:
    """Ids of a trained tokenizer that must not appear in an answer."""
    names = [b"<|pad|>", b"<|im_start|>", *(f"<|reserved_{i}|>".encode() for i in range(16))]
    return [i for i in range(tokenizer.vocab_size) if tokenizer.id_bytes(i) in names]
