// A decoder as the kernels have it: where its weights, keys and values lie, and what each row goes through.
//
// Weights lie as PyTorch has them, in float32 or bfloat16, or rounded as in quantized_linear.cpp; what flows between
// them is float32.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "crew.h"
#include "lanes.h"
#include "rounded.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum class Kind { full, half, rounded };

// A weight (outputs, inputs); bias is null where there is none.
struct Matrix {
  Kind kind;
  const void* values;
  RoundedMatrix rounded;
  const float* bias;
  int64_t outputs, inputs;
};

struct Layer {
  const float *before, *between, *q_gain, *k_gain;  // the last two null where there are none
  Matrix q, k, v, o, gate, up, down;
  void *keys, *values;  // (slots, groups, capacity, head), float32, or bfloat16 where the cache is half
};

struct Decoder {
  int64_t width, inner, heads, groups, head, vocabulary, slots, capacity;
  bool interleaved, half_cache;
  float eps;
  const Layer* layers;
  int64_t count;      // of the layers
  const float* gain;  // the last
  Matrix out, embedding;
  const float *cos, *sin;  // (capacity, head), of each place
  int64_t queries() const { return heads * head; }
  int64_t widest() const { return std::max({width, queries(), inner}); }
  const Layer* begin() const { return layers; }
  const Layer* end() const { return layers + count; }
};

inline const Decoder& decoder_of(const Tensor& plan) { return *static_cast<const Decoder*>(plan.data_ptr()); }

// Of the product of `rows` rows by a rounded matrix, the outputs in panels first to last, into out (rows, outputs).
inline void multiply(const RoundedRows& x, int64_t rows, const Matrix& m, float* out, int64_t first, int64_t last) {
  multiply_rounded(x, rows, m.rounded, out, first, last);
  if (!m.bias) return;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t n = first * WIDTH; n < std::min(m.outputs, last * WIDTH); ++n) out[row * m.outputs + n] += m.bias[n];
}

inline void check_ids(const Decoder& d, const int64_t* ids, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(0 <= ids[i] && ids[i] < d.vocabulary, "token id ", ids[i], " is outside of ", d.vocabulary);
}

// The embedding of one token, float32.
inline void embed(const Matrix& m, int64_t id, float* out) {
  if (m.kind == Kind::rounded) {
    // one scale a row and 8 bits (see QuantizedEmbedding); four inputs of sixteen rows lie together
    const uint8_t* panel = m.rounded.packed + id / WIDTH * WIDTH * ((m.inputs + 31) / 32 * 32);
    const float scale = m.rounded.scale[id];
    for (int64_t i = 0; i < m.inputs; ++i)
      out[i] = (float(panel[(i / 4 * WIDTH + id % WIDTH) * 4 + i % 4]) - 128.0f) * scale;
  } else if (m.kind == Kind::half) {
    const auto* row = static_cast<const bfloat16*>(m.values) + id * m.inputs;
    for (int64_t i = 0; i < m.inputs; ++i) out[i] = widen(row[i]);
  } else {
    std::memcpy(out, static_cast<const float*>(m.values) + id * m.inputs, m.inputs * sizeof(float));
  }
}

// Normalise (where there is a gain) and turn one head by the angle of its place, into out; `plain` is room for a head.
inline void turn(const Decoder& d, const float* x, const float* gain, int64_t place, float* plain, float* out) {
  const float *cos = d.cos + place * d.head, *sin = d.sin + place * d.head;
  if (gain) {
    normalize(x, gain, plain, d.head, d.eps);
    x = plain;
  }
  if (d.interleaved) {
    for (int64_t i = 0; i < d.head; i += 2) {
      out[i] = x[i] * cos[i] + x[i + 1] * sin[i];
      out[i + 1] = x[i + 1] * cos[i + 1] + x[i] * sin[i + 1];
    }
    return;
  }
  const int64_t half = d.head / 2;
  for (int64_t i = 0; i < half; ++i) out[i] = x[i] * cos[i] + x[i + half] * sin[i];
  for (int64_t i = half; i < d.head; ++i) out[i] = x[i] * cos[i] + x[i - half] * sin[i];
}
