"""GGUF files that lie: each claim is refused by name, nothing is allocated for it, and nothing is written."""

import random
import re
import struct
import tracemalloc

import gguf
import gguf_models
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modicum.exchange import gguf_gate, import_checkpoint
from modicum.exchange.gguf_file import read_gguf
from modicum.exchange.gguf_weights import file_tensors
from modicum.exchange.gguf_writing import file_metadata, write_gguf
from modicum.model import Decoder
from modicum.store import UserError


@pytest.fixture(scope="module")
def whole(tokenizer, tmp_path_factory):
    """The bytes of a sound file."""
    file = tmp_path_factory.mktemp("whole") / "model.gguf"
    config = gguf_models.config(num_hidden_layers=1)
    weights = Decoder(config).state_dict()
    write_gguf(file, config, file_metadata(config, tokenizer, "f32"), file_tensors(weights, config, "f32"))
    return file.read_bytes()


@pytest.fixture
def refused(tmp_path):
    """A function: the refusal of a file of these bytes."""

    def refused(data):
        (tmp_path / "model.gguf").write_bytes(data)
        with pytest.raises(UserError) as told:
            import_checkpoint(tmp_path / "model.gguf", dialect="gguf", out=tmp_path / "ours")
        assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
        return str(told.value)

    return refused


def _with(whole, key, layout, *values):
    """The file with the value behind a key overwritten."""
    place = whole.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)
    return whole[:place] + struct.pack(layout, *values) + whole[place + struct.calcsize(layout) :]


def _tensor(whole, name, *, dimensions=None, shape=None, kind=None, offset=None):
    """The file with what it says of a tensor overwritten; its name stands in the tokens' list of none."""
    at = whole.rindex(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    old_dimensions, *old_shape = struct.unpack_from("<I2Q", whole, at)
    old_kind, old_offset = struct.unpack_from("<IQ", whole, at + 20)
    said = [dimensions or old_dimensions, *(shape or old_shape)]
    said += [old_kind if kind is None else kind, old_offset if offset is None else offset]
    return whole[:at] + struct.pack("<I2QIQ", *said) + whole[at + 32 :]


def test_a_sound_file_is_read(whole, tmp_path):
    (tmp_path / "model.gguf").write_bytes(whole)
    assert import_checkpoint(tmp_path / "model.gguf", dialect="gguf", out=tmp_path / "ours").tensors == 11


def test_a_file_cut_off_anywhere_is_refused(whole, tmp_path):
    places = random.Random(0).sample(range(len(whole) - 64), 60)
    for end in [0, 3, 4, 8, 23, 24, 40, *places]:
        (tmp_path / "model.gguf").write_bytes(whole[:end])
        with pytest.raises(UserError, match=r"model\.gguf: "):
            read_gguf(tmp_path / "model.gguf")


def test_changed_bytes_of_the_header_are_refused_or_harmless(whole, tmp_path):
    draw = random.Random(1)
    header = whole.rindex(b"output_norm.weight") + 40
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(header)] = draw.choice([0, 1, 8, 9, 127, 128, 255, draw.randrange(256)])
        (tmp_path / "model.gguf").write_bytes(data)
        try:
            found = read_gguf(tmp_path / "model.gguf")
        except UserError:
            continue
        assert all(place.start + place.size <= len(data) for place in found.tensors.values())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda d: b"PK" + d[2:], r"not a GGUF file \(it begins with b'PKUF'\)"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "GGUF version 1; versions 2 and 3 are read"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "its bytes are in the other order"),
        (lambda d: d[:8] + struct.pack("<Q", 2**60) + d[16:], "claims 1,152,921,504,606,846,976 tensors"),
        (lambda d: d[:16] + struct.pack("<Q", 2**63) + d[24:], "claims 9,223,372,036,854,775,808 keys"),
        (lambda d: d[:24] + struct.pack("<Q", 2**40) + d[32:], "claims 1,099,511,627,776 bytes of a key"),
        (lambda d: _with(d, "tokenizer.ggml.tokens", "<IIQ", 9, 8, 2**50), "items of tokenizer.ggml.tokens"),
        (lambda d: _with(d, "tokenizer.ggml.token_type", "<IIQ", 9, 9, 1), "is a list of kind 9, which is not read"),
        (lambda d: _with(d, "tokenizer.ggml.eos_token_id", "<I", 99), "eos_token_id is of kind 99"),
        (lambda d: _tensor(d, "output_norm.weight", dimensions=2**31), "has 2,147,483,648 dimensions"),
        (lambda d: _tensor(d, "token_embd.weight", kind=12), "token_embd.weight: of type q4_k; those that are read"),
        (lambda d: _tensor(d, "token_embd.weight", kind=77), "token_embd.weight: of type 77"),
        (lambda d: _tensor(d, "token_embd.weight", shape=(2**40, 2**40)), r"token_embd.weight: \[1099511627776, 109"),
        (lambda d: _tensor(d, "token_embd.weight", shape=(0, 384)), r"f32 has no shape \[384, 0\]"),
        (lambda d: _tensor(d, "token_embd.weight", shape=(33, 384), kind=8), r"q8_0 has no shape \[384, 33\]"),
        (lambda d: _tensor(d, "blk.0.ffn_up.weight", offset=2**50), "do not lie in"),
        (lambda d: _tensor(d, "blk.0.ffn_up.weight", offset=7), "do not lie in"),
        (lambda d: _tensor(d, "blk.0.ffn_up.weight", offset=0), "shares bytes with"),
        (lambda d: _tensor(d, "token_embd.weight", shape=(384, 64)), "vocab_size: 384, and the embedding has 64 rows"),
        (lambda d: d.replace(b"blk.0.ffn_up.weight", b"blk.7.ffn_up.weight"), "blk.0.ffn_up.weight: missing"),
        (lambda d: d.replace(b"blk.0.ffn_up.weight", b"blk.0.attn_q.weight", 1), "missing|twice"),
        (lambda d: _with(d, "llama.block_count", "<II", 4, 2**15), "asks for 32,768 layers"),
        (lambda d: _with(d, "llama.embedding_length", "<If", 6, 64.0), "embedding_length: expected a number, found 6"),
        (lambda d: d.replace(b"llama.feed_forward_length", b"llama.feed_forward_lXngth"), "forward_length: missing"),
        (lambda d: d.replace(b"qwen2", b"qwenX"), "pre-tokenizer 'qwenX'"),
        (lambda d: _with(d, "tokenizer.ggml.eos_token_id", "<II", 4, 2**31), "is no token's id"),
        (lambda d: d.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergeX"), "ggml.merges: expected a list"),
    ],
)  # fmt: skip
def test_a_lie_is_refused_by_its_name(change, word, whole, refused):
    assert re.search(word, refused(change(whole)))


