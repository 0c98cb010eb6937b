// A token for each row, drawn from what its own settings leave of its distribution.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <numeric>

#include "crew.h"
#include "lanes.h"

namespace {

struct Settings { double temperature, top_k, top_p, min_p, uniform; };

// Which of two places has more, or comes first of two that have as much. Only heaps are made by it, which a NaN, that
// stands in no order, does not lead astray.
struct More {
  const float* of;
  bool operator()(int64_t a, int64_t b) const { return of[a] > of[b] || (of[a] == of[b] && a < b); }
};

// Zero all parts that come after the place `last` in the order of More.
void cut_after(int64_t last, const float* of, int64_t length, float* parts) {
  const float least = of[last];
  for (int64_t i = 0; i < length; ++i)
    if (!(of[i] > least || (of[i] == least && i <= last))) parts[i] = 0;
}

// The most probable places whose parts together reach `share` of them all, never none.
void keep_share(float* parts, int64_t length, double share, std::vector<int64_t>& order) {
  Lanes sums = {};
  for (int64_t i = 0; i < length; i += WIDTH) sums += read_some(parts + i, length - i, 0);
  const double all = total(sums);
  // all that are smaller make up less than what may be missing; a little less, since sums are rounded
  const float smallest = float(0.999 * (1 - share) * all / length);
  order.clear();
  for (int64_t i = 0; i < length; ++i)
    if (parts[i] > 0 && parts[i] >= smallest) order.push_back(i);
  const auto later = [more = More{parts}](int64_t a, int64_t b) { return more(b, a); };
  std::make_heap(order.begin(), order.end(), later);
  double before = 0;
  for (auto end = order.end(); end != order.begin();) {
    std::pop_heap(order.begin(), end--, later);
    before += parts[*end];
    if (before >= share * all) return cut_after(*end, parts, length, parts);
  }
}

int64_t draw(const float* x, int64_t length, const Settings& s, Floats& parts, std::vector<int64_t>& order) {
  const float most = largest(x, length);
  if (s.temperature == 0) return std::find(x, x + length, most) - x;
  // the bounds keep 0 * inf out, and with the largest taken off nothing overflows
  const float inverse = float(std::clamp(1 / s.temperature, 1e-30, 1e30));
  parts.resize(length);
  for (int64_t i = 0; i < length; i += WIDTH) {
    const Lanes scaled = (read_some(x + i, length - i, most) - most) * inverse, part = exponential(scaled);
    write_some(&parts[i], scaled < -87.0f ? Lanes{} : part, length - i);
  }
  if (0 < s.top_k && s.top_k < double(length)) {
    const auto count = int64_t(s.top_k);
    order.resize(length);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), More{x});
    cut_after(order[count - 1], x, length, parts.data());
  }
  if (s.top_p < 1) keep_share(parts.data(), length, s.top_p, order);
  const float least = std::max(float(s.min_p), std::numeric_limits<float>::min());
  double all = 0, reached = 0;
  for (int64_t i = 0; i < length; ++i) all += parts[i] >= least ? parts[i] : 0;
  // a uniform number is at most 1 - 2**-53, so the product rounds to less than all of them: some place exceeds it
  const double target = s.uniform * all;
  for (int64_t i = 0; i < length; ++i) {
    reached += parts[i] >= least ? parts[i] : 0;
    if (reached > target) return i;
  }
  return length;
}

}  // namespace

// Ids (R,) int64 of logits (R, V) float32. settings: (R, 5) float64, of each row its temperature (0: the first of the
// largest), top_k, top_p, min_p and a number in [0, 1) to draw by; they mean what SamplingParams says of them. A row
// that is not finite gets any id.
torch::stable::Tensor sample(const torch::stable::Tensor& given, const torch::stable::Tensor& settings) {
  const auto logits = torch::stable::contiguous(given), rules = torch::stable::contiguous(settings);
  const int64_t rows = logits.size(0), length = logits.size(1);
  std::vector<int64_t> shape{rows};
  auto ids = torch::stable::new_empty(logits, shape, torch::headeronly::ScalarType::Long);
  auto row = [&](int64_t r) {
    static thread_local Floats parts;
    static thread_local std::vector<int64_t> order;
    Settings s;
    std::memcpy(&s, static_cast<const double*>(rules.data_ptr()) + 5 * r, sizeof s);
    const int64_t id = draw(static_cast<const float*>(logits.data_ptr()) + r * length, length, s, parts, order);
    static_cast<int64_t*>(ids.data_ptr())[r] = std::min(id, length - 1);
  };
  if (rows == 1) {
    row(0);
  } else {
    Crew::of(torch::stable::get_num_threads()).run([&](int64_t part, int64_t parts) {
      for (int64_t r = part; r < rows; r += parts) row(r);
    });
  }
  return ids;
}

STABLE_TORCH_LIBRARY_IMPL(modicum, CPU, m) { m.impl("sample", TORCH_BOX(&sample)); }
