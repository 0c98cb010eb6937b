// One token more for each of a few sequences, through the whole decoder, in one call: what a step of decoding does.
//
// Weights lie as PyTorch has them, in float32 or bfloat16, or rounded as in quantized_linear.cpp; what flows between them
// is float32. A matrix is read once for all rows. A row's result depends on that row alone, bit for bit, however many
// rows and threads there are: every sum has one order, that of Lanes below.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor quantized_linear(const Tensor& given, const Tensor& packed, const Tensor& scale, int64_t bits, int64_t outputs);

namespace {

constexpr int64_t WIDTH = 16;  // numbers that are multiplied at once
using Lanes = float __attribute__((vector_size(WIDTH * sizeof(float))));
using Words = uint32_t __attribute__((vector_size(WIDTH * sizeof(uint32_t))));
using Halves = uint16_t __attribute__((vector_size(WIDTH * sizeof(uint16_t))));

struct bfloat16 { uint16_t bits; };

inline Lanes read(const float* from) { Lanes r; std::memcpy(&r, from, sizeof r); return r; }
inline Lanes read(const bfloat16* from) {
  Halves half;
  std::memcpy(&half, from, sizeof half);
  const Words word = __builtin_convertvector(half, Words) << 16;
  Lanes r;
  std::memcpy(&r, &word, sizeof r);
  return r;
}
inline float widen(float value) { return value; }
inline float widen(bfloat16 value) {
  const uint32_t word = uint32_t(value.bits) << 16;
  float r;
  std::memcpy(&r, &word, sizeof r);
  return r;
}
inline void put(float* to, float value) { *to = value; }
inline void put(bfloat16* to, float value) {  // to the nearest, of two equally near to the even one
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  to->bits = value != value ? 0x7fc0 : uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}
using Eight = float __attribute__((vector_size(8 * sizeof(float))));
using Four = float __attribute__((vector_size(4 * sizeof(float))));
template <typename Half, typename Whole>
inline Half folded(const Whole& whole) {
  Half low, high;
  std::memcpy(&low, &whole, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&whole) + sizeof low, sizeof high);
  return low + high;
}
inline float total(const Lanes& sum) {
  const Four four = folded<Four>(folded<Eight>(sum));
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// What is multiplied at once, and how: float32 by lanes; bfloat16 in pairs that are added up, where the processor can.
template <typename T>
struct Step {
  using Part = Lanes;
  static constexpr int64_t length = WIDTH;
  static Part load(const T* from) { return read(from); }
  static void add(Lanes& sum, const Part& a, const Part& b) { sum += a * b; }
};
#ifdef __AVX512BF16__
template <>
struct Step<bfloat16> {
  using Part = __m512bh;
  static constexpr int64_t length = 2 * WIDTH;
  static Part load(const bfloat16* from) {
    const __m512i both = _mm512_loadu_si512(from);
    Part r;
    std::memcpy(&r, &both, sizeof r);
    return r;
  }
  static void add(Lanes& sum, const Part& a, const Part& b) { sum = _mm512_dpbf16_ps(sum, a, b); }
};
#endif

// A weight of a linear layer: rounded where bits is not 0, else of type bfloat16 or float.
struct Matrix {
  const Tensor *values, *scale;
  const float* bias;  // null where there is none
  int64_t bits, outputs, inputs;
  bool half() const { return values->scalar_type() == ScalarType::BFloat16; }
};

// The product of ROWS rows from x on by OUTPUTS rows of the matrix from w on.
template <typename T, int ROWS, int OUTPUTS>
void tile(const T* x, const T* w, const float* bias, float* out, int64_t inputs, int64_t outputs) {
  using S = Step<T>;
  Lanes sums[ROWS][OUTPUTS] = {};
  const int64_t whole = inputs - inputs % S::length;
  for (int64_t k = 0; k < whole; k += S::length) {
    typename S::Part weights[OUTPUTS];
    for (int n = 0; n < OUTPUTS; ++n) {
      weights[n] = S::load(w + n * inputs + k);
      // The next tile's: a processor follows one long stream of addresses by itself, but not several short ones.
      if constexpr (OUTPUTS > 1) __builtin_prefetch(w + (n + OUTPUTS) * inputs + k);
    }
    for (int r = 0; r < ROWS; ++r) {
      const auto values = S::load(x + r * inputs + k);
      for (int n = 0; n < OUTPUTS; ++n) S::add(sums[r][n], values, weights[n]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < OUTPUTS; ++n) {
      float sum = total(sums[r][n]);
      for (int64_t k = whole; k < inputs; ++k) sum += widen(x[r * inputs + k]) * widen(w[n * inputs + k]);
      out[r * outputs + n] = bias ? sum + bias[n] : sum;
    }
}

template <typename T, int OUTPUTS>
void all_rows(const T* x, const Matrix& m, int64_t n, float* out, int64_t rows) {
  const T* w = static_cast<const T*>(m.values->data_ptr()) + n * m.inputs;
  const float* bias = m.bias ? m.bias + n : nullptr;
  out += n;
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
    tile<T, 4, OUTPUTS>(x + r * m.inputs, w, bias, out + r * m.outputs, m.inputs, m.outputs);
  x += r * m.inputs;
  out += r * m.outputs;
  if (rows - r == 3) tile<T, 3, OUTPUTS>(x, w, bias, out, m.inputs, m.outputs);
  if (rows - r == 2) tile<T, 2, OUTPUTS>(x, w, bias, out, m.inputs, m.outputs);
  if (rows - r == 1) tile<T, 1, OUTPUTS>(x, w, bias, out, m.inputs, m.outputs);
}

// One input by several matrices of one type, shared out among the threads together.
template <typename T>
void multiply_dense(const T* x, int64_t rows, const std::vector<Matrix>& matrices, const std::vector<Tensor>& outs) {
  constexpr int64_t TOGETHER = 4, TASK = 32;
  std::vector<int64_t> ends;
  for (const Matrix& m : matrices) ends.push_back((ends.empty() ? 0 : ends.back()) + (m.outputs + TASK - 1) / TASK);
#pragma omp parallel for schedule(static)
  for (int64_t task = 0; task < ends.back(); ++task) {
    const size_t i = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
    const Matrix& m = matrices[i];
    float* out = static_cast<float*>(outs[i].data_ptr());
    int64_t n = (task - (i ? ends[i - 1] : 0)) * TASK;
    const int64_t end = std::min(m.outputs, n + TASK);
    // while reading is all that takes time, one output after the other reads a matrix from end to end
    if (rows >= 4)
      for (; n + TOGETHER <= end; n += TOGETHER) all_rows<T, TOGETHER>(x, m, n, out, rows);
    for (; n < end; ++n) all_rows<T, 1>(x, m, n, out, rows);
  }
}

// x (rows, inputs) float32 by each matrix -> (rows, outputs) float32.
std::vector<Tensor> multiply(const Tensor& x, const std::vector<Matrix>& matrices) {
  const int64_t rows = x.size(0);
  const float* from = static_cast<const float*>(x.data_ptr());
  std::vector<Tensor> outs;
  if (matrices[0].bits) {
    for (const Matrix& m : matrices) {
      outs.push_back(quantized_linear(x, *m.values, *m.scale, m.bits, m.outputs));
      float* out = static_cast<float*>(outs.back().data_ptr());
      if (m.bias)
        for (int64_t i = 0; i < rows * m.outputs; ++i) out[i] += m.bias[i % m.outputs];
    }
    return outs;
  }
  for (const Matrix& m : matrices) outs.push_back(torch::stable::new_empty(x, {rows, m.outputs}));
  if (matrices[0].half()) {
    std::vector<bfloat16> rounded(x.numel());
    for (size_t i = 0; i < rounded.size(); ++i) put(&rounded[i], from[i]);
    multiply_dense<bfloat16>(rounded.data(), rows, matrices, outs);
  } else {
    multiply_dense<float>(from, rows, matrices, outs);
  }
  return outs;
}

// x / rms(x) * gain, of `count` vectors.
void normalize(const float* x, const float* gain, float* out, int64_t count, int64_t width, float eps) {
  for (int64_t row = 0; row < count; ++row, x += width, out += width) {
    Lanes squares = {};
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) squares += read(x + i) * read(x + i);
    float sum = total(squares);
    for (; i < width; ++i) sum += x[i] * x[i];
    const float inverse = 1.0f / std::sqrt(sum / width + eps);
    for (i = 0; i < width; ++i) out[i] = x[i] * inverse * gain[i];
  }
}

// e to the x, at most 0, to within 2 units in the last place (Cody and Waite; the polynomial is Cephes').
inline Lanes exponential(Lanes x) {
  const Lanes least = Lanes{} - 87.0f;
  x = x < least ? least : x;
  Lanes n = x * 1.44269504f + 12582912.0f;  // 1.5 * 2**23: rounds to a whole number
  Words bits;
  std::memcpy(&bits, &n, sizeof bits);
  n -= 12582912.0f;
  const Lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Words power = (bits << 23) + 0x3f800000u;
  Lanes scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
}

// silu(gate) * up, into gate.
void gated(float* gate, const float* up, int64_t count) {
#pragma omp parallel for schedule(static) if (count > 4096)
  for (int64_t block = 0; block < (count + WIDTH - 1) / WIDTH; ++block) {
    const int64_t i = block * WIDTH, size = std::min(WIDTH, count - i) * sizeof(float);
    Lanes g = {}, u = {};
    std::memcpy(&g, gate + i, size);
    std::memcpy(&u, up + i, size);
    const Lanes e = exponential(g < 0.0f ? g : -g), sum = e + 1.0f;  // never of a positive number, which may overflow
    const Lanes silu = g * (g < 0.0f ? e / sum : 1.0f / sum) * u;
    std::memcpy(gate + i, &silu, size);
  }
}

template <typename T>
inline float dot(const float* a, const T* b, int64_t length) {
  Lanes sum = {};
  int64_t i = 0;
  for (; i + WIDTH <= length; i += WIDTH) sum += read(a + i) * read(b + i);
  float r = total(sum);
  for (; i < length; ++i) r += a[i] * widen(b[i]);
  return r;
}

// One head's attention over `count` keys: q is scaled; out gets the mixture. scores is room to work in.
template <typename T>
void attend_one(const float* q, const T* keys, const T* values, float* out, int64_t count, int64_t head, float* scores) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t s = 0; s < count; ++s) {
    scores[s] = dot(q, keys + s * head, head);
    largest = std::max(largest, scores[s]);
  }
  // what fills the last lanes up gets no weight
  const int64_t filled = (count + WIDTH - 1) / WIDTH * WIDTH;
  std::fill(scores + count, scores + filled, -std::numeric_limits<float>::infinity());
  Lanes sums = {};
  for (int64_t s = 0; s < filled; s += WIDTH) {
    Lanes share = read(scores + s);
    share = exponential(share - largest);
    for (int64_t i = std::max<int64_t>(0, count - s); i < WIDTH; ++i) share[i] = 0;
    sums += share;
    std::memcpy(scores + s, &share, sizeof share);
  }
  const float sum = total(sums);
  std::fill(out, out + head, 0.0f);
  for (int64_t s = 0; s < count; ++s)
    for (int64_t i = 0; i < head; ++i) out[i] += scores[s] * widen(values[s * head + i]);
  for (int64_t i = 0; i < head; ++i) out[i] /= sum;
}