ROGUE = "\x1b[2J\nwarn"  # clears a screen and begins a line; as long as blk.0.ffn, attention and eos_token
NAMED = f"{ROGUE}_up.weight"


def _renamed(whole):
    return whole.replace(b"blk.0.ffn_up.weight", NAMED.encode())


@pytest.mark.parametrize(
    "change",
    [
        _renamed,
        lambda d: _tensor(_renamed(d), NAMED, kind=77),
        lambda d: _tensor(_renamed(d), NAMED, shape=(0, 96)),
        lambda d: _tensor(_renamed(d), NAMED, offset=7),
        lambda d: _tensor(_renamed(d), NAMED, offset=0),
        lambda d: _tensor(_renamed(d), NAMED, dimensions=2**31),
        lambda d: d.replace(b"llama.attention.value_length", f"llama.{ROGUE}.value_length".encode()),
        lambda d: _with(
            d.replace(b"ggml.eos_token_id", f"ggml.{ROGUE}_id".encode()), f"tokenizer.ggml.{ROGUE}_id", "<I", 99
        ),
    ],
)
def test_what_a_file_calls_its_parts_does_nothing_to_a_terminal(change, whole, refused):
    told = refused(change(whole))
    assert "\x1b" not in told
    assert r"\x1b[2J\nwarn" in told
    assert not any(line.startswith("warn") for line in told.splitlines())


COUNTS = {"tensors": 8, "keys": 16, "a key's length": 24}


