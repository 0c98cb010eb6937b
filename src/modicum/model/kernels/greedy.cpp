// The most probable token of each row, and its logarithm of probability.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "crew.h"
#include "lanes.h"

namespace {

// The first of the largest among those that `never` (count ids, ascending) does not name; 0 where there is none.
int64_t best_allowed(const float* x, int64_t length, const int64_t* never, int64_t count) {
  float most = -std::numeric_limits<float>::infinity();
  int64_t begin = 0, start = 0, stop = 0;  // those between start and stop hold it
  for (int64_t i = 0; i <= count; ++i) {
    const int64_t end = i < count ? never[i] : length;
    const float here = largest(x + begin, end - begin);
    if (here > most) most = here, start = begin, stop = end;
    begin = end + 1;
  }
  const float* found = std::find(x + start, x + stop, most);
  return found == x + stop ? 0 : found - x;
}

}  // namespace

// Of logits (R, V) float32: ids (R,) int64, their logits less the totals, and the totals, which are the logarithms of
// the sums of e to all logits; both (R,) float32, and not finite where a logit is NaN or +infinity.
std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> greedy(
    const torch::stable::Tensor& given, const torch::stable::Tensor& never) {
  const auto logits = torch::stable::contiguous(given);
  const int64_t rows = logits.size(0), length = logits.size(1), count = never.size(0);
  auto ids = torch::stable::new_empty(never, {rows});
  auto logprobs = torch::stable::new_empty(logits, {rows}), totals = torch::stable::new_empty(logits, {rows});
  const auto* ends = static_cast<const int64_t*>(never.data_ptr());
  auto row = [&](int64_t r) {
    const float* x = static_cast<const float*>(logits.data_ptr()) + r * length;
    const float most = largest(x, length), sum = most + std::log(sum_of_exponentials(x, length, most));
    const int64_t id = best_allowed(x, length, ends, count);
    static_cast<int64_t*>(ids.data_ptr())[r] = id;
    static_cast<float*>(logprobs.data_ptr())[r] = x[id] - sum;
    static_cast<float*>(totals.data_ptr())[r] = sum;
  };
  if (rows == 1) {
    row(0);
  } else {
    Crew::of(torch::stable::get_num_threads()).run([&](int64_t part, int64_t parts) {
      for (int64_t r = part; r < rows; r += parts) row(r);
    });
  }
  return {ids, logprobs, totals};
}

STABLE_TORCH_LIBRARY_IMPL(modicum, CPU, m) { m.impl("greedy", TORCH_BOX(&greedy)); }
