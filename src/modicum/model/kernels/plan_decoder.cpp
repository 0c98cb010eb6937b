// All that a pass asks of a decoder, found once: to hand its two hundred tensors over takes a tenth of a token's time.
#include "decoder.h"

// The plan is a Decoder and its layers, as bytes, and holds addresses: what it was made of must outlive it.
//
// weights: for each layer two gains, two of queries and keys (empty: none), and seven matrices in the order of q, k, v,
// o, gate, up, down; then the last gain, the head and the embedding. A matrix is three tensors: its values, its scales
// where it is rounded, and its bias, either empty where there is none. Gains and biases are float32.
// bits: 0 for each full matrix. sizes: hidden, heads, groups, head, intermediate, vocabulary, interleaved.
// keys, values: of each layer (slots, groups, capacity, head). cos, sin: (capacity, head) float32, of each place.
Tensor plan_decoder(std::vector<Tensor> weights, std::vector<int64_t> bits, std::vector<int64_t> sizes, double eps,
                    std::vector<Tensor> keys, std::vector<Tensor> values, const Tensor& cos, const Tensor& sin) {
  Decoder d{};
  d.width = sizes[0], d.heads = sizes[1], d.groups = sizes[2], d.head = sizes[3], d.inner = sizes[4];
  d.vocabulary = sizes[5], d.interleaved = sizes[6] != 0, d.eps = float(eps);
  d.slots = keys[0].size(0), d.capacity = keys[0].size(2);
  d.half_cache = keys[0].scalar_type() == ScalarType::BFloat16;
  size_t next = 0, number = 0;
  auto gain = [&]() {
    const Tensor& t = weights[next++];
    return t.numel() ? static_cast<const float*>(t.data_ptr()) : nullptr;
  };
  auto matrix = [&](int64_t outputs, int64_t inputs) {
    const Tensor &stored = weights[next], &scale = weights[next + 1];
    next += 2;
    Matrix m{Kind::full, stored.data_ptr(), {}, gain(), outputs, inputs};
    if (const int64_t wide = bits[number++]) {
      m.kind = Kind::rounded;
      m.rounded = {static_cast<const uint8_t*>(m.values), static_cast<const float*>(scale.data_ptr()), wide, outputs,
                   inputs, stored.size(0), scale.size(1)};
    } else if (stored.scalar_type() == ScalarType::BFloat16) {
      m.kind = Kind::half;
    }
    return m;
  };
  const int64_t groups = d.groups * d.head;
  std::vector<Layer> layers;
  for (size_t i = 0; i < keys.size(); ++i)
    layers.push_back({gain(), gain(), gain(), gain(), matrix(d.queries(), d.width), matrix(groups, d.width),
                      matrix(groups, d.width), matrix(d.width, d.queries()), matrix(d.inner, d.width),
                      matrix(d.inner, d.width), matrix(d.width, d.inner), keys[i].data_ptr(), values[i].data_ptr()});
  d.gain = gain();
  d.out = matrix(d.vocabulary, d.width);
  d.embedding = matrix(d.vocabulary, d.width);
  d.cos = static_cast<const float*>(cos.data_ptr()), d.sin = static_cast<const float*>(sin.data_ptr());
  const int64_t bytes = layers.size() * sizeof(Layer);
  Tensor plan = torch::stable::new_empty(cos, {int64_t(sizeof(Decoder)) + bytes}, ScalarType::Byte);
  char* place = static_cast<char*>(plan.data_ptr());
  d.layers = reinterpret_cast<const Layer*>(place + sizeof(Decoder));
  d.count = layers.size();
  std::memcpy(place, &d, sizeof d);
  std::memcpy(place + sizeof d, layers.data(), bytes);
  return plan;
}

STABLE_TORCH_LIBRARY_IMPL(modicum, CPU, m) { m.impl("plan_decoder", TORCH_BOX(&plan_decoder)); }
