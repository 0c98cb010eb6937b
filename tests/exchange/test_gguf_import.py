import gguf
import gguf_models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from modicum.checkpoint import load_checkpoint
from modicum.exchange import Limits, export_gguf, import_checkpoint
from modicum.store import UserError
from modicum.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("brief_gate")
ANY = Limits(10, 10, 0)
FAST = ("biases", "llama3")


@pytest.mark.parametrize(
    "shape", [shape if shape in FAST else pytest.param(shape, marks=pytest.mark.slow) for shape in gguf_models.SHAPES]
)
def test_what_was_exported_comes_back_bit_for_bit_and_goes_out_the_same(shape, tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, **gguf_models.SHAPES[shape])
    export_gguf(folder, out=tmp_path / "out")
    report = import_checkpoint(tmp_path / "out" / "model-f32.gguf", dialect="gguf", out=tmp_path / "ours")
    first, second = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "ours"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert report.tensors == len(first)
    assert [one.tokens for one in report.compared] == [1, 2, 7, 40]
    export_gguf(tmp_path / "ours", out=tmp_path / "again")
    files = [tmp_path / out / "model-f32.gguf" for out in ("out", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("shape", ["plain", "llama3", "rows without a token"])
def test_every_file_of_the_checkpoint_comes_back(shape, tokenizer, tmp_path):
    # the range of the first weights alone is not in a GGUF file
    folder = gguf_models.save(tokenizer, tmp_path, **gguf_models.SHAPES[shape], initializer_range=0.02)
    export_gguf(folder, out=tmp_path / "out")
    import_checkpoint(tmp_path / "out" / "model-f32.gguf", dialect="gguf", out=tmp_path / "ours")
    names = {file.name for file in folder.iterdir()} - {"training"}
    assert names == {file.name for file in (tmp_path / "ours").iterdir()}
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "ours" / name).read_bytes(), name


@pytest.mark.parametrize("quant", ["bf16", "q8_0", *(pytest.param(q, marks=pytest.mark.slow) for q in ("f16", "q4_0"))])
def test_rounded_weights_come_in_as_the_gguf_package_reads_them(quant, tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, qk_norm=True, intermediate_size=80)
    export_gguf(folder, quant=quant, out=tmp_path / "out", limits=ANY)
    file = tmp_path / "out" / f"model-{quant}.gguf"
    report = import_checkpoint(file, dialect="gguf", out=tmp_path / "ours")
    assert report.dtype == "float32"
    found = load_checkpoint(tmp_path / "ours").weights
    theirs = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(file).tensors}
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "model.layers.0.self_attn.k_norm.weight": "blk.0.attn_k_norm.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }  # fmt: skip
    for ours, name in pairs.items():
        np.testing.assert_array_equal(found[ours].numpy(), theirs[name])


@pytest.mark.slow
def test_an_imported_model_says_what_transformers_makes_of_the_file(tokenizer, ids, tmp_path, said_by_transformers):
    folder = gguf_models.save(tokenizer, tmp_path, num_key_value_heads=2, attention_bias=True)
    export_gguf(folder, out=tmp_path / "out")
    import_checkpoint(tmp_path / "out" / "model-f32.gguf", dialect="gguf", out=tmp_path / "ours")
    np.testing.assert_array_equal(
        said_by_transformers(tmp_path / "ours", ids(21)), said_by_transformers(folder, ids(21))
    )


def test_a_tokenizer_of_ones_own_may_be_named(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path)
    export_gguf(folder, out=tmp_path / "out")
    file = tmp_path / "out" / "model-f32.gguf"
    report = import_checkpoint(file, dialect="gguf", out=tmp_path / "ours", tokenizer=folder / "tokenizer.json")
    assert report.tokenizer == folder / "tokenizer.json"
    assert isinstance(load_checkpoint(tmp_path / "ours").tokenizer, Tokenizer)


def test_a_model_that_is_none_of_ours_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "gemma.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"gemma\.gguf: architecture 'gemma3' cannot be imported; llama and qwen3 can"):
        import_checkpoint(tmp_path / "gemma.gguf", dialect="gguf", out=tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
