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
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <thread>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Of quantized_linear.cpp: part `part` of `parts` of the product of rows by a rounded matrix of `panels` panels.
void quantized_share(const float* x, int64_t rows, int64_t inputs, const uint8_t* packed, const float* scale,
                     int64_t groups, int64_t panels, int64_t bits, int64_t outputs, float* out, const float* bias,
                     int64_t part, int64_t parts);

namespace {

constexpr int64_t WIDTH = 16;  // numbers that are multiplied at once
using Lanes = float __attribute__((vector_size(WIDTH * sizeof(float))));
using Words = uint32_t __attribute__((vector_size(WIDTH * sizeof(uint32_t))));
using Halves = uint16_t __attribute__((vector_size(WIDTH * sizeof(uint16_t))));

struct bfloat16 { uint16_t bits; };

// Memory at a border of the processor's cache lines: a read across one takes twice the time.
template <typename T>
struct Aligned {
  using value_type = T;
  Aligned() = default;
  template <typename U>
  Aligned(const Aligned<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  bool operator==(const Aligned&) const { return true; }
};
using Floats = std::vector<float, Aligned<float>>;
using Rounded = std::vector<bfloat16, Aligned<bfloat16>>;

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

// The threads of one call. They wait for each other some thirty times in two milliseconds: too often to go to sleep,
// which is what OpenMP's own barrier does once more threads than processors exist, be they idle.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}
struct Team {
  alignas(64) std::atomic<int64_t> arrived{0};
  alignas(64) std::atomic<int64_t> round{0};
  int64_t threads = 1;
  void wait() {
    if (threads == 1) return;
    const int64_t now = round.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      round.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round.load(std::memory_order_acquire) == now; ++spins) {
      pause();
      // Half a millisecond: another program has the processor of the last one. Sooner, it would get this one as well.
      if (spins > 50000) std::this_thread::yield();
    }
  }
};

// The share of one thread in products of x by several matrices of one type, each with an output of its own.
template <typename T>
void multiply_dense(const T* x, int64_t rows, const Matrix* matrices, float* const* outs, int count, int64_t part,
                    int64_t parts) {
  constexpr int64_t TOGETHER = 4, TASK = 16;
  int64_t tasks = 0;
  for (int i = 0; i < count; ++i) tasks += (matrices[i].outputs + TASK - 1) / TASK;
  const int64_t begin = tasks * part / parts, end = tasks * (part + 1) / parts;
  int64_t first = 0;
  for (int i = 0; i < count; ++i) {
    const Matrix& m = matrices[i];
    const int64_t own = (m.outputs + TASK - 1) / TASK;
    int64_t n = std::clamp<int64_t>(begin - first, 0, own) * TASK;
    const int64_t stop = std::min(m.outputs, std::clamp<int64_t>(end - first, 0, own) * TASK);
    first += own;
    // while reading is all that takes time, one output after the other reads a matrix from end to end
    if (rows >= 4)
      for (; n + TOGETHER <= stop; n += TOGETHER) all_rows<T, TOGETHER>(x, m, n, outs[i], rows);
    for (; n < stop; ++n) all_rows<T, 1>(x, m, n, outs[i], rows);
  }
}

// The share of one thread in products of x (rows, inputs) by each matrix -> (rows, outputs).
void multiply(const Floats& x, int64_t rows, const Matrix* matrices, float* const* outs, int count,
              Rounded& room, int64_t part, int64_t parts) {
  if (matrices[0].bits) {
    for (int i = 0; i < count; ++i) {
      const Matrix& m = matrices[i];
      quantized_share(x.data(), rows, m.inputs, static_cast<const uint8_t*>(m.values->data_ptr()),
                      static_cast<const float*>(m.scale->data_ptr()), m.scale->size(1), m.scale->size(0), m.bits,
                      m.outputs, outs[i], m.bias, part, parts);
    }
  } else if (matrices[0].half()) {
    room.resize(rows * matrices[0].inputs);
    for (size_t i = 0; i < room.size(); ++i) put(&room[i], x[i]);
    multiply_dense<bfloat16>(room.data(), rows, matrices, outs, count, part, parts);
  } else {
    multiply_dense<float>(x.data(), rows, matrices, outs, count, part, parts);
  }
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

// silu(gate) * up.
void gated(const float* gate, const float* up, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += WIDTH) {
    const int64_t size = std::min(WIDTH, count - i) * sizeof(float);
    Lanes g = {}, u = {};
    std::memcpy(&g, gate + i, size);
    std::memcpy(&u, up + i, size);
    const Lanes e = exponential(g < 0.0f ? g : -g), sum = e + 1.0f;  // never of a positive number, which may overflow
    const Lanes silu = g * (g < 0.0f ? e / sum : 1.0f / sum) * u;
    std::memcpy(out + i, &silu, size);
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

// Put this step's keys and values into a layer's cache (slots, groups, capacity, head), and mix the values up to there:
// one thread's share.
template <typename T>
void attend(const float* q, const float* k, const float* v, const float* q_gain, const float* k_gain, const Tensor& keys,
            const Tensor& values, const Tensor& cos, const Tensor& sin, const Tensor& slots, const Tensor& places,
            const Heads& h, Floats& room, float* out, int64_t part, int64_t parts) {
  const int64_t rows = slots.size(0), capacity = keys.size(2), shared = h.heads / h.groups, head = h.head;
  const float scale = 1.0f / std::sqrt(float(head));
  room.resize(capacity + WIDTH + head);
  float *query = room.data(), *scores = query + head;
  for (int64_t pair = part; pair < rows * h.groups; pair += parts) {
    const int64_t r = pair / h.groups, g = pair % h.groups, place = static_cast<const int64_t*>(places.data_ptr())[r];
    const int64_t start = (static_cast<const int64_t*>(slots.data_ptr())[r] * h.groups + g) * capacity * head;
    T *key = static_cast<T*>(keys.data_ptr()) + start, *value = static_cast<T*>(values.data_ptr()) + start;
    const float* c = static_cast<const float*>(cos.data_ptr()) + place * head;
    const float* s = static_cast<const float*>(sin.data_ptr()) + place * head;
    prepare(k + pair * head, k_gain, c, s, h, query);
    for (int64_t i = 0; i < head; ++i) put(key + place * head + i, query[i]);
    for (int64_t i = 0; i < head; ++i) put(value + place * head + i, v[pair * head + i]);
    for (int64_t n = r * h.heads + g * shared; n < r * h.heads + (g + 1) * shared; ++n) {
      prepare(q + n * head, q_gain, c, s, h, query);
      for (int64_t i = 0; i < head; ++i) query[i] *= scale;
      attend_one<T>(query, key, value, out + n * head, place + 1, head, scores);
    }
  }
}

struct Layer {
  const float *before, *between, *q_gain, *k_gain;
  Matrix q, k, v, o, gate, up, down;
};

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
  size_t next = 0, number = 0;
  auto gain = [&]() {
    const Tensor& t = weights[next++];
    return t.numel() ? static_cast<const float*>(t.data_ptr()) : nullptr;
  };
  auto matrix = [&](int64_t outputs, int64_t inputs) {
    const Tensor &stored = weights[next], &scale = weights[next + 1];
    next += 2;
    return Matrix{&stored, &scale, gain(), bits[number++], outputs, inputs};
  };
  std::vector<Layer> layers;
  for (size_t i = 0; i < keys.size(); ++i)
    layers.push_back({gain(), gain(), gain(), gain(), matrix(queries, width), matrix(groups, width),
                      matrix(groups, width), matrix(width, queries), matrix(inner, width), matrix(inner, width),
                      matrix(width, inner)});
  const float* last = gain();
  const Matrix head = matrix(sizes[4], width);
  const bool full = keys[0].scalar_type() == ScalarType::Float;
  const auto attention = full ? attend<float> : attend<bfloat16>;
  const Tensor x = torch::stable::contiguous(given);
  Tensor logits = torch::stable::new_empty(x, {rows, head.outputs});
  // kept from call to call: fresh memory of this size costs as much time as what is done in it
  static thread_local Floats kept[7];
  auto &q = kept[0], &k = kept[1], &v = kept[2], &mixed = kept[3], &more = kept[4], &gate = kept[5], &up = kept[6];
  const int64_t lengths[] = {queries, groups, groups, queries, width, inner, inner};
  for (int i = 0; i < 7; ++i) kept[i].resize(rows * lengths[i]);
  Team team;
#pragma omp parallel
  {
    // Each thread has the whole of what is between the products: to do that twice takes less time than to wait.
    int64_t part = 0, parts = 1;
#ifdef _OPENMP
    part = omp_get_thread_num();
    parts = omp_get_num_threads();
#pragma omp single
    team.threads = parts;
#endif
    const float* start = static_cast<const float*>(x.data_ptr());
    static thread_local Floats stream, normal, wide, room;
    static thread_local Rounded rounded;
    stream.assign(start, start + rows * width);
    normal.resize(rows * width);
    wide.resize(rows * inner);
    auto product = [&](const Floats& from, std::initializer_list<Matrix> matrices,
                       std::initializer_list<float*> outs) {
      multiply(from, rows, matrices.begin(), outs.begin(), int(matrices.size()), rounded, part, parts);
      team.wait();
    };
    auto add = [&] {
      for (int64_t i = 0; i < rows * width; ++i) stream[i] += more[i];
    };
    for (size_t i = 0; i < layers.size(); ++i) {
      const Layer& l = layers[i];
      normalize(stream.data(), l.before, normal.data(), rows, width, h.eps);
      product(normal, {l.q, l.k, l.v}, {q.data(), k.data(), v.data()});
      attention(q.data(), k.data(), v.data(), l.q_gain, l.k_gain, keys[i], values[i], cos, sin, slots, places, h, room,
                mixed.data(), part, parts);
      team.wait();
      product(mixed, {l.o}, {more.data()});
      add();
      normalize(stream.data(), l.between, normal.data(), rows, width, h.eps);
      product(normal, {l.gate, l.up}, {gate.data(), up.data()});
      gated(gate.data(), up.data(), wide.data(), rows * inner);
      product(wide, {l.down}, {more.data()});
      add();
    }
    normalize(stream.data(), last, normal.data(), rows, width, h.eps);
    product(normal, {head}, {static_cast<float*>(logits.data_ptr())});
  }
  return logits;
}

STABLE_TORCH_LIBRARY_IMPL(modicum, CPU, m) { m.impl("decode_step", TORCH_BOX(&decode_step)); }
