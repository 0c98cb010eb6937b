"""The passes of decoding over a cache of slots, where they are done, and in which way they are fastest.

On a CPU each is one call of a kernel of ours (kernels/): PyTorch's operations take as long to be called as to run, and
give other bits for one row than for several. Elsewhere by the decoder's own operations, compiled or as they are.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from modicum.model.block import DecoderBlock
from modicum.model.decoder import Decoder
from modicum.model.linear import Embedding, Linear
from modicum.model.native import kernel_fault
from modicum.model.quantized import QuantizedEmbedding, QuantizedLinear
from modicum.model.slots import SlotCache, advance, extend

Step = Callable[[Tensor, Tensor, Tensor, int], Tensor]
Reader = Callable[[Tensor, int, int], Tensor]

_LIBRARY = torch.library.Library("modicum", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "plan_decoder(Tensor[] weights, int[] bits, int[] sizes, float eps, Tensor[] keys, Tensor[] values, "
    "Tensor cos, Tensor sin) -> Tensor",
    "decode_step(Tensor plan, Tensor ids, Tensor slots, Tensor places) -> Tensor",
    "read_prompt(Tensor plan, Tensor ids, int slot, int start) -> Tensor",
    "greedy(Tensor logits, Tensor never) -> (Tensor, Tensor, Tensor)",
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]


def cache_dtype(model: Decoder, *, compiled: bool) -> torch.dtype:
    """The type of keys and values that suits the passes below: the model's, or one that is smaller and as good.

    Beside rounded matrices bfloat16 halves what is to be read, and a KL divergence from full precision of 0.00011
    stays that.
    """
    smaller = compiled and _rounded(model) and _in_kernel(model, torch.bfloat16)
    return torch.bfloat16 if smaller else model.dtype


def make_step(model: Decoder, cache: SlotCache, *, compiled: bool) -> Step:
    """step(ids_R, slots_R, places_R, attended) -> logits (R, V) float32; arguments as for `advance`, int64.

    compiled: in the kernel or through torch.compile, where there is either; the first may be made here, in seconds, the
    second when the step is first called with one row, and with several.
    """
    if compiled and _in_kernel(model, cache.keys[0].dtype):
        plan = _Plan(model, cache)

        def kernel(ids_R: Tensor, slots_R: Tensor, places_R: Tensor, attended: int) -> Tensor:  # noqa: ARG001  places say it
            out: Tensor = torch.ops.modicum.decode_step(plan.made, ids_R, slots_R, places_R)
            return out

        return kernel

    def step(ids_R: Tensor, slots_R: Tensor, places_R: Tensor, attended: int) -> Tensor:
        return model.head(advance(model, ids_R, cache, slots_R, places_R, attended)).float()

    # on a CPU without a kernel there is no compiler for torch.compile either
    wanted = compiled and cache.keys[0].device.type != "cpu"
    return torch.compile(step, dynamic=True, fullgraph=True) if wanted else step


def make_reader(model: Decoder, cache: SlotCache, *, compiled: bool) -> Reader:
    """read(ids_1T, slot, start) -> what the head reads after the last of them, (1, D); arguments as for `extend`.

    compiled: in the kernel, where there is one and all matrices are rounded; full ones PyTorch multiplies faster.
    """
    if compiled and _rounded(model) and _in_kernel(model, cache.keys[0].dtype):
        plan = _Plan(model, cache)

        def kernel(ids_1T: Tensor, slot: int, start: int) -> Tensor:
            out: Tensor = torch.ops.modicum.read_prompt(plan.made, ids_1T[0], slot, start)
            return out.to(model.dtype)

        return kernel
    return lambda ids_1T, slot, start: extend(model, ids_1T, cache, slot, start)[:, -1]


def greedy(logits_RV: Tensor, never: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of float32 logits the first of the largest that `never` (ids, ascending) does not name, (R,) int64.

    Then their logprobs, and what to take off any logit of a row to have its own, both (R,).
    """
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.modicum.greedy(logits_RV, never)
    return found


def _greedy(logits_RV: Tensor, never: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids_R, totals_R = logits_RV.index_fill(-1, never, -torch.inf).argmax(-1), logits_RV.logsumexp(-1)
    return ids_R, logits_RV.gather(-1, ids_R[:, None])[:, 0] - totals_R, totals_R


_LIBRARY.impl("greedy", _greedy, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _in_kernel(model: Decoder, held: torch.dtype) -> bool:
    """Whether the kernels are there, and have all parts of the model and this type of keys and values."""
    on_cpu = model.device.type == "cpu" and held in (torch.float32, torch.bfloat16)
    return on_cpu and _known(model) and kernel_fault() is None


def _rounded(model: Decoder) -> bool:
    """Whether all matrices but head and embedding are."""
    return all(_kind(part) == torch.int8 for block in model.model.layers for part in _matrices(block))


def _known(model: Decoder) -> bool:
    """Whether every part is of a kind that the kernel has; an adapter, say, is not."""
    for block in model.model.layers:
        kinds = [_kind(part) for part in _matrices(block)]
        q, k, v, _, gate, up, _ = kinds
        # those that take the same input are multiplied together
        if None in kinds or len({q, k, v}) > 1 or len({gate, up}) > 1:
            return False
    return None not in (_kind(_head(model)), _kind(model.model.embed_tokens))


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


class _Plan:
    """`made`: where the kernels find a model and its cache, which it keeps alive; plan_decoder.cpp tells the rest."""

    def __init__(self, model: Decoder, cache: SlotCache) -> None:
        body, config = model.model, model.config
        self._none = torch.empty(0)
        self._weights: list[Tensor] = []
        self._bits: list[int] = []
        for block in body.layers:
            assert isinstance(block, DecoderBlock)
            attention = block.self_attn
            for norm in (block.input_layernorm, block.post_attention_layernorm, attention.q_norm, attention.k_norm):
                self._weights.append(self._none if norm is None else norm.weight.detach().float())
            for part in _matrices(block):
                self._add(part)
        self._weights.append(body.norm.weight.detach().float())
        self._add(_head(model))
        self._add(body.embed_tokens)
        sizes = [config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim]
        sizes += [config.intermediate_size, config.vocab_size, int(config.rotary_layout == "interleaved")]
        table = body.rotary.table(torch.arange(cache.capacity + 1)[None])
        self._cos, self._sin = (part[0, 0].contiguous() for part in table)
        self._cache = cache
        self.made: Tensor = torch.ops.modicum.plan_decoder(
            *(self._weights, self._bits, sizes, config.rms_norm_eps, cache.keys, cache.values, self._cos, self._sin)
        )

    def _add(self, part: nn.Module) -> None:
        """A matrix, as three tensors."""
        if isinstance(part, QuantizedLinear | QuantizedEmbedding):
            self._weights += [part.packed, part.scale]
            self._bits.append(part.bits)
        else:
            assert isinstance(part, Linear | Embedding)
            self._weights += [part.weight.detach().contiguous(), self._none]
            self._bits.append(0)
        bias = getattr(part, "bias", None)
        self._weights.append(self._none if bias is None else bias.detach().float())
