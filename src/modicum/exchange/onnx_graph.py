"""The decoder as an ONNX graph, node by node, of operators that every onnxruntime has, that of a browser too.

input_ids (B, T), attention_mask (B, past + T) and position_ids (B, T) int64, past_key_values.N.key and .value
(B, heads, past, head_dim) give logits (B, T, V) float32 and present.N.key and .value (B, heads, past + T, head_dim).
Batch, T and past are open; past may be 0. What 8 bits need besides is onnxruntime's own MatMulNBits.
"""

from collections.abc import Iterable
from math import sqrt
from typing import Any

from modicum.exchange.names import EMBEDDING, HEAD, weight_shapes
from modicum.exchange.onnx_nodes import Nodes, onnx_library
from modicum.exchange.onnx_weights import BLOCK, MIDDLE, ROUNDED, SCALES, Numbers, OnnxQuant
from modicum.model import ModelConfig
from modicum.model.frequencies import rotary_frequencies

OPSET = 18  # of 2022; the oldest that has all that is needed
_IR = 8
# 4: multiply in 8 bits, inputs rounded too. On 8 layers of width 256 five times as fast as multiplying in float32 (180
# against 33 tokens/s), for a divergence of 1.2e-4 against 4e-5 nats; that of quantize_dynamic was 1.1e-3.
_ACCURACY = 4
_HIDDEN = -1e30  # finite: a row of padding sees nothing, and a softmax over infinities alone would be NaN


def decoder_graph(config: ModelConfig, tensors: Iterable[tuple[str, Numbers]], quant: OnnxQuant) -> Any:
    """The model, an onnx.ModelProto with `tensors` (of `onnx_tensors`) in it."""
    return _Writer(config, quant).model(tensors)


