"""Torch files that mean harm: each refused by name, nothing executed, nothing allocated, nothing written."""

import contextlib
import io
import json
import os
import pickle
import re
import struct
import tracemalloc
import warnings
import zipfile

import foreign_models
import pytest
import torch
from hostile_files import archive, mapping, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from modicum.exchange import import_checkpoint
from modicum.exchange.torch_file import read_torch_file
from modicum.store import UserError


class Command:
    """What a pickle calls when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Allowed:
    """A class that a program around us declared safe."""


@pytest.fixture
def refused(tmp_path):
    """A function: the message that importing this file ends with; nothing may be written."""

    def refused(path, dialect="core"):
        with pytest.raises(UserError) as error:
            import_checkpoint(path, dialect=dialect, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".tmp-*"))
        return str(error.value)

    return refused


@pytest.mark.parametrize("place", ["config", "model_state", "beside"])
def test_a_pickle_that_would_run_a_command_is_named_and_does_not_run(place, foreign, refused, tmp_path):
    command = Command(os.system, f"touch {tmp_path / 'ran'}")

    def content(weights, values):
        whole = {"model_state": weights, "config": values, "beside": 1}
        if place == "model_state":
            return {**whole, "model_state": {**weights, "x": command}}
        return {**whole, place: command}

    path, _ = foreign("core", content=content)
    assert "model.pt: would call posix.system" in refused(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("function", [eval, exec, __import__, getattr, open])
def test_no_function_of_python_is_called(function, foreign, refused, tmp_path):
    def content(weights, values):
        command = Command(function, f"open({str(tmp_path / 'ran')!r}, 'w')")
        return {"model_state": weights, "config": {**values, "x": command}}

    path, _ = foreign("core", content=content)
    assert re.search(rf"would call (__builtin__|io)\.{function.__name__};", refused(path))
    assert not (tmp_path / "ran").exists()


def test_names_that_a_newer_pickle_puts_together_are_refused_too(foreign, refused, tmp_path):
    path, _ = foreign("core")
    command = pickle.dumps({"x": Command(os.system, f"touch {tmp_path / 'ran'}")}, protocol=4)
    archive(path, command[2:-1])
    assert "would call what its STACK_GLOBAL names" in refused(path)
    assert not (tmp_path / "ran").exists()


def test_what_the_program_around_us_allowed_stays_refused(foreign, refused):
    with torch.serialization.safe_globals([Allowed]):
        path, _ = foreign(
            "core", content=lambda weights, values: {"model_state": weights, "config": {**values, "x": Allowed()}}
        )
        assert "would call" in refused(path)
        assert "Allowed" in refused(path)


@pytest.mark.parametrize("call", [b"ctorch\nFloatTensor\n", b"c__builtin__\nbytearray\n"])
def test_a_call_that_only_takes_memory_is_refused(call, refused, foreign):
    path, _ = foreign("core")
    archive(path, mapping({"model_state": call + b"(\x8a\x06\0\0\0\0\0\x10tR"}))
    assert "would call" in refused(path)


def test_a_compressed_member_is_refused_by_what_it_claims_to_unpack_to(foreign, refused):
    path, _ = foreign("core")
    weights = mapping({"model_state": mapping({"embedding.weight": tensor((4,), (1,), elements=1 << 24)})})
    archive(path, weights, compression=zipfile.ZIP_DEFLATED, data=bytes(1 << 26))
    assert path.stat().st_size < 1 << 17
    tracemalloc.start()
    message = refused(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "is compressed, which torch.save never does" in message
    assert peak < 1 << 22


def test_a_stored_member_that_claims_more_than_the_file_has_is_refused(foreign, refused):
    path, _ = foreign("core")
    data = bytearray(path.read_bytes())
    place = data.rindex(b"/data/0") - 46 - len("model")  # the member's entry in the directory at the end
    assert data[place : place + 4] == b"PK\x01\x02"
    data[place + 20 : place + 28] = struct.pack("<II", 1 << 30, 1 << 30)
    path.write_bytes(data)
    assert "claim more bytes than the file has" in refused(path)


def test_two_archives_in_one_file_are_refused(foreign, refused):
    path, _ = foreign("core")
    path.write_bytes(path.read_bytes() + path.read_bytes())
    assert "do not begin where it does" in refused(path)


@pytest.mark.parametrize("name", ["data.pkl", "DATA.PKL", "other/data.pkl"])
def test_a_second_pickle_is_refused(name, foreign, refused):
    path, _ = foreign("core")
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as file:
        warnings.simplefilter("ignore")
        file.writestr(f"model/{name}", b"\x80\x02N.")
    assert "one data.pkl, and no name twice" in refused(path)


def write_config(path):
    (path.parent / "config.json").write_text(json.dumps(foreign_models.config("core", 384)))


@pytest.mark.parametrize(
    ("shape", "strides", "elements"),
    [
        ((2**62,), (1,), 4),
        ((2**62,), (0,), 4),
        ((2**40,), (1,), 2**40),
        ((2**31, 2**31), (2**31, 1), 4),
    ],
)
def test_an_absurd_shape_is_named_and_nothing_is_allocated(shape, strides, elements, foreign, refused):
    path, _ = foreign("core")
    filling = {f"filling.{number}": tensor((1,), (1,), elements=1) for number in range(3)}
    archive(path, mapping({"embedding.weight": tensor(shape, strides, elements=elements), **filling}))
    write_config(path)
    message = refused(path)
    assert f"embedding.weight: has shape {list(shape)}, the config asks for [384, 48]" in message


def test_a_shape_beyond_all_numbers_is_refused(foreign, refused):
    path, _ = foreign("core")
    archive(path, mapping({"embedding.weight": tensor((2**62, 2**62), (0, 0), elements=4)}))
    assert "model.pt: cannot be read as weights alone" in refused(path)


def test_tensors_that_share_one_small_storage_do_not_become_a_large_model(foreign, refused):
    path, weights = foreign("core")
    write_config(path)
    claims = {name: tensor(weight.shape, [0] * weight.dim(), elements=4) for name, weight in weights.items()}
    archive(path, mapping(claims))
    assert "its tensors share their memory" in refused(path)


@pytest.mark.parametrize("way", ["one tensor", "a part", "spread"])
def test_weights_that_share_their_memory_are_refused_by_name_however_large_the_file_is(way, foreign, refused):
    q, k = "layers.1.attn.q_proj.weight", "layers.1.attn.k_proj.weight"

    def content(weights, values):
        if way == "one tensor":
            weights[k] = weights[q]
        elif way == "a part":
            both = torch.randn(49, 48)
            weights[q], weights[k] = both[:48], both[1:]
        else:
            weights[k] = torch.randn(48, 1).expand(48, 48)
        return {"model_state": weights, "config": values, "optimizer": torch.zeros(10**6)}

    path, _ = foreign("core", content=content)
    message = refused(path)
    assert "model.pt: weights that share their memory; save each as a tensor of its own" in message
    wanted = {"one tensor": f"{k} and {q}", "a part": f"{q} and {k}", "spread": f"{k} and itself"}
    assert message.splitlines()[1:] == [f"  {wanted[way]}"]


def test_weights_that_are_parts_of_one_buffer_share_nothing(foreign, tmp_path):
    def content(weights, values):
        buffer = torch.cat([weight.flatten() for weight in weights.values()])
        parts = buffer.split([weight.numel() for weight in weights.values()])
        views = {name: part.view(weights[name].shape) for name, part in zip(weights, parts, strict=True)}
        return {"model_state": views, "config": values}

    path, weights = foreign("core", content=content)
    import_checkpoint(path, dialect="core", out=tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["model.norm.weight"], weights["norm.weight"])


def test_a_claim_that_the_file_does_not_hold_is_refused_when_it_is_read(foreign, refused):
    path, weights = foreign("core")
    write_config(path)
    claims = {name: tensor(weight.shape, weight.stride(), elements=weight.numel()) for name, weight in weights.items()}
    archive(path, mapping(claims), data=bytes(sum(weight.nbytes for weight in weights.values()) - 4 * 384 * 48))
    assert "model.pt" in refused(path)


def test_lists_that_hold_each_other_are_named_in_a_line(foreign, refused):
    endless = ["x"]
    for _ in range(30):
        endless = [endless] * 10
    path, _ = foreign(
        "core", content=lambda weights, values: {"model_state": weights, "config": {**values, "vocab_size": endless}}
    )
    assert max(map(len, refused(path).splitlines())) < 400


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99, -1])
def test_a_file_that_was_cut_off_is_refused(keep, foreign, refused):
    path, _ = foreign("core")
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    assert "model.pt: not a whole file of torch.save's" in refused(path)


def test_a_file_of_before_zip_says_how_to_mend_it(foreign, refused, tmp_path):
    path, weights = foreign("core")
    torch.save({"model_state": weights}, path, _use_new_zipfile_serialization=False)
    assert "must be loaded and saved again with a newer one" in refused(path)
    path.write_bytes(pickle.dumps(Command(os.system, f"touch {tmp_path / 'ran'}")))
    assert "not a whole file of torch.save's" in refused(path)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_larger_than_any_models_is_not_read(foreign, refused, monkeypatch):
    path, _ = foreign("core")
    monkeypatch.setattr("modicum.exchange.torch_file._LARGEST_PICKLE", 1000)
    assert "its data.pkl is larger than" in refused(path)


def test_a_program_is_no_checkpoint(foreign, refused):
    path, _ = foreign("core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    assert "a TorchScript program, not weights" in refused(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda weights, values: {"model_state": {**weights, "step": 7}, "config": values}, "'step' holds a int"),
        (lambda weights, values: {"model_state": list(weights), "config": values}, "expected a mapping"),
        (lambda _, values: {"model_state": {}, "config": values}, "expected a mapping"),
        (lambda weights, values: [weights, values], "expected a mapping with model_state and config"),
        (lambda weights, values: {"model_state": {7: weights["norm.weight"]}, "config": values}, "7 holds a Tensor"),
        (lambda weights, values: {"model_state": weights, "config": [values]}, "found list"),
        (lambda weights, values: {"model_state": weights, "config": {**values, "bias": "no"}}, "must be true or false"),
        (lambda weights, values: {"model_state": weights, "config": {**values, "extra": 1}}, "extra: unknown"),
        (lambda weights, _: {"model_state": weights}, "no config in it and no config.json beside it"),
    ],
)
def test_content_of_another_kind_is_refused(content, words, foreign, refused):
    path, _ = foreign("core", content=content)
    assert words in refused(path)


@pytest.mark.parametrize(
    "kind",
    [torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64],
)
def test_a_tensor_of_another_type_is_refused_by_name(kind, foreign, refused):
    def content(weights, values):
        return {"model_state": {**weights, "norm.weight": weights["norm.weight"].to(kind)}, "config": values}

    path, _ = foreign("core", content=content)
    message = refused(path)
    assert "norm.weight: is no plain tensor" in message or "would call torch.Complex" in message


def test_missing_left_over_and_misshapen_weights_are_listed_together(foreign, refused):
    def content(weights, values):
        weights = {**weights, "layers.0.attn.rel_bias": torch.ones(2), "norm.weight": torch.ones(47)}
        del weights["layers.1.attn.q_proj.weight"], weights["layers.2.mlp.up_proj.weight"]
        return {"model_state": weights, "config": values}

    path, _ = foreign("core", content=content)
    assert refused(path).splitlines()[1:] == [
        "  layers.1.attn.q_proj.weight: missing",
        "  layers.2.mlp.up_proj.weight: missing",
        "  layers.0.attn.rel_bias: left over, this model has no such weight",
        "  norm.weight: has shape [47], the config asks for [48]",
    ]


def test_names_of_another_dialect_are_all_listed(foreign, refused):
    def content(_, values):
        return {"model_state": foreign_models.state("cyberslm", 384), "config": values}

    path, _ = foreign("core", content=content)
    message = refused(path)
    assert "layers.2.ffn.val_proj.weight: left over" in message
    assert "layers.2.mlp.up_proj.weight: missing" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_named(value, foreign, refused):
    def content(weights, values):
        weights["layers.1.mlp.down_proj.weight"][3, 5] = value
        weights["norm.weight"][-1] = value
        return {"model_state": weights, "config": values}

    path, _ = foreign("core", content=content)
    message = refused(path)
    assert "layers.1.mlp.down_proj.weight: holds NaN or infinity" in message
    assert "norm.weight: holds NaN or infinity" in message


def test_a_tied_head_that_differs_from_the_embedding_is_refused(foreign, refused):
    def content(weights, values):
        return {"model_state": {**weights, "lm_head.weight": weights["embedding.weight"] * 2}, "config": values}

    path, _ = foreign("core", content=content)
    assert "lm_head.weight differs from the embedding, but the config says that they are tied" in refused(path)


SMALL = io.BytesIO()
torch.save({"model_state": {"a": torch.arange(6.0)}, "config": {"x": [1, 2.5, None, "y"]}}, SMALL)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.integers(0, len(SMALL.getvalue()) - 1), value=st.integers(0, 255), shapes=st.booleans())
def test_whatever_byte_is_changed_the_file_is_read_or_refused(place, value, shapes, tmp_path):
    data = bytearray(SMALL.getvalue())
    data[place] = value
    path = tmp_path / "changed.pt"
    path.write_bytes(data)
    with contextlib.suppress(UserError):
        read_torch_file(path, only_shapes=shapes)
