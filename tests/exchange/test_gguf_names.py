import gguf
import gguf_models
import pytest

from modicum.exchange.names import foreign_names, weight_shapes


@pytest.mark.parametrize("shape", ["biases", "QK-norm", "grouped, untied"])
def test_names_are_those_of_the_gguf_package(shape):
    config = gguf_models.config(**gguf_models.SHAPES[shape])
    kind = gguf.MODEL_ARCH.QWEN3 if config.qk_norm else gguf.MODEL_ARCH.LLAMA
    theirs = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    names = foreign_names("gguf", config)
    assert {*names.values()} == {*weight_shapes(config)}
    for name, ours in names.items():
        assert theirs.get_name(ours, try_suffixes=(".weight", ".bias")) == name
