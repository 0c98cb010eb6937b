// Rounded weights times activations that are rounded to int8 by blocks of 32, with one scale a block and row.
//
// A weight is stored as an unsigned byte or half-byte, its zero at 128 or 8, so that the processor's product of
// unsigned by signed bytes (VNNI) takes it as it is; what the shift adds, zero times the sum of a block's activations,
// is taken off where the sum starts. Sixteen outputs lie side by side, four inputs of each together:
//   8 bits: packed[panel][input / 4][output][input % 4]
//   4 bits: packed[panel][input / 8][output][input % 4], the low half for the first four inputs, the high for the rest
//   scale[panel][group][output], where a group is a block of 32 inputs or all of them
// A row's result depends on that row alone, bit for bit, however many rows there are.
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

#include "rounded.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512F__) && defined(__AVX512BW__)
#define MODICUM_VNNI 1
#include <immintrin.h>
#endif

namespace {

constexpr int64_t BLOCK = 32;  // activations that share a scale
constexpr int64_t LANES = 16;  // outputs of a panel
constexpr int64_t CHUNK = 4;   // panels of one task

void round_block(const float* x, int64_t length, int8_t* values, float* scale, int32_t* sum) {
  float part[BLOCK] = {0};
  std::memcpy(part, x, length * sizeof(float));
  // Loops that the compiler turns into a few instructions each: as whole numbers, magnitudes have the same order, and
  // those of infinity and NaN are the largest.
  uint32_t words[BLOCK], most = 0;
  std::memcpy(words, part, sizeof part);
  for (int i = 0; i < BLOCK; ++i) most = std::max(most, words[i] & 0x7fffffffu);
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  const bool finite = most < 0x7f800000u;  // what is not must not vanish in the rounding
  const float inverse = finite && largest > 1e-30f ? 127.0f / largest : 0.0f;  // beyond it the quotient is infinite
  constexpr float NEAREST = 12582912.0f;  // 1.5 * 2**23: what is added to it is rounded to a whole number
  int32_t rounded[BLOCK], total = 0;
  for (int i = 0; i < BLOCK; ++i) {
    const float shifted = (finite ? part[i] : 0.0f) * inverse + NEAREST;
    std::memcpy(&rounded[i], &shifted, sizeof shifted);
    rounded[i] -= 0x4b400000;
    total += rounded[i];
  }
  for (int i = 0; i < BLOCK; ++i) values[i] = static_cast<int8_t>(rounded[i]);
  *scale = finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
  *sum = total;
}

#ifdef MODICUM_VNNI
using Ints = __m512i;
using Floats = __m512;
inline Ints start(int32_t value) { return _mm512_set1_epi32(value); }
inline Floats nothing() { return _mm512_setzero_ps(); }
inline Floats read(const float* from) { return _mm512_loadu_ps(from); }
inline Ints weights8(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Ints low(Ints both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
inline Ints high(Ints both) { return _mm512_and_si512(_mm512_srli_epi16(both, 4), _mm512_set1_epi8(15)); }
inline Ints dot(Ints sum, Ints weights, const int8_t* four) {
  int32_t word;
  std::memcpy(&word, four, 4);
  return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(word));
}
inline Floats add(Floats sum, Ints dots, float scale) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), _mm512_set1_ps(scale), sum);
}
inline Floats add(Floats sum, Ints dots, float scale, Floats scales) {
  return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dots), _mm512_set1_ps(scale)), scales, sum);
}
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline void write(float* to, Floats value, int64_t lanes) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << lanes) - 1), value);
}
#else
struct Ints { int32_t at[LANES]; };
struct Floats { float at[LANES]; };
struct Bytes { uint8_t at[4 * LANES]; };
inline Ints start(int32_t value) { Ints r; for (auto& v : r.at) v = value; return r; }
inline Floats nothing() { return Floats{}; }
inline Floats read(const float* from) { Floats r; std::memcpy(r.at, from, sizeof r.at); return r; }
inline Bytes weights8(const uint8_t* from) { Bytes r; std::memcpy(r.at, from, sizeof r.at); return r; }
inline Bytes low(Bytes both) { for (auto& v : both.at) v &= 15; return both; }
inline Bytes high(Bytes both) { for (auto& v : both.at) v >>= 4; return both; }
inline Ints dot(Ints sum, const Bytes& w, const int8_t* four) {
  for (int64_t j = 0; j < LANES; ++j)
    for (int i = 0; i < 4; ++i) sum.at[j] += int32_t(w.at[4 * j + i]) * four[i];
  return sum;
}
inline Floats add(Floats sum, const Ints& dots, float scale) {
  for (int64_t j = 0; j < LANES; ++j) sum.at[j] += float(dots.at[j]) * scale;
  return sum;
}
inline Floats add(Floats sum, const Ints& dots, float scale, const Floats& scales) {
  for (int64_t j = 0; j < LANES; ++j) sum.at[j] += float(dots.at[j]) * scale * scales.at[j];
  return sum;
}
inline Floats times(Floats a, const Floats& b) { for (int64_t j = 0; j < LANES; ++j) a.at[j] *= b.at[j]; return a; }
inline void write(float* to, const Floats& value, int64_t lanes) { std::memcpy(to, value.at, lanes * sizeof(float)); }
#endif

