"""A step of decoding, one token more for each of a few sequences: where it is done, and in which way it is fastest.

On a CPU in one call of a kernel of ours, kernels/decode_step.cpp: PyTorch's operations take as long to be called as to
run, and give other bits for one row than for several. Elsewhere by the decoder's own operations, compiled or as they
are.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from modicum.model.block import DecoderBlock
from modicum.model.decoder import Decoder
from modicum.model.linear import Embedding, Linear
from modicum.model.native import kernel_fault
from modicum.model.quantized import QuantizedEmbedding, QuantizedLinear
from modicum.model.slots import SlotCache, advance

Step = Callable[[Tensor, Tensor, Tensor, int], Tensor]

_SCHEMA = (
    "decode_step(Tensor x, Tensor[] weights, int[] bits, int[] sizes, float eps, Tensor(a!)[] keys, "
    "Tensor(b!)[] values, Tensor cos, Tensor sin, Tensor slots, Tensor places) -> Tensor"
)
_LIBRARY = torch.library.Library("modicum", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(_SCHEMA)  # type: ignore[no-untyped-call]


def make_step(model: Decoder, cache: SlotCache, *, compiled: bool) -> Step:
    """step(ids_R, slots_R, places_R, attended) -> logits (R, V) float32; arguments as for `advance`, int64.

    compiled: in the kernel or through torch.compile, where there is either; the first may be made here, in seconds, the
    second when the step is first called with one row, and with several.
    """
    # rounded matrices say nothing about the type of the cache, which the kernel has in these two
    held = cache.keys[0].dtype in (torch.float32, torch.bfloat16) and cache.keys[0].device.type == "cpu"
    if compiled and held and _known(model) and kernel_fault() is None:
        return _kernel_step(model, cache)

    def step(ids_R: Tensor, slots_R: Tensor, places_R: Tensor, attended: int) -> Tensor:
        return model.head(advance(model, ids_R, cache, slots_R, places_R, attended)).float()

    # on a CPU without a kernel there is no compiler for torch.compile either
    wanted = compiled and cache.keys[0].device.type != "cpu"
    return torch.compile(step, dynamic=True, fullgraph=True) if wanted else step


def _known(model: Decoder) -> bool:
    """Whether every part is of a kind that the kernel has; an adapter, say, is not."""
    for block in model.model.layers:
        q, k, v, o, gate, up, down = map(_kind, _matrices(block))
        # those that take the same input are multiplied together
        if None in (o, down) or len({q, k, v}) > 1 or len({gate, up}) > 1:
            return False
    return _kind(_head(model)) is not None


def _kind(part: nn.Module) -> torch.dtype | None:
    """The type of a matrix, int8 for all that are rounded; None for what the kernel does not have."""
    if type(part) in (QuantizedLinear, QuantizedEmbedding):
        return torch.int8
    if not isinstance(part, Linear | Embedding) or type(part) not in (Linear, Embedding):
        return None
    dtype: torch.dtype = part.weight.dtype
    return dtype if dtype in (torch.float32, torch.bfloat16) else None


def _head(model: Decoder) -> nn.Module:
    return model.model.embed_tokens if model.lm_head is None else model.lm_head


def _matrices(block: nn.Module) -> tuple[nn.Module, ...]:
    assert isinstance(block, DecoderBlock)
    attention, mlp = block.self_attn, block.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )


def _kernel_step(model: Decoder, cache: SlotCache) -> Step:
    body, config, none = model.model, model.config, torch.empty(0)
    weights: list[Tensor] = []
    bits: list[int] = []

    def matrix(part: nn.Module) -> None:
        if isinstance(part, QuantizedLinear | QuantizedEmbedding):
            weights.extend((part.packed, part.scale))
            bits.append(part.bits)
        else:
            assert isinstance(part, Linear | Embedding)
            weights.extend((part.weight.detach().contiguous(), none))
            bits.append(0)
        bias = getattr(part, "bias", None)
        weights.append(none if bias is None else bias.detach().float())

    for block in body.layers:
        assert isinstance(block, DecoderBlock)
        attention = block.self_attn
        for norm in (block.input_layernorm, block.post_attention_layernorm, attention.q_norm, attention.k_norm):
            weights.append(none if norm is None else norm.weight.detach().float())
        for part in _matrices(block):
            matrix(part)
    weights.append(body.norm.weight.detach().float())
    matrix(_head(model))
    sizes = [config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size]
    sizes += [config.vocab_size, int(config.rotary_layout == "interleaved")]
    cos, sin = (table[0, 0].contiguous() for table in body.rotary.table(torch.arange(cache.capacity + 1)[None]))

    def step(ids_R: Tensor, slots_R: Tensor, places_R: Tensor, attended: int) -> Tensor:  # noqa: ARG001  places say it
        x_RD = body.embed_tokens(ids_R).float()
        out: Tensor = torch.ops.modicum.decode_step(
            x_RD, weights, bits, sizes, config.rms_norm_eps, cache.keys, cache.values, cos, sin, slots_R, places_R
        )
        return out

    return step
