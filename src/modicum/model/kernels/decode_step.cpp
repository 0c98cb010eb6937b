// One token more for each of a few sequences, through the whole decoder, in one call: what a step of decoding does.
//
// A matrix is read once for all rows. A row's result depends on that row alone, bit for bit, however many rows and
// threads there are.
#include "decoder.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

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
      // a page beyond the next tile's, in the order of addresses: a processor follows one stream by itself, not four
      if constexpr (OUTPUTS > 1) __builtin_prefetch(w + OUTPUTS * (inputs + k) + n * S::length + 4096 / sizeof(T));
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
  const T* w = static_cast<const T*>(m.values) + n * m.inputs;
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

using Targets = std::initializer_list<std::pair<const Matrix&, float*>>;

// The share of one thread in products of x by several matrices of one type, each with an output of its own.
template <typename T>
void multiply_dense(const T* x, int64_t rows, const Targets& targets, int64_t part, int64_t parts) {
  constexpr int64_t TOGETHER = 4, TASK = 16;
  int64_t tasks = 0, first = 0;
  for (const auto& [m, out] : targets) tasks += (m.outputs + TASK - 1) / TASK;
  const int64_t begin = tasks * part / parts, end = tasks * (part + 1) / parts;
  for (const auto& [m, out] : targets) {
    const int64_t own = (m.outputs + TASK - 1) / TASK;
    int64_t n = std::clamp<int64_t>(begin - first, 0, own) * TASK;
    const int64_t stop = std::min(m.outputs, std::clamp<int64_t>(end - first, 0, own) * TASK);
    first += own;
    for (; n + TOGETHER <= stop; n += TOGETHER) all_rows<T, TOGETHER>(x, m, n, out, rows);
    for (; n < stop; ++n) all_rows<T, 1>(x, m, n, out, rows);
  }
}

void multiply_rounded_share(const RoundedRows& x, int64_t rows, const Targets& targets, int64_t part, int64_t parts) {
  for (const auto& [m, out] : targets)
    multiply(x, rows, m, out, m.rounded.panels * part / parts, m.rounded.panels * (part + 1) / parts);
}

// The products of q by four keys or fewer, from scores on.
template <int COUNT, typename T>
void score(const T* q, const T* keys, int64_t head, float* scores) {
  using S = Step<T>;
  Lanes sums[4] = {};
  int64_t i = 0;
  for (; i + S::length <= head; i += S::length) {
    const auto query = S::load(q + i);
    for (int s = 0; s < COUNT; ++s) S::add(sums[s], query, S::load(keys + s * head + i));
  }
  const Four found = totals(sums);
  for (int s = 0; s < COUNT; ++s) {
    scores[s] = found[s];
    for (int64_t rest = i; rest < head; ++rest) scores[s] += widen(q[rest]) * widen(keys[s * head + rest]);
  }
}

// The numbers of PARTS times sixteen columns, each a sum over `count` rows of values, weighted.
template <int PARTS, typename T>
void mix(const float* weights, const T* values, int64_t count, int64_t head, float* out) {
  Lanes sums[PARTS] = {};
  for (int64_t s = 0; s < count; ++s)
    for (int i = 0; i < PARTS; ++i) sums[i] += weights[s] * read(values + s * head + i * WIDTH);
  for (int i = 0; i < PARTS; ++i) write(out + i * WIDTH, sums[i]);
}

// One head's attention over `count` keys: q is scaled; out gets the mixture. scores is room to work in.
template <typename T>
void attend_one(const T* q, const T* keys, const T* values, float* out, int64_t count, int64_t head, float* scores) {
  int64_t s = 0, i = 0;
  for (; s + 4 <= count; s += 4) {
    // meanwhile their values come nearer, which are asked for next
    for (int64_t line = 0; line < 4 * head; line += 64 / sizeof(T)) __builtin_prefetch(values + s * head + line);
    score<4>(q, keys + s * head, head, scores + s);
  }
  for (; s < count; ++s) score<1>(q, keys + s * head, head, scores + s);
  const float sum = softmax_parts(scores, count);
  for (; i + 4 * WIDTH <= head; i += 4 * WIDTH) mix<4>(scores, values + i, count, head, out + i);
  for (; i + WIDTH <= head; i += WIDTH) mix<1>(scores, values + i, count, head, out + i);
  for (; i < head; ++i) {
    out[i] = 0;
    for (s = 0; s < count; ++s) out[i] += scores[s] * widen(values[s * head + i]);
  }
  for (i = 0; i < head; ++i) out[i] /= sum;
}

// Put this step's keys and values into a layer's cache, and mix the values up to there: one thread's share.
template <typename T>
void attend(const Decoder& d, const Layer& l, const float* q, const float* k, const float* v, int64_t rows,
            const int64_t* slots, const int64_t* places, Floats& room, float* out, int64_t part, int64_t parts) {
  const int64_t shared = d.heads / d.groups, head = d.head;
  const float scale = 1.0f / std::sqrt(float(head));
  static thread_local std::vector<T, Aligned<T>> asked;  // a query in the keys' type, in which they are multiplied
  asked.resize(head);
  room.resize(2 * head + d.capacity + WIDTH);
  float *plain = room.data(), *query = plain + head, *scores = query + head;
  for (int64_t pair = part; pair < rows * d.groups; pair += parts) {
    const int64_t r = pair / d.groups, g = pair % d.groups, place = places[r];
    const int64_t start = (slots[r] * d.groups + g) * d.capacity * head;
    T *key = static_cast<T*>(l.keys) + start, *value = static_cast<T*>(l.values) + start;
    turn(d, k + pair * head, l.k_gain, place, plain, query);
    for (int64_t i = 0; i < head; ++i) put(key + place * head + i, query[i]);
    for (int64_t i = 0; i < head; ++i) put(value + place * head + i, v[pair * head + i]);
    for (int64_t n = r * d.heads + g * shared; n < r * d.heads + (g + 1) * shared; ++n) {
      turn(d, q + n * head, l.q_gain, place, plain, query);
      for (int64_t i = 0; i < head; ++i) put(&asked[i], query[i] * scale);
      attend_one<T>(asked.data(), key, value, out + n * head, place + 1, head, scores);
    }
  }
}