struct Product {
  const RoundedRows& x;
  const uint8_t* packed;
  const float* scale;
  float* out;
  int64_t blocks, groups, outputs;
};

// ROWS rows from `row` on by PANELS panels from `panel` on.
template <int BITS, bool GROUPED, int ROWS, int PANELS>
void tile(const Product& p, int64_t row, int64_t panel) {
  constexpr int64_t BYTES = LANES * BLOCK * BITS / 8;  // of a block of a panel
  constexpr int32_t ZERO = BITS == 8 ? 128 : 8;
  Floats sums[ROWS][PANELS];
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < PANELS; ++n) sums[r][n] = nothing();
  for (int64_t b = 0; b < p.blocks; ++b) {
    const int8_t* values[ROWS];
    Ints dots[ROWS][PANELS];
    for (int r = 0; r < ROWS; ++r) {
      const int64_t at = (row + r) * p.blocks + b;
      values[r] = p.x.values.data() + at * BLOCK;
      for (int n = 0; n < PANELS; ++n) dots[r][n] = start(-ZERO * p.x.sum[at]);
    }
    for (int c = 0; c < BYTES / 64; ++c) {
      for (int n = 0; n < PANELS; ++n) {
        const auto w = weights8(p.packed + ((panel + n) * p.blocks + b) * BYTES + c * 64);
        if constexpr (BITS == 8) {
          for (int r = 0; r < ROWS; ++r) dots[r][n] = dot(dots[r][n], w, values[r] + 4 * c);
        } else {
          const auto first = low(w), second = high(w);
          for (int r = 0; r < ROWS; ++r) dots[r][n] = dot(dots[r][n], first, values[r] + 8 * c);
          for (int r = 0; r < ROWS; ++r) dots[r][n] = dot(dots[r][n], second, values[r] + 8 * c + 4);
        }
      }
    }
    for (int n = 0; n < PANELS; ++n)
      for (int r = 0; r < ROWS; ++r) {
        const float xs = p.x.scale[(row + r) * p.blocks + b];
        if constexpr (GROUPED)
          sums[r][n] = add(sums[r][n], dots[r][n], xs, read(p.scale + ((panel + n) * p.groups + b) * LANES));
        else
          sums[r][n] = add(sums[r][n], dots[r][n], xs);
      }
  }
  for (int n = 0; n < PANELS; ++n)
    for (int r = 0; r < ROWS; ++r) {
      const int64_t first = (panel + n) * LANES;
      const Floats value = GROUPED ? sums[r][n] : times(sums[r][n], read(p.scale + first));
      write(p.out + (row + r) * p.outputs + first, value, std::min(LANES, p.outputs - first));
    }
}

// Up to five rows by one panel after the other, which reads a matrix from end to end: that is all that takes time then.
template <int BITS, bool GROUPED>
void few_rows(const Product& p, int64_t row, int64_t rows, int64_t n) {
  if (rows == 5) tile<BITS, GROUPED, 5, 1>(p, row, n);
  if (rows == 4) tile<BITS, GROUPED, 4, 1>(p, row, n);
  if (rows == 3) tile<BITS, GROUPED, 3, 1>(p, row, n);
  if (rows == 2) tile<BITS, GROUPED, 2, 1>(p, row, n);
  if (rows == 1) tile<BITS, GROUPED, 1, 1>(p, row, n);
}

