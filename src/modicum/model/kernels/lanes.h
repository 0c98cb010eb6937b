// Sixteen numbers at once, and what a decoder does with rows of numbers between its matrix products.
//
// Every sum has one order, that of Lanes, so that a row's result depends on that row alone, bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

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
using HalfFloats = std::vector<bfloat16, Aligned<bfloat16>>;

inline Lanes read(const float* from) { Lanes r; std::memcpy(&r, from, sizeof r); return r; }
inline Lanes read(const bfloat16* from) {
  Halves half;
  std::memcpy(&half, from, sizeof half);
  const Words word = __builtin_convertvector(half, Words) << 16;
  Lanes r;
  std::memcpy(&r, &word, sizeof r);
  return r;
}
inline void write(float* to, const Lanes& value) { std::memcpy(to, &value, sizeof value); }
// Where fewer than sixteen are left: the first `count`, the others being `rest`.
inline Lanes read_some(const float* from, int64_t count, float rest) {
  if (count >= WIDTH) return read(from);
  Lanes r = Lanes{} + rest;
  std::memcpy(&r, from, count * sizeof(float));
  return r;
}
inline void write_some(float* to, const Lanes& value, int64_t count) {
  if (count >= WIDTH) return write(to, value);
  std::memcpy(to, &value, count * sizeof(float));
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

// The totals of four, side by side, each the same bits as alone.
inline Four totals(const Lanes* sums) {
#if defined(__clang__) || __GNUC__ >= 12
  Four part[4];
  for (int i = 0; i < 4; ++i) part[i] = folded<Four>(folded<Eight>(sums[i]));
  auto paired = [](const Four& a, const Four& b) {  // 0 + 2 of both, then 1 + 3
    return __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  };
  const Four first = paired(part[0], part[1]), second = paired(part[2], part[3]);
  return __builtin_shufflevector(first, second, 0, 1, 4, 5) + __builtin_shufflevector(first, second, 2, 3, 6, 7);
#else
  return Four{total(sums[0]), total(sums[1]), total(sums[2]), total(sums[3])};
#endif
}

// x / rms(x) * gain.
inline void normalize(const float* x, const float* gain, float* out, int64_t width, float eps) {
  Lanes squares = {};
  int64_t i = 0;
  for (; i + WIDTH <= width; i += WIDTH) squares += read(x + i) * read(x + i);
  float sum = total(squares);
  for (; i < width; ++i) sum += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(sum / width + eps);
  for (i = 0; i < width; ++i) out[i] = x[i] * inverse * gain[i];
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
inline void gated(const float* gate, const float* up, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += WIDTH) {
    const Lanes g = read_some(gate + i, count - i, 0), u = read_some(up + i, count - i, 0);
    const Lanes e = exponential(g < 0.0f ? g : -g), sum = e + 1.0f;  // never of a positive number, which may overflow
    write_some(out + i, g * (g < 0.0f ? e / sum : 1.0f / sum) * u, count - i);
  }
}

// The largest number; one that is NaN may be passed over.
inline float largest(const float* x, int64_t count) {
  constexpr float least = -std::numeric_limits<float>::infinity();
  Lanes most = Lanes{} + least;
  for (int64_t i = 0; i < count; i += WIDTH) {
    const Lanes next = read_some(x + i, count - i, least);
    most = next > most ? next : most;
  }
  float r = least;
  for (int64_t lane = 0; lane < WIDTH; ++lane) r = std::max(r, most[lane]);
  return r;
}

// The sum of e to the x - `most`.
inline float sum_of_exponentials(const float* x, int64_t count, float most) {
  Lanes sums = {};
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) sums += exponential(read(x + i) - most);
  if (i < count) {
    const Lanes last = exponential(read_some(x + i, count - i, most) - most);
    for (int64_t lane = 0; lane < count - i; ++lane) sums[lane] += last[lane];
  }
  return total(sums);
}

// Those take the place of x too, and zeros that of what fills its last lanes up.
inline float softmax_parts(float* x, int64_t count) {
  const float most = largest(x, count);
  Lanes sums = {};
  for (int64_t i = 0; i < count; i += WIDTH) {
    Lanes part = exponential(read_some(x + i, count - i, most) - most);
    for (int64_t lane = count - i; lane < WIDTH; ++lane) part[lane] = 0;
    sums += part;
    write(x + i, part);
  }
  return total(sums);
}
