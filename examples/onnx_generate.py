"""Generate text from a folder of `modicum export --to onnx`, with numpy, onnxruntime and tokenizers alone.

    python examples/onnx_generate.py FOLDER "Once upon a time" [TOKENS]

The graph takes new tokens, a mask over all tokens, the place of each new one, and the keys and values of those before;
it gives logits, and the keys and values to hand in next time.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


def generate(folder: Path, ids: list[int], tokens: int) -> list[int]:
    """The likeliest continuation of `ids`, at most `tokens` long, until the model ends its answer."""
    settings = json.loads((folder / "genai_config.json").read_text("utf-8"))["model"]
    session = onnxruntime.InferenceSession(folder / settings["decoder"]["filename"])
    past = [one for one in session.get_inputs() if one.name.startswith("past_key_values.")]
    kind = np.float16 if past[0].type == "tensor(float16)" else np.float32
    # nothing is held at first: (batch, heads, 0 tokens, head_dim)
    cache = [np.zeros((1, one.shape[1], 0, one.shape[3]), kind) for one in past]
    new, found = ids, []
    for _ in range(min(tokens, settings["context_length"] - len(ids))):
        held = cache[0].shape[2]
        logits, *cache = session.run(
            None,
            {
                "input_ids": np.array([new], dtype=np.int64),
                "attention_mask": np.ones((1, held + len(new)), dtype=np.int64),
                "position_ids": np.arange(held, held + len(new), dtype=np.int64)[None],
                **{one.name: part for one, part in zip(past, cache, strict=True)},
            },
        )
        best = int(logits[0, -1].argmax())
        if best in settings["eos_token_id"]:
            break
        found.append(best)
        new = [best]
    return found


def main(folder: str, prompt: str, tokens: str = "64") -> None:
    """Print the prompt and what follows it."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # a control token's name in the prompt is text
    settings = json.loads((Path(folder) / "genai_config.json").read_text("utf-8"))["model"]
    ids = [settings["bos_token_id"], *tokenizer.encode(prompt, add_special_tokens=False).ids]
    print(tokenizer.decode(ids + generate(Path(folder), ids, int(tokens))))


if __name__ == "__main__":
    main(*sys.argv[1:])
