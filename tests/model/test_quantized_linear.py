"""Rounded linear layers against NumPy in float64."""

import os
import platform
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.model import native, quantized
from modicum.model.packing import RoundedMatrix, pack_scale, pack_values, unpack_scale, unpack_values
from modicum.model.quantized import QuantizedEmbedding, QuantizedLinear


def rounded(outputs, inputs, bits, grouped, seed=0):
    draw = np.random.default_rng(seed)
    half = 1 << (bits - 1)
    values = draw.integers(-half, half, (outputs, inputs), dtype=np.int8)
    scale = draw.uniform(0.001, 0.01, (outputs, -(-inputs // 32) if grouped else 1)).astype(np.float32)
    return values, scale


def matrix(values, scale, bits):
    return RoundedMatrix(torch.from_numpy(values), torch.from_numpy(scale), bits)


def wide(values, scale):
    """float64 weights: each number times its group's scale."""
    inputs = values.shape[1]
    each = np.repeat(scale.astype(np.float64), 32 if scale.shape[1] > 1 else inputs, axis=1)[:, :inputs]
    return values.astype(np.float64) * each


def rounded_by_blocks(x):
    """What the kernel makes of activations: 8 bits by blocks of 32, the largest at 127."""
    padded = np.zeros((len(x), -(-x.shape[1] // 32) * 32))
    padded[:, : x.shape[1]] = x
    blocks = padded.reshape(len(x), -1, 32)
    step = np.abs(blocks).max(-1, keepdims=True) / 127
    whole = np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
    return (whole * step).reshape(len(x), -1)[:, : x.shape[1]]


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 16])
@pytest.mark.parametrize(("bits", "grouped"), [(8, False), (8, True), (4, True), (4, False)])
@pytest.mark.parametrize(("outputs", "inputs"), [(160, 96), (7, 33), (80, 20)])
def test_the_product_is_that_of_float64(rows, bits, grouped, outputs, inputs):
    values, scale = rounded(outputs, inputs, bits, grouped)
    x = np.random.default_rng(1).standard_normal((rows, inputs)).astype(np.float32)
    layer = QuantizedLinear(matrix(values, scale, bits))
    exact = native.kernel_fault() is not None
    wanted = (x if exact else rounded_by_blocks(x)).astype(np.float64) @ wide(values, scale).T
    found = layer(torch.from_numpy(x)).numpy()
    assert found.shape == (rows, outputs)
    # a value that lies between two steps may fall to either side in float32: one such step of one weight at most
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max() + 0.05 * scale.max() * (not exact)


def test_without_the_kernel_activations_stay_exact():
    values, scale = rounded(24, 64, 4, grouped=True)
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    found = quantized._plain(
        torch.from_numpy(x), pack_values(torch.from_numpy(values), 4), pack_scale(torch.from_numpy(scale)), 4, 24
    )
    wanted = x.astype(np.float64) @ wide(values, scale).T
    assert np.abs(found.numpy() - wanted).max() <= 1e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_the_same_bit_for_bit_whatever_stands_beside_it(bits):
    values, scale = rounded(200, 128, bits, grouped=bits == 4)
    layer = QuantizedLinear(matrix(values, scale, bits))
    x = torch.randn(23, 128, generator=torch.Generator().manual_seed(0))
    together = layer(x)
    if native.kernel_fault() is None:
        for row in range(23):
            assert torch.equal(layer(x[row : row + 1])[0], together[row])


@settings(max_examples=30, deadline=None)
@given(bits=st.sampled_from([4, 8]), outputs=st.integers(1, 40), inputs=st.integers(1, 80), seed=st.integers(0, 99))
def test_packing_gives_every_number_back(bits, outputs, inputs, seed):
    values, scale = rounded(outputs, inputs, bits, grouped=True, seed=seed)
    packed = pack_values(torch.from_numpy(values), bits)
    assert np.array_equal(unpack_values(packed, bits, outputs, inputs).numpy(), values)
    assert np.array_equal(unpack_scale(pack_scale(torch.from_numpy(scale)), outputs).numpy(), scale)
    assert packed.numel() * 8 == -(-outputs // 16) * 16 * -(-inputs // 32) * 32 * bits


def test_an_embedding_looks_up_and_projects_with_the_same_rows():
    values, scale = rounded(50, 40, 8, grouped=False)
    table = QuantizedEmbedding(matrix(values, scale, 8))
    ids = torch.tensor([[0, 49, 17], [16, 15, 0]])
    assert np.allclose(table(ids).numpy(), wide(values, scale)[ids.numpy()], rtol=1e-6, atol=0)
    x = np.random.default_rng(1).standard_normal((2, 40)).astype(np.float32)
    exact = native.kernel_fault() is not None
    wanted = (x if exact else rounded_by_blocks(x)) @ wide(values, scale).T
    assert np.abs(table.project(torch.from_numpy(x)).numpy() - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_a_bias_is_added_and_the_input_may_have_any_leading_shape_and_strides():
    values, scale = rounded(32, 64, 8, grouped=False)
    bias = torch.arange(32.0)
    with_bias = QuantizedLinear(matrix(values, scale, 8), bias)
    without = QuantizedLinear(matrix(values, scale, 8))
    x = torch.randn(2, 64, 3).transpose(1, 2)
    assert torch.equal(with_bias(x), without(x.contiguous()) + bias)
    assert with_bias(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(wrong):
    values, scale = rounded(16, 64, 8, grouped=False)
    x = torch.ones(1, 64)
    x[0, 40] = wrong
    assert not QuantizedLinear(matrix(values, scale, 8))(x).isfinite().any()


def test_compiled_code_takes_the_operation_as_it_is():
    values, scale = rounded(48, 64, 4, grouped=True)
    layer = QuantizedLinear(matrix(values, scale, 4))
    x = torch.randn(1, 64)
    # fullgraph refuses what it cannot trace
    compiled = torch.compile(lambda x: layer(x * 2) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x * 2) + 1)
    torch.library.opcheck(
        torch.ops.modicum.quantized_linear.default, (x, layer.packed, layer.scale, 4, 48), test_utils="test_faketensor"
    )


def test_sizes_that_do_not_belong_together_are_refused():
    values, scale = rounded(16, 64, 8, grouped=False)
    with pytest.raises(ValueError, match="scales"):
        QuantizedLinear(matrix(values, scale[:8], 8))
    with pytest.raises(ValueError, match="3 bits"):
        QuantizedLinear(matrix(values, scale, 3))


def test_a_compiler_that_fails_is_named_and_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    fault = native.kernel_fault.__wrapped__()
    assert fault is not None
    assert fault.startswith("false")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_a_killed_build_left_is_removed_by_a_later_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    left, new = (tmp_path / "modicum" / name for name in (".tmp-left", ".tmp-new"))
    for folder in (left, new):
        folder.mkdir(parents=True)
        (folder / "kernels.so").touch()
    long_ago = time.time() - 3600
    os.utime(left, (long_ago, long_ago))
    assert native.kernel_fault.__wrapped__() is not None
    assert not left.exists()
    assert new.exists(), "another process is at work there"


@pytest.mark.slow
def test_a_processor_without_vnni_multiplies_alike(tmp_path):
    if platform.machine() != "x86_64" or native.kernel_fault() is not None:
        pytest.skip("no kernel for this kind of processor: all other tests have run the same lines")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": "g++ -mno-avx512vnni"}
    chosen = "float64 or bit_for_bit or embedding or finite"
    command = [sys.executable, "-m", "pytest", __file__, "-k", chosen, "-m", "not slow", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert list(tmp_path.rglob("*.so"))
