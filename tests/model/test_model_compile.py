import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter

from modicum.model import Decoder


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def _own_compiler(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of compiled code of our own: in the shared one a killed process may have left half a library."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache_folder))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def packed(length: int) -> dict[str, torch.Tensor]:
    """Two rows: two documents each, the second row padded at its end."""
    documents = torch.zeros(2, length, dtype=torch.int32)
    documents[:, length // 3 :] = 1
    documents[1, -9:] = -1
    places = torch.arange(length).expand(2, length).clone()
    places[:, length // 3 :] -= length // 3
    return {"positions": places, "documents": documents}


def gradients(model: Decoder, run, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    run(ids, **packed(ids.shape[1])).square().mean().backward()
    return [weight.grad for weight in model.parameters()]


@pytest.mark.parametrize("impl", ["sdpa", "blocks"])
def test_the_training_pass_is_one_graph_with_documents_given(tiny, lively, some_ids, impl):
    model, ids = lively(tiny(qk_norm=True, attention_bias=True)), some_ids(2, 150)
    model.attention_impl = impl
    whole = torch.compile(model.hidden, fullgraph=True, backend="aot_eager")
    plain = gradients(model, model.hidden, ids)
    for ours, theirs in zip(gradients(model, whole, ids), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_all_layers_share_one_compiled_graph(tiny, lively, some_ids):
    model, plain = (lively(tiny(num_hidden_layers=5)) for _ in range(2))
    ids = some_ids(2, 150)
    counter = CompileCounter()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = gradients(model, model.hidden, ids)
    assert counter.frame_count == 1
    for ours, theirs in zip(compiled, gradients(plain, plain.hidden, ids), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("checkpointed", ["none", "selective", "full"])
def test_compiled_layers_give_the_gradients_of_plain_ones(tiny, lively, some_ids, checkpointed):
    model, plain, ids = lively(tiny(qk_norm=True)), lively(tiny(qk_norm=True)), some_ids(2, 150)
    names = list(model.state_dict())
    model.activation_checkpointing = checkpointed
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert list(model.state_dict()) == names  # no prefix of the compiler's
    compiled = gradients(model, model.hidden, ids)
    for ours, theirs in zip(compiled, gradients(plain, plain.hidden, ids), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_compiled_layers_compute_again_what_was_asked_for(tiny, lively, some_ids):
    def run_as_it_is(graph, _):
        return make_boxed_func(graph.forward)

    def count(graph, _):
        found.update(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=run_as_it_is, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    products, scores = {}, {}
    for what in ("none", "selective", "full"):
        torch._dynamo.reset()
        model, found = lively(tiny()), Counter()
        model.activation_checkpointing = what
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend=backend)
        gradients(model, model.hidden, some_ids(2, 150))
        products[what], scores[what] = found[torch.ops.aten.mm.default], found[torch.ops.aten.bmm.default]
    assert products["none"] == products["selective"] == 14
    assert products["full"] in (20, 21)  # the last one serves nothing
    assert scores["none"] < scores["selective"] == scores["full"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["none", "selective", "full"])
def test_what_dropout_drops_in_machine_code_is_dropped_in_the_backward_pass(tiny, lively, some_ids, what):
    """Its gradient is that of the loss, along a random direction, with the same units dropped."""
    model, ids = lively(tiny(attention_dropout=0.3, num_hidden_layers=1)).double().train(), some_ids(2, 40)
    model.activation_checkpointing = what
    for layer in model.model.layers:
        layer.compile(fullgraph=True)

    def loss():
        torch.manual_seed(3)
        return model.hidden(ids).square().mean()

    model.zero_grad()
    loss().backward()
    weights = [weight for weight in model.model.layers.parameters() if weight.dim() == 2]
    draw = torch.Generator().manual_seed(0)
    ways = [torch.randn(weight.shape, generator=draw, dtype=torch.float64) for weight in weights]
    slope = sum(float((weight.grad * way).sum()) for weight, way in zip(weights, ways, strict=True))
    step, ends = 1e-5, []
    for sign in (1, -2):
        with torch.no_grad():
            for weight, way in zip(weights, ways, strict=True):
                weight += sign * step * way
        ends.append(float(loss().detach()))
    # norms are computed in fp32; other units would change the slope by a fifth
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=5e-3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_equal_backward_passes_in_machine_code_on_two_threads_give_equal_bits(tiny, some_ids):
    model, plain = (Decoder(tiny(vocab_size=64, qk_norm=True, num_hidden_layers=1)) for _ in range(2))
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    ids = some_ids(2, 256, vocab=64)  # few ids, many places: every embedding row is added to often
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = set()
        for _ in range(20):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                grads = gradients(model, model.hidden, ids)
            seen.add(hashlib.sha256(b"".join(grad.numpy().tobytes() for grad in grads)).hexdigest())
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1
    for ours, theirs in zip(grads, gradients(plain, plain.hidden, ids), strict=True):
        assert (ours - theirs).norm() < 0.03 * theirs.norm()
