"""What the file does in the wheel's own server, by its public interface and default settings."""

import json
import subprocess
import sys

import gguf_models
import pytest

from modicum.exchange import export_gguf

SERVE = """
import json, sys
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_gpu_layers, params.warmup = sys.argv[1], 512, 0, False
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
answers = []
for messages in json.loads(sys.argv[2]):
    answer = server.handle_chat_completions({"messages": messages, "max_tokens": 4, "temperature": 0})
    answers.append(json.loads(answer) if isinstance(answer, (str, bytes)) else answer)
print(json.dumps(answers))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("brief_gate")
def test_its_chats_are_prompted_with_as_many_tokens_as_ours(tokenizer, tmp_path):
    export_gguf(gguf_models.save(tokenizer, tmp_path, max_position_embeddings=512), out=tmp_path / "out")
    asked = {"role": "user", "content": "Who are you?"}  # its server takes names of control tokens for such
    chats = [
        [asked],
        [{"role": "system", "content": "Be brief.\n"}, asked],
        [asked, {"role": "assistant", "content": "  A model. "}, {"role": "user", "content": "é 1\t2"}],
    ]
    command = [sys.executable, "-c", SERVE, str(tmp_path / "out" / "model-f32.gguf"), json.dumps(chats)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    answers = json.loads(ended.stdout.splitlines()[-1])
    ours = [len(tokenizer.render(messages, add_generation_prompt=True).ids) for messages in chats]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == ours