def _places(whole):
    """Where the header says how many or how long, by what it says it of."""
    found = dict(COUNTS)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
        found[f"items of {key}"] = whole.index(key.encode()) + len(key) + 8
    for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.chat_template"):
        found[f"length of {key}"] = whole.index(key.encode()) + len(key) + 4
    found["length of a token"] = found["items of tokenizer.ggml.tokens"] + 8
    found["length of a tensor's name"] = whole.rindex(b"output_norm.weight") - 8
    return found


def _peak(file):
    """The most that was allocated while a file was read or refused, and the refusal's lines."""
    tracemalloc.start()
    try:
        read_gguf(file)
        told = []
    except UserError as error:
        told = str(error).splitlines()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, told


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    claimed=st.integers(0, 2**64 - 1) | st.integers(0, 2**33) | st.sampled_from([2**24, 2**28, 2**31, 2**32, 2**63]),
)
def test_whatever_a_count_claims_little_is_allocated_for_it(data, claimed, whole, tmp_path):
    places = _places(whole)
    place = places[data.draw(st.sampled_from(sorted(places)))]
    changed = whole[:place] + struct.pack("<Q", claimed) + whole[place + 8 :]
    (tmp_path / "model.gguf").write_bytes(changed)
    with (tmp_path / "model.gguf").open("r+b") as file:
        file.truncate(2**29)  # so that a claim of a quarter of it has room, without a byte on the disk
    peak, told = _peak(tmp_path / "model.gguf")
    assert peak < 150 * 2**20
    assert len(told) <= 14
    assert all(len(line) < 400 for line in told)


@pytest.mark.parametrize(
    ("place", "word"),
    [
        ("length of general.architecture", "claims 268,435,456 bytes of general.architecture; more than 16,777,216"),
        ("length of a token", "claims 268,435,456 bytes of tokenizer.ggml.tokens; more than 16,777,216"),
        ("a key's length", "claims 268,435,456 bytes of a key; more than 1,024"),
        ("items of tokenizer.ggml.token_type", "items of tokenizer.ggml.token_type; more than 4,19"),
    ],
)
def test_a_text_of_256_megabytes_is_refused_in_a_line_though_the_file_has_room_for_it(place, word, whole, tmp_path):
    at = _places(whole)[place]
    with (tmp_path / "model.gguf").open("wb") as file:
        file.write(whole[:at] + struct.pack("<Q", 2**28) + whole[at + 8 :])
        file.truncate(2**31)
    peak, told = _peak(tmp_path / "model.gguf")
    assert len(told) == 1
    assert word in told[0]
    assert peak < 8 * 2**20


def test_a_header_without_an_end_is_refused(whole, tmp_path):
    key = struct.pack("<Q", 3) + b"x.%d" + struct.pack("<IQ", 8, 2**23)
    with (tmp_path / "model.gguf").open("wb") as file:
        file.write(whole[:16] + struct.pack("<Q", 40))
        for number in range(9):
            file.write(key.replace(b"%d", b"%d" % number))
            file.seek(2**23, 1)
        file.truncate(2**29)
    peak, told = _peak(tmp_path / "model.gguf")
    assert told == [f"{tmp_path / 'model.gguf'}: its header goes beyond 64 MiB; no model's does"]
    assert peak < 200 * 2**20


def test_numbers_that_are_none_are_refused(whole, refused):
    data = bytearray(whole)
    data[-64 * 4 :] = np.full(64, np.nan, "<f4").tobytes()
    assert "output_norm.weight: holds NaN or infinity" in refused(bytes(data))


def test_what_may_change_the_model_and_is_not_known_is_refused(whole, refused):
    changed = whole.replace(b"llama.attention.value_length", b"llama.attention.sliding_wind")
    assert "attention.sliding_wind: not known here" in refused(changed)


def test_the_gate_refuses_a_file_that_llama_cpp_cannot_load(whole, tmp_path):
    (tmp_path / "model.gguf").write_bytes(whole[:5000])
    with pytest.raises(UserError, match=r"the file: llama\.cpp does not load the file\n  .*error"):
        gguf_gate.ask(tmp_path / "model.gguf", name="the file")


def test_a_key_of_a_float_comes_as_the_decimal_that_was_meant(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("x", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf(tmp_path / "x.gguf").values["llama.attention.layer_norm_rms_epsilon"] == 1e-5
