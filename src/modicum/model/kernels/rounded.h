// Products of rounded matrices, for calls that hold more than one; quantized_linear.cpp says how they lie.
#pragma once

#include <cstdint>
#include <vector>

// Rows of activations, rounded to 8 bits by blocks of 32: values (rows, blocks, 32), scale and sum of each block. The
// memory is reserved before several threads take rows.
struct RoundedRows {
  std::vector<int8_t> values;
  std::vector<float> scale;
  std::vector<int32_t> sum;
  void reserve(int64_t rows, int64_t inputs);
  // Rows first to last of x (rows, inputs). What is not finite makes its block's scale NaN.
  void take(const float* x, int64_t first, int64_t last, int64_t inputs);
};

struct RoundedMatrix {
  const uint8_t* packed;
  const float* scale;
  int64_t bits, outputs, inputs, panels, groups;
};

// Of the product of `rows` rows by a matrix, the outputs in panels first to last, into out (rows, outputs).
void multiply_rounded(const RoundedRows& x, int64_t rows, const RoundedMatrix& m, float* out, int64_t first,
                      int64_t last);
