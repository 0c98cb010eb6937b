import subprocess
import sys
from pathlib import Path

import pytest

from modicum.exchange import Limits, export_onnx

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_loop_in_python_goes_on_as_the_checkpoint_does(exported, goes_on):
    from onnx_generate import generate

    checkpoint, folder = exported
    for text in ("A model", "says what it says elsewhere"):
        ids = checkpoint.tokenizer.encode(text)
        assert generate(folder, ids, 24) == goes_on(ids, 24)


def test_it_runs_as_it_is_documented(exported, goes_on):
    checkpoint, folder = exported
    command = [sys.executable, EXAMPLES / "onnx_generate.py", folder, "A model", "12"]
    answer = subprocess.run(command, capture_output=True, check=True)
    asked = [checkpoint.tokenizer.bos_id, *checkpoint.tokenizer.encode("A model")]  # as `modicum generate` asks
    wanted = checkpoint.tokenizer.decode([*asked, *goes_on(asked, 12)], skip_special=True)
    assert answer.stdout.decode() == wanted + "\n"


def test_it_stops_where_the_context_is_full_and_where_an_answer_ends(exported, goes_on):
    from onnx_generate import generate

    checkpoint, folder = exported
    ids = (checkpoint.tokenizer.encode("A model in a page ") * 40)[:150]
    wanted = goes_on(ids, 10)
    assert generate(folder, ids, 64) == wanted


@pytest.mark.parametrize("quant", ["fp16", "int8"])
def test_it_takes_every_number_type(quant, exported, tmp_path):
    from onnx_generate import generate

    checkpoint, _ = exported
    export_onnx(checkpoint.path, quant=quant, out=tmp_path / "out", limits=Limits(10, 10, 0))
    found = generate(tmp_path / "out", checkpoint.tokenizer.encode("A model"), 5)
    assert found
    assert all(0 <= token < 384 for token in found)