// What stands between the products, of some rows, and what one product reads: each of x in the type of its matrix.
struct Between {
  Floats stream, normal, wide;
  HalfFloats halves;
  RoundedRows rounded;
  void reserve(const Decoder& d, int64_t rows) {
    stream.resize(rows * d.width);
    normal.resize(rows * d.width);
    wide.resize(rows * d.inner);
    halves.resize(rows * d.widest());
    rounded.reserve(rows, d.widest());
  }
  void take(const float* x, const Matrix& m, int64_t first, int64_t last) {
    if (m.kind == Kind::rounded) rounded.take(x, first, last, m.inputs);
    if (m.kind == Kind::half)
      for (int64_t i = first * m.inputs; i < last * m.inputs; ++i) put(&halves[i], x[i]);
  }
};

}  // namespace

// Logits (R, V) float32 after one token of each of R sequences: ids, slots and places (R,) int64. Keys and values are
// written at [slots[r], :, places[r]], and read up to there.
Tensor decode_step(const Tensor& plan, const Tensor& ids, const Tensor& slots, const Tensor& places) {
  const Decoder& d = decoder_of(plan);
  const int64_t rows = ids.size(0), width = d.width, inner = d.inner, groups = d.groups * d.head;
  const auto* id = static_cast<const int64_t*>(ids.data_ptr());
  const auto* slot = static_cast<const int64_t*>(slots.data_ptr());
  const auto* place = static_cast<const int64_t*>(places.data_ptr());
  check_ids(d, id, rows);
  for (int64_t r = 0; r < rows; ++r)
    STD_TORCH_CHECK(0 <= slot[r] && slot[r] < d.slots && 0 <= place[r] && place[r] < d.capacity, "no such place");
  Tensor logits = torch::stable::new_empty(ids, {rows, d.vocabulary}, ScalarType::Float);
  // kept from call to call: fresh memory of this size costs as much time as what is done in it
  static thread_local Floats kept[7];
  const int64_t lengths[] = {d.queries(), groups, groups, d.queries(), width, inner, inner};
  for (int i = 0; i < 7; ++i) kept[i].resize(rows * lengths[i]);
  float *q = kept[0].data(), *k = kept[1].data(), *v = kept[2].data(), *mixed = kept[3].data();
  float *more = kept[4].data(), *gate = kept[5].data(), *up = kept[6].data();
  // One row: each thread does all that is between the products, which takes less time than to wait for another's part.
  // Several: each its share of them.
  static thread_local std::vector<Between> own;
  std::vector<Between>& between = own;  // this thread's, for all of the crew
  Crew& crew = Crew::of(torch::stable::get_num_threads());
  const bool alone = rows == 1;
  between.resize(alone ? crew.threads() : 1);
  for (Between& b : between) b.reserve(d, rows);
  crew.run([&](int64_t part, int64_t parts) {
    static thread_local Floats room;
    Between& b = between[alone ? part : 0];
    const int64_t first = alone ? 0 : rows * part / parts, last = alone ? 1 : rows * (part + 1) / parts;
    auto product = [&](const float* x, const Targets& targets) {
      const Matrix& m = targets.begin()->first;
      b.take(x, m, first, last);
      if (!alone) crew.wait(part);
      if (m.kind == Kind::rounded) multiply_rounded_share(b.rounded, rows, targets, part, parts);
      if (m.kind == Kind::half) multiply_dense<bfloat16>(b.halves.data(), rows, targets, part, parts);
      if (m.kind == Kind::full) multiply_dense<float>(x, rows, targets, part, parts);
      crew.wait(part);
    };
    auto normal = [&](const float* gain) {
      for (int64_t r = first; r < last; ++r) normalize(&b.stream[r * width], gain, &b.normal[r * width], width, d.eps);
      return b.normal.data();
    };
    auto add = [&] {
      for (int64_t i = first * width; i < last * width; ++i) b.stream[i] += more[i];
    };
    for (int64_t r = first; r < last; ++r) embed(d.embedding, id[r], &b.stream[r * width]);
    for (const Layer& l : d) {
      product(normal(l.before), {{l.q, q}, {l.k, k}, {l.v, v}});
      const auto attention = d.half_cache ? attend<bfloat16> : attend<float>;
      attention(d, l, q, k, v, rows, slot, place, room, mixed, part, parts);
      crew.wait(part);
      product(mixed, {{l.o, more}});
      add();
      product(normal(l.between), {{l.gate, gate}, {l.up, up}});
      gated(gate + first * inner, up + first * inner, &b.wide[first * inner], (last - first) * inner);
      product(b.wide.data(), {{l.down, more}});
      add();
    }
    product(normal(d.gain), {{d.out, static_cast<float*>(logits.data_ptr())}});
  });
  return logits;
}

STABLE_TORCH_LIBRARY_IMPL(modicum, CPU, m) { m.impl("decode_step", TORCH_BOX(&decode_step)); }