struct Heads {
  int64_t heads, groups, head;
  bool interleaved;
  float eps;
};

// Normalise (where there is a gain) and turn one head by its angle, into out.
void prepare(const float* x, const float* gain, const float* cos, const float* sin, const Heads& h, float* out) {
  std::vector<float> plain(x, x + h.head);
  if (gain) normalize(x, gain, plain.data(), 1, h.head, h.eps);
  for (int64_t i = 0; i < h.head; ++i) {
    const int64_t partner = h.interleaved ? i ^ 1 : (i + h.head / 2) % h.head;
    out[i] = plain[i] * cos[i] + plain[partner] * sin[i];
  }
}

// Put this step's keys and values into a layer's cache (slots, groups, capacity, head), and mix the values up to there.
template <typename T>
void attend(const Tensor& q, const Tensor& k, const Tensor& v, const float* q_gain, const float* k_gain, const Tensor& keys,
            const Tensor& values, const Tensor& cos, const Tensor& sin, const int64_t* slots, const int64_t* places,
            const Heads& h, Tensor& out) {
  const int64_t rows = q.size(0), capacity = keys.size(2), shared = h.heads / h.groups, head = h.head;
  const float scale = 1.0f / std::sqrt(float(head));
#pragma omp parallel
  {
    std::vector<float> room(capacity + WIDTH + head);
    float *query = room.data(), *scores = query + head;
#pragma omp for schedule(dynamic, 1)
    for (int64_t pair = 0; pair < rows * h.groups; ++pair) {
      const int64_t r = pair / h.groups, g = pair % h.groups, place = places[r];
      const int64_t start = (slots[r] * h.groups + g) * capacity * head;
      T* key = static_cast<T*>(keys.data_ptr()) + start;
      T* value = static_cast<T*>(values.data_ptr()) + start;
      const float* c = static_cast<const float*>(cos.data_ptr()) + place * head;
      const float* s = static_cast<const float*>(sin.data_ptr()) + place * head;
      prepare(static_cast<const float*>(k.data_ptr()) + pair * head, k_gain, c, s, h, query);
      for (int64_t i = 0; i < head; ++i) put(key + place * head + i, query[i]);
      const float* from = static_cast<const float*>(v.data_ptr()) + pair * head;
      for (int64_t i = 0; i < head; ++i) put(value + place * head + i, from[i]);
      for (int64_t n = r * h.heads + g * shared; n < r * h.heads + (g + 1) * shared; ++n) {
        prepare(static_cast<const float*>(q.data_ptr()) + n * head, q_gain, c, s, h, query);
        for (int64_t i = 0; i < head; ++i) query[i] *= scale;
        attend_one<T>(query, key, value, static_cast<float*>(out.data_ptr()) + n * head, place + 1, head, scores);
      }
    }
  }
}

}  // namespace