class _Writer:
    def __init__(self, config: ModelConfig, quant: OnnxQuant) -> None:
        self.config, self.quant = config, quant
        self.proto = self._empty()
        self.nodes = Nodes(self.proto.graph)
        self.shapes = weight_shapes(config)
        self.kind = "FLOAT16" if quant == "fp16" else "FLOAT"  # of products, keys and values

    def model(self, tensors: Iterable[tuple[str, Numbers]]) -> Any:
        config, add = self.config, self.nodes.add
        helper, types = onnx_library().helper, onnx_library().TensorProto
        for name, numbers in tensors:
            self.nodes.weight(name, numbers)
        x = self._embedding("input_ids")
        angles, bias = self._angles(), self._bias()
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            normed = self._norm(x, f"{prefix}.input_layernorm")
            x = add("Add", x, self._attention(normed, layer, angles, bias))
            x = add("Add", x, self._feed_forward(self._norm(x, f"{prefix}.post_attention_layernorm"), prefix))
        self._head(self._norm(x, "model.norm"))
        cached = ["batch", config.num_key_value_heads]
        made = helper.make_tensor_value_info
        inputs = [
            made("input_ids", types.INT64, ["batch", "sequence"]),
            made("attention_mask", types.INT64, ["batch", "total"]),
            made("position_ids", types.INT64, ["batch", "sequence"]),
        ]
        kind = getattr(types, self.kind)
        outputs = [made("logits", types.FLOAT, ["batch", "sequence", config.vocab_size])]
        for part in (f"{layer}.{kept}" for layer in range(config.num_hidden_layers) for kept in ("key", "value")):
            inputs.append(made(f"past_key_values.{part}", kind, [*cached, "past", config.head_dim]))
            outputs.append(made(f"present.{part}", kind, [*cached, "total", config.head_dim]))
        self.proto.graph.input.extend(inputs)
        self.proto.graph.output.extend(outputs)
        return self.proto

    def _empty(self) -> Any:
        helper = onnx_library().helper
        domains = [helper.make_opsetid("", OPSET)]
        if self.quant == "int8":
            domains.append(helper.make_opsetid("com.microsoft", 1))
        graph = helper.make_graph([], "decoder", [], [])
        return helper.make_model(graph, opset_imports=domains, ir_version=_IR, producer_name="modicum")

    def _embedding(self, ids: str) -> str:
        add, config = self.nodes.add, self.config
        if self.quant != "int8":
            return self._wide(add("Gather", EMBEDDING, ids))
        # (B, T, blocks, BLOCK) of the bytes that the head multiplies by, so that a tied table is there once
        values = self._wide(add("Gather", EMBEDDING + ROUNDED, ids), always=True)
        scales = add("Unsqueeze", add("Gather", EMBEDDING + SCALES, ids), self.nodes.ints(-1))
        rows = add("Mul", add("Sub", values, self.nodes.float(MIDDLE)), scales)
        rows = add("Reshape", rows, self.nodes.ints(0, 0, -1))
        if config.hidden_size % BLOCK == 0:
            return rows
        return add("Slice", rows, *(self.nodes.ints(number) for number in (0, config.hidden_size, 2)))

    def _angles(self) -> tuple[str, str]:
        """cos, and sin with the sign of each half, (B, 1, T, head_dim)."""
        add, config = self.nodes.add, self.config
        frequencies, factor = rotary_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        places = add("Unsqueeze", self._wide("position_ids", always=True), self.nodes.ints(1, 3))
        angles = add("Mul", places, self.nodes.constant(frequencies.numpy()))
        cos, sin = add("Cos", angles), add("Sin", angles)
        if factor != 1:
            cos, sin = (add("Mul", part, self.nodes.float(factor)) for part in (cos, sin))
        return add("Concat", cos, cos, axis=-1), add("Concat", add("Neg", sin), sin, axis=-1)

    def _bias(self) -> str:
        """(B, 1, T, past + T): nothing where a token may look, _HIDDEN at what comes later and at padding."""
        add, ints = self.nodes.add, self.nodes.ints
        length = add("Shape", "input_ids", start=1, end=2)
        total = add("Shape", "attention_mask", start=1, end=2)
        first, last = (add("Squeeze", size, ints(0)) for size in (add("Sub", total, length), total))
        columns = add("Range", self.nodes.scalar(0), last, self.nodes.scalar(1))
        rows = add("Unsqueeze", add("Range", first, last, self.nodes.scalar(1)), ints(1))
        causal = add("LessOrEqual", columns, rows)
        kept = add("Unsqueeze", add("Cast", "attention_mask", to=onnx_library().TensorProto.BOOL), ints(1, 2))
        return add("Where", add("And", causal, kept), self.nodes.float(0), self.nodes.float(_HIDDEN))

    def _attention(self, x: str, layer: int, angles: tuple[str, str], bias: str) -> str:
        add, ints, config = self.nodes.add, self.nodes.ints, self.config
        prefix = f"model.layers.{layer}.self_attn"
        heads, width = config.num_key_value_heads, config.head_dim
        group = config.num_attention_heads // heads
        q, k, v = (self._heads(self._linear(x, f"{prefix}.{part}_proj")) for part in "qkv")
        if config.qk_norm:
            q, k = self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm")
        q, k = self._rotated(q, angles), self._narrow(self._rotated(k, angles))
        k = add("Concat", f"past_key_values.{layer}.key", k, axis=2, out=f"present.{layer}.key")
        v = add("Concat", f"past_key_values.{layer}.value", self._narrow(v), axis=2, out=f"present.{layer}.value")
        # the queries of a group one after the other, so that its keys need no copies
        q = self._narrow(add("Mul", q, self.nodes.float(1 / sqrt(width))))
        q = add("Reshape", q, ints(0, heads, -1, width)) if group > 1 else q
        scores = self._wide(add("MatMul", q, add("Transpose", k, perm=[0, 1, 3, 2])))
        rows = add("Concat", ints(0, heads * group), add("Shape", bias, start=2, end=4), axis=0)
        apart = add("Reshape", scores, rows) if group > 1 else scores
        shares = add("Softmax", add("Add", apart, bias), axis=-1)
        shares = add("Reshape", shares, add("Shape", scores)) if group > 1 else shares
        found = add("MatMul", self._narrow(shares), v)
        found = add("Reshape", found, ints(0, heads * group, -1, width)) if group > 1 else found
        together = add("Reshape", add("Transpose", found, perm=[0, 2, 1, 3]), ints(0, 0, heads * group * width))
        return self._linear(together, f"{prefix}.o_proj")

    def _heads(self, x: str) -> str:
        split = self.nodes.add("Reshape", x, self.nodes.ints(0, 0, -1, self.config.head_dim))
        return self.nodes.add("Transpose", split, perm=[0, 2, 1, 3])

    def _rotated(self, x: str, angles: tuple[str, str]) -> str:
        add, half = self.nodes.add, self.config.head_dim // 2
        first, second = self.nodes.split(x, half, half)
        partner = add("Concat", second, first, axis=-1)
        return add("Add", add("Mul", x, angles[0]), add("Mul", partner, angles[1]))

    def _feed_forward(self, x: str, prefix: str) -> str:
        gate, up = (self._linear(x, f"{prefix}.mlp.{part}_proj") for part in ("gate", "up"))
        opened = self.nodes.add("Mul", gate, self.nodes.add("Sigmoid", gate))
        return self._linear(self.nodes.add("Mul", opened, up), f"{prefix}.mlp.down_proj")

    def _norm(self, x: str, module: str) -> str:
        """In the steps that onnxruntime knows for one: it joins them to its own SimplifiedLayerNormalization."""
        add = self.nodes.add
        mean = add("ReduceMean", add("Pow", x, self.nodes.float(2)), self.nodes.ints(-1), keepdims=1)
        root = add("Sqrt", add("Add", mean, self.nodes.float(self.config.rms_norm_eps)))
        return add("Mul", add("Div", x, root), f"{module}.weight")

    def _linear(self, x: str, module: str) -> str:
        if self.quant == "int8":
            y = self._rounded_product(x, f"{module}.weight")
        else:
            y = self._wide(self.nodes.add("MatMul", self._narrow(x), f"{module}.weight"))
        bias = f"{module}.bias"
        return self.nodes.add("Add", y, bias) if bias in self.shapes else y

    def _rounded_product(self, x: str, name: str, out: str | None = None) -> str:
        outputs, inputs = self.shapes[name]
        sizes: dict[str, Any] = {"K": inputs, "N": outputs, "bits": 8, "block_size": BLOCK, "accuracy_level": _ACCURACY}
        return self.nodes.add("MatMulNBits", x, name + ROUNDED, name + SCALES, out=out, domain="com.microsoft", **sizes)

    def _head(self, x: str) -> None:
        add, ints = self.nodes.add, self.nodes.ints
        table = EMBEDDING if self.config.tie_word_embeddings else HEAD
        if self.quant == "int8":
            self._rounded_product(x, table, out="logits")
            return
        rows = add("Reshape", self._narrow(x), ints(-1, self.config.hidden_size))
        said = self._wide(add("Gemm", rows, table, transB=1))
        shape = add("Concat", add("Shape", "input_ids"), ints(-1), axis=0)
        add("Reshape", said, shape, out="logits")

    def _narrow(self, x: str) -> str:
        return self.nodes.cast(x, self.kind) if self.quant == "fp16" else x

    def _wide(self, x: str, *, always: bool = False) -> str:
        return self.nodes.cast(x, "FLOAT") if always or self.quant == "fp16" else x
