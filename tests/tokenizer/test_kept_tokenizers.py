"""Tokenizers of other models, kept as they came: ids, roles and special tokens are those that transformers finds."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from modicum.store import UserError
from modicum.tokenizer import load_tokenizer

LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>"]
LLAMA3 += ["<|end_header_id|>", "<|eot_id|>"]
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
KINDS = {
    # special tokens, and what stands around a text; tokenizer_config.json; template; what stands before a text, eos,
    # pad and end of turn
    "llama3": (
        (LLAMA3, "<|begin_of_text|> $A"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        LLAMA3_TEMPLATE,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|eot_id|>"],
    ),
    "qwen": (
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None),
        {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        None,  # ChatML: it has the tokens
        ["<|im_end|>", "<|im_end|>", "<|endoftext|>", "<|im_end|>"],
    ),
    "smollm2": (
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None),
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"},
        None,
        ["<|im_end|>", "<|im_end|>", "<|endoftext|>", "<|im_end|>"],
    ),
    "gpt2": (
        (["<|endoftext|>"], None),
        {t: {"__type": "AddedToken", "content": "<|endoftext|>"} for t in ("bos_token", "eos_token", "unk_token")},
        None,
        ["<|endoftext|>"] * 4,
    ),
    "with unk": (
        (["<unk>", "<s>", "</s>", "[PAD1]"], "<s> $A </s>"),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "{% for m in messages %}{{ '[' + m.role + ']\n' + m.content }}"
        "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}",
        ["<s>", "</s>", "<unk>", "</s>"],
    ),
}


def byte_level(texts, special, size=397, around=None):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(texts[:50], trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet))
    backend.add_special_tokens(special)
    if around:
        ids = [(token, backend.token_to_id(token)) for token in around.split() if token != "$A"]
        backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    return backend


def write(folder, backend, settings, template=None):
    (folder / "tokenizer.json").write_text(backend.to_str(), "utf-8")
    if settings is not None:
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps({**kind, **settings}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def kept(request, texts, tmp_path_factory):
    """(tokenizer, the folder it came from, the names of its roles)"""
    (special, around), settings, template, names = KINDS[request.param]
    backend = byte_level(texts, special, around=around)
    folder = write(tmp_path_factory.mktemp("kept"), backend, settings, template)
    return load_tokenizer(folder, missing="keep"), folder, names


def test_ids_and_roles_are_those_the_files_name(kept, texts):
    tokenizer, folder, names = kept
    peer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.vocab_size == len(peer)
    for text in (*texts[:5], "", " a\tb\r\n", "<s> <|im_end|> </s> <|eot_id|>", "é日本🙂\0"):
        plain = peer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == plain or tokenizer.special_ids.intersection(plain)
        assert not tokenizer.special_ids.intersection(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    roles = [tokenizer.bos_id, tokenizer.eot_id, tokenizer.pad_id, tokenizer.end_of_turn_id]
    assert roles == [peer.convert_tokens_to_ids(name) for name in names]


def test_what_is_saved_has_the_same_special_tokens_for_transformers_and_loads_as_the_same(kept, tmp_path):
    tokenizer, folder, names = kept
    tokenizer.save(tmp_path)
    before, after = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path)
    assert (after.bos_token, after.eos_token, after.unk_token) == (before.bos_token, before.eos_token, before.unk_token)
    assert after.pad_token == names[2]
    for text in ("Some text, twice.", "", " a\tb"):
        assert after(text).input_ids == before(text).input_ids
        assert after(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert after.num_special_tokens_to_add() == before.num_special_tokens_to_add()
    again = load_tokenizer(tmp_path, missing="keep")
    assert (again.hash, again.chat_template) == (tokenizer.hash, tokenizer.chat_template)
    assert (again.bos_id, again.eot_id, again.pad_id) == (tokenizer.bos_id, tokenizer.eot_id, tokenizer.pad_id)
    assert again.end_of_turn_id == tokenizer.end_of_turn_id
    again.save(tmp_path / "again")
    for file in (tmp_path / "again").iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()


def test_conversations_are_rendered_as_transformers_does_with_its_own_token_names(kept):
    tokenizer, folder, _ = kept
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "é"},
    ]
    if tokenizer.chat_template is None:
        with pytest.raises(UserError, match=r"no chat template.*name one \(chat.template:"):
            tokenizer.render(messages)
        return
    peer = AutoTokenizer.from_pretrained(folder)
    peer.chat_template = tokenizer.chat_template
    for prompt in (False, True):
        expected = peer.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
        assert tokenizer.render(messages, add_generation_prompt=prompt).ids == expected
    rendered = tokenizer.render(messages)
    supervised = [i for i, mine in zip(rendered.ids, rendered.assistant_mask, strict=True) if mine]
    assert supervised == [*tokenizer.encode("Yes"), tokenizer.end_of_turn_id]
    assert tokenizer.decode(rendered.ids) == rendered.text


def test_our_own_tokenizer_is_the_same_when_it_is_kept(tokenizer, folder):
    kept = load_tokenizer(folder, missing="keep")
    assert kept.hash == tokenizer.hash == load_tokenizer(folder).hash
    assert kept.bos_id == kept.eot_id == tokenizer.eot_id
    assert (kept.pad_id, kept.end_of_turn_id) == (1, 3)


def test_the_end_of_a_turn_is_what_the_template_writes_there(tokenizer, folder):
    turn = "{% for m in messages %}{{ m.role + ':\n' + m.content + 'END' }}{% endfor %}"
    turn += "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    for end in ("<|im_end|>", "<|endoftext|>", "<|reserved_3|>"):
        own = load_tokenizer(folder, template=turn.replace("END", end), missing="keep")
        assert own.end_of_turn_id == own.encode_with_control(end)[0]
    assert load_tokenizer(folder, template=turn.replace("END", "."), missing="keep").end_of_turn_id == own.eot_id
    wants_more = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    assert load_tokenizer(folder, template=wants_more, missing="keep").end_of_turn_id == tokenizer.end_of_turn_id


def test_a_foreign_tokenizer_that_is_extended_ends_its_turns_as_its_own_template_does(texts, tmp_path):
    byte_level(texts, LLAMA3).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": LLAMA3[0], "eos_token": LLAMA3[1]}))
    (tmp_path / "chat_template.jinja").write_text(LLAMA3_TEMPLATE.replace("{{ bos_token }}", LLAMA3[0]))
    extended = load_tokenizer(tmp_path, missing="extend")
    assert extended.end_of_turn_id == extended.encode_with_control("<|eot_id|>")[0]


def test_what_a_file_does_not_flag_as_special_is_text_of_an_answer(texts, tmp_path):
    unflagged = ["<think>", "</think>", "<|im_start|>"]
    special = ["<|endoftext|>", "<|im_end|>", "<|fim|>"]
    backend = json.loads(byte_level(texts, [*special, *unflagged, "<tool_call>"]).to_str())
    for entry in backend["added_tokens"]:
        entry["special"] = entry["content"] not in unflagged
    backend = tokenizers.Tokenizer.from_str(json.dumps(backend))
    tokenizer = load_tokenizer(write(tmp_path, backend, {"eos_token": "<|im_end|>"}), missing="keep")
    spoken = {tokenizer.id_bytes(token).decode() for token in tokenizer.spoken_ids}
    assert spoken == {"<think>", "</think>", "<tool_call>"}
    peer = AutoTokenizer.from_pretrained(tmp_path)
    thought = tokenizer.encode_with_control("<think>so</think>yes<|im_end|>")
    assert peer.decode(thought, skip_special_tokens=True) == "<think>so</think>yes"
    assert tokenizer.encode("<think>") != thought[:1], "text from outside never becomes one"


THINKING = (
    "{% for m in messages %}{% set said = m.content %}{% if m.role == 'assistant' and '</think>' in said %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# as Qwen3's: thoughts may come in a field of their own, and those of the last answer are written
WRITING = THINKING.replace(
    "'\n' + said",
    "'\n' + ('<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content and loop.last else '') + said",
)


@pytest.mark.parametrize("template", [THINKING, WRITING])
def test_thoughts_of_past_answers_are_cut_off_by_the_template_as_in_transformers(texts, tmp_path, template):
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    backend = json.loads(byte_level(texts, special).to_str())
    for entry in backend["added_tokens"]:
        entry["special"] = "think" not in entry["content"]
    backend = tokenizers.Tokenizer.from_str(json.dumps(backend))
    tokenizer = load_tokenizer(write(tmp_path, backend, {"eos_token": "<|im_end|>"}, template), missing="keep")
    peer, end = AutoTokenizer.from_pretrained(tmp_path), tokenizer.encode_with_control("</think>")[0]
    question = {"role": "user", "content": "Say </think> twice"}
    for thought in ("\nso it is\n</think>\n\n", "<think>\nso </think> it is\n</think>\n\n", "<think>cut off", ""):
        messages = [question, {"role": "assistant", "content": f"{thought}Yes"}, {"role": "user", "content": "Why?"}]
        rendered = tokenizer.render(messages, add_generation_prompt=True, masked=False)
        assert rendered.text == peer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert end not in rendered.ids, "a user's is text"
    if template == WRITING:
        answer = {"role": "assistant", "content": "<think>\nso\n</think>\n\nYes"}
        last = tokenizer.render([question, answer], masked=False)
        assert last.text.endswith("assistant\n<think>\nso\n</think>\n\nYes<|im_end|>\n")
        assert last.ids.count(end) == 1, "the template's own is meant"


def test_a_size_with_gaps_is_kept_and_an_empty_id_is_nothing(texts, tmp_path):
    backend = json.loads(byte_level(texts, ["<|endoftext|>"]).to_str())
    backend["added_tokens"][0]["id"] = 410
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json", missing="keep")
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (411, 410)
    assert tokenizer.id_bytes(405) == b""
    assert tokenizer.decode([405]) == ""
    assert 0 < max(tokenizer.encode(texts[0])) < 397


def test_roles_change_the_hash_and_only_what_they_decide_does(texts, tmp_path):
    backend = byte_level(texts, ["<s>", "</s>", "<p>"])
    hashes = []
    for around, roles in (
        ("<s> $A", {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<p>"}),
        ("$A", {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<p>"}),
        ("$A </s>", {"eos_token": "</s>", "pad_token": "<p>"}),
        ("</s> $A", {"eos_token": "</s>", "bos_token": "</s>", "pad_token": "<p>"}),
        ("<s> $A", {"eos_token": "<s>", "bos_token": "<s>", "pad_token": "<p>"}),
        ("<s> $A", {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<s>"}),
    ):
        ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
        hashes.append(load_tokenizer(write(tmp_path, backend, roles), missing="keep").hash)
    assert hashes[1] == hashes[2] == hashes[3]
    assert len(set(hashes)) == 4


@pytest.mark.parametrize(
    ("processor", "before", "after"),
    [
        (processors.ByteLevel(trim_offsets=True), None, None),
        (processors.BertProcessing(("</s>", 398), ("<s>", 397)), "<s>", "</s>"),
        (
            processors.Sequence(
                [
                    processors.ByteLevel(),
                    processors.TemplateProcessing(single="<x> $A", special_tokens=[("<x>", 399)]),
                ]
            ),
            "<x>",
            None,
        ),
    ],
)
def test_what_stands_around_a_text_is_what_any_post_processor_puts_there(processor, before, after, texts, tmp_path):
    backend = byte_level(texts, ["<s>", "</s>", "<x>"])
    backend.post_processor = processor
    settings = {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": before is None}
    tokenizer = load_tokenizer(write(tmp_path, backend, settings), missing="keep")
    assert (tokenizer.roles.opens, tokenizer.roles.closes) == (before, after)
    assert tokenizer.bos_id == backend.token_to_id(before or "</s>")
    tokenizer.save(tmp_path / "saved")
    one, other = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path, tmp_path / "saved"))
    assert one("a b").input_ids == other("a b").input_ids == backend.encode("a b").ids
    assert other("a", "b").input_ids == [*backend.encode("a").ids, *backend.encode("b").ids]


@pytest.mark.parametrize(
    ("around", "number", "fault"),
    [
        ("<s> </s> $A", 397, "makes 3 tokens of a text of one"),
        ("<s> $A $A", 397, "makes 3 tokens of a text of one"),
        ("<s>", 397, "makes 1 tokens of a text of one"),
        ("<s> $A", 700, "adds the id 700, which no token has"),
    ],
)
def test_what_cannot_stand_around_a_text_is_refused(around, number, fault, texts, tmp_path):
    backend = byte_level(texts, ["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[("<s>", number), ("</s>", 398)]
    )
    with pytest.raises(UserError, match=f"tokenizer.json: its post_processor {fault}"):
        load_tokenizer(write(tmp_path, backend, {"eos_token": "</s>"}), missing="keep")


def test_a_token_with_a_role_is_a_control_token_however_it_is_flagged(texts, tmp_path):
    backend = byte_level(texts, [])
    backend.add_tokens(["END", "MID"])
    folder = write(tmp_path, backend, {"eos_token": "END"})
    tokenizer = load_tokenizer(folder, missing="keep")
    assert tokenizer.special_ids == {tokenizer.eot_id}
    assert tokenizer.eot_id not in tokenizer.encode("the END")
    assert backend.token_to_id("MID") in tokenizer.encode("the MID")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"eos_token": "</t>"}, r"names eos_token '</t>', which it has no id for"),
        ({"eos_token": "</s>", "bos_token": "a b"}, r"names bos_token 'a b'"),
        ({"eos_token": 7}, r"eos_token: expected a token, found 7"),
        ({}, r"nothing says which token ends a text; name it as eos_token"),
        (None, r"nothing says which token ends a text"),
        ({"eos_token": "on"}, r"a merge makes or uses a control token"),
    ],
)
def test_roles_that_cannot_be_filled_are_one_clear_error(texts, tmp_path, settings, fault):
    folder = write(tmp_path, byte_level(texts, ["<s>", "</s>"]), settings)
    with pytest.raises(UserError, match=fault) as error:
        load_tokenizer(folder, missing="keep")
    assert "tokenizer.json: " in str(error.value)


def test_a_template_that_cannot_write_an_answer_leaves_the_end_of_a_turn_to_the_end_of_text(texts, tmp_path):
    folder = write(tmp_path, byte_level(texts, ["<s>", "</s>"]), {"eos_token": "</s>"}, "{{ raise_exception('no') }}")
    tokenizer = load_tokenizer(folder, missing="keep")
    assert tokenizer.end_of_turn_id == tokenizer.eot_id
    with pytest.raises(UserError, match="no"):
        tokenizer.render([{"role": "user", "content": "a"}])


JUNK = st.none() | st.booleans() | st.integers(-2, 500) | st.sampled_from(["", "<s>", "</s>", "\ud800", "on"])
JUNK |= st.fixed_dictionaries({"content": st.sampled_from(["<s>", "", None, 3]), "special": st.booleans()})


AROUND = [{kind: {"id": name, "type_id": 0}} for kind in ("SpecialToken", "Sequence") for name in ("A", "<s>", "</s>")]


def processor(parts):
    tokens = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in (("<s>", 397), ("</s>", -1))}
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": tokens}


@pytest.fixture(scope="module")
def backend(texts):
    return json.loads(byte_level(texts, ["<s>", "</s>"]).to_str())


@given(
    config=st.dictionaries(st.sampled_from(["bos_token", "eos_token", "pad_token", "unk_token", "chat_template"]), JUNK)
    | JUNK,
    change=st.dictionaries(st.sampled_from(["id", "content", "special", "normalized", "lstrip"]), JUNK),
    around=st.none() | JUNK | st.lists(st.sampled_from(AROUND), max_size=3).map(processor),
)
@settings(max_examples=80, deadline=None)
def test_any_settings_beside_a_tokenizer_load_or_are_one_clear_error(backend, tmp_path_factory, config, change, around):
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    added = [{**backend["added_tokens"][0], **change}, *backend["added_tokens"][1:]]
    content = {**backend, "added_tokens": added, "post_processor": around}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        tokenizer = load_tokenizer(folder, missing="keep")
    except UserError:
        return
    assert {tokenizer.bos_id, tokenizer.eot_id, tokenizer.pad_id} <= tokenizer.special_ids
    assert not tokenizer.special_ids.intersection(tokenizer.encode("<s></s> on"))