// Logits (R, V) float32 after one token of each of R sequences, whose embeddings are x (R, hidden) float32.
//
// weights: for each layer two gains, two of queries and keys (empty: none), and seven matrices in the order of q, k, v, o,
// gate, up, down; at last the last gain and the head. A matrix is three tensors: its values, scales where it is rounded,
// and its bias, either empty where there is none. Gains and biases are float32. bits: 0 for each full matrix.
// keys, values: of each layer (slots, groups, capacity, head), written at [slots[r], :, places[r]], read up to there.
// cos, sin: (capacity, head) float32, of each place. sizes: heads, groups, head, intermediate, vocabulary, interleaved.
Tensor decode_step(const Tensor& given, std::vector<Tensor> weights, std::vector<int64_t> bits,
                   std::vector<int64_t> sizes, double eps, std::vector<Tensor> keys, std::vector<Tensor> values,
                   const Tensor& cos, const Tensor& sin, const Tensor& slots, const Tensor& places) {
  const int64_t rows = given.size(0), width = given.size(1), inner = sizes[3];
  const Heads h{sizes[0], sizes[1], sizes[2], sizes[5] != 0, float(eps)};
  const int64_t queries = h.heads * h.head, groups = h.groups * h.head;
  const int64_t outputs[] = {queries, groups, groups, width, inner, inner, width};
  const int64_t inputs[] = {width, width, width, queries, width, width, inner};
  size_t next = 0, number = 0;
  auto gain = [&]() {
    const Tensor& t = weights[next++];
    return t.numel() ? static_cast<const float*>(t.data_ptr()) : nullptr;
  };
  auto matrix = [&](int64_t out, int64_t in) {
    const Tensor &stored = weights[next], &scale = weights[next + 1];
    next += 2;
    return Matrix{&stored, &scale, gain(), bits[number++], out, in};
  };
  Tensor x = torch::stable::clone(given);
  Tensor normal = torch::stable::new_empty(x, {rows, width}), mixed = torch::stable::new_empty(x, {rows, queries});
  float *stream = static_cast<float*>(x.data_ptr()), *input = static_cast<float*>(normal.data_ptr());
  auto add = [&](const Tensor& more) {
    const float* from = static_cast<const float*>(more.data_ptr());
    for (int64_t i = 0; i < rows * width; ++i) stream[i] += from[i];
  };
  for (size_t layer = 0; layer < keys.size(); ++layer) {
    const float *before = gain(), *between = gain(), *q_gain = gain(), *k_gain = gain();
    std::vector<Matrix> m;
    for (int i = 0; i < 7; ++i) m.push_back(matrix(outputs[i], inputs[i]));
    normalize(stream, before, input, rows, width, h.eps);
    const std::vector<Tensor> qkv = multiply(normal, {m[0], m[1], m[2]});
    auto attention = keys[layer].scalar_type() == ScalarType::Float ? attend<float> : attend<bfloat16>;
    attention(qkv[0], qkv[1], qkv[2], q_gain, k_gain, keys[layer], values[layer], cos, sin,
              static_cast<const int64_t*>(slots.data_ptr()), static_cast<const int64_t*>(places.data_ptr()), h, mixed);
    add(multiply(mixed, {m[3]})[0]);
    normalize(stream, between, input, rows, width, h.eps);
    const std::vector<Tensor> wide = multiply(normal, {m[4], m[5]});
    gated(static_cast<float*>(wide[0].data_ptr()), static_cast<const float*>(wide[1].data_ptr()), rows * inner);
    add(multiply(wide[0], {m[6]})[0]);
  }
  normalize(stream, gain(), input, rows, width, h.eps);
  return multiply(normal, {matrix(sizes[4], width)})[0];
}

STABLE_TORCH_LIBRARY_IMPL(modicum, CPU, m) { m.impl("decode_step", TORCH_BOX(&decode_step)); }