// All rows by the panels from `begin` to `end`; of many, six share a weight in a register, and two panels a row's.
template <int BITS, bool GROUPED>
void panels(const Product& p, int64_t rows, int64_t begin, int64_t end) {
  const int64_t left = rows % 6;
  int64_t n = begin;
  if (rows >= 6)
    for (; n + 2 <= end; n += 2) {
      for (int64_t row = 0; row + 6 <= rows; row += 6) tile<BITS, GROUPED, 6, 2>(p, row, n);
      for (int64_t each = n; each < n + 2; ++each) few_rows<BITS, GROUPED>(p, rows - left, left, each);
    }
  for (; n < end; ++n) {
    for (int64_t row = 0; row + 6 <= rows; row += 6) tile<BITS, GROUPED, 6, 1>(p, row, n);
    few_rows<BITS, GROUPED>(p, rows - left, left, n);
  }
}

void run_panels(const Product& p, int64_t bits, int64_t rows, int64_t begin, int64_t end) {
  const bool grouped = p.groups > 1;
  if (bits == 8)
    grouped ? panels<8, true>(p, rows, begin, end) : panels<8, false>(p, rows, begin, end);
  else
    grouped ? panels<4, true>(p, rows, begin, end) : panels<4, false>(p, rows, begin, end);
}

}  // namespace

void RoundedRows::reserve(int64_t rows, int64_t inputs) {
  const int64_t blocks = rows * ((inputs + BLOCK - 1) / BLOCK);
  if (int64_t(sum.size()) >= blocks) return;
  values.resize(blocks * BLOCK);
  scale.resize(blocks);
  sum.resize(blocks);
}

void RoundedRows::take(const float* x, int64_t first, int64_t last, int64_t inputs) {
  const int64_t blocks = (inputs + BLOCK - 1) / BLOCK;
  for (int64_t row = first; row < last; ++row)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at = row * blocks + b;
      round_block(x + row * inputs + b * BLOCK, std::min(BLOCK, inputs - b * BLOCK), values.data() + at * BLOCK,
                  scale.data() + at, sum.data() + at);
    }
}

void multiply_rounded(const RoundedRows& x, int64_t rows, const RoundedMatrix& m, float* out, int64_t first,
                      int64_t last) {
  const Product product{x, m.packed, m.scale, out, (m.inputs + BLOCK - 1) / BLOCK, m.groups, m.outputs};
  for (; first < last; first += CHUNK) run_panels(product, m.bits, rows, first, std::min(last, first + CHUNK));
}

using torch::stable::Tensor;

// given (..., inputs) float32 -> (..., outputs). The second size of scale is 1 or the number of blocks.
Tensor quantized_linear(const Tensor& given, const Tensor& packed, const Tensor& scale, int64_t bits, int64_t outputs) {
  const Tensor x = torch::stable::contiguous(given);
  const int64_t inputs = x.size(-1), rows = inputs ? x.numel() / inputs : 0, panels = packed.size(0);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = outputs;
  Tensor out = torch::stable::new_empty(x, shape);
  const RoundedMatrix matrix{static_cast<const uint8_t*>(packed.data_ptr()),
                             static_cast<const float*>(scale.data_ptr()),
                             bits,
                             outputs,
                             inputs,
                             panels,
                             scale.size(1)};
  RoundedRows rounded;
  rounded.reserve(rows, inputs);
  const float* from = static_cast<const float*>(x.data_ptr());
  const int64_t tasks = (panels + CHUNK - 1) / CHUNK;
  if (rows < 8) rounded.take(from, 0, rows, inputs);
#pragma omp parallel if (tasks > 1)
  {
    if (rows >= 8) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows; ++row) rounded.take(from, row, row + 1, inputs);
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task)
      multiply_rounded(rounded, rows, matrix, static_cast<float*>(out.data_ptr()), task * CHUNK,
                       std::min(panels, (task + 1) * CHUNK));
  }
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(modicum, CPU, m) { m.impl("quantized_linear", TORCH_BOX(&quantized_linear)); }
