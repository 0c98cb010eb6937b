// A piece of a prompt through a decoder whose matrices are rounded, in one call: only the last row's result is wanted.
//
// Each thread takes a share of the rows through all that asks for no other row, and a share of the heads through
// attention. A row's result depends on the tokens up to it alone, bit for bit, wherever the pieces are cut; where all
// is finite, since what comes later in its tile is weighed with 0.
#include "decoder.h"

namespace {

constexpr int64_t ROWS = 12, COLUMNS = 2 * WIDTH;  // of a tile: 24 registers of sums
constexpr int64_t BATCH = 48;                      // rows whose numbers between two products stay near the processor

// out[r][0 to 31] = sum over k of a[r][k] * b[k][0 to 31], for COUNT rows. b: (depth, 32).
template <int COUNT>
void tile(const float* a, int64_t stride, const float* b, int64_t depth, float* out, int64_t out_stride) {
  Lanes sums[COUNT][2] = {};
  for (int64_t k = 0; k < depth; ++k, b += COLUMNS) {
    const Lanes left = read(b), right = read(b + WIDTH);
    for (int r = 0; r < COUNT; ++r) {
      const float each = a[r * stride + k];
      sums[r][0] += each * left;
      sums[r][1] += each * right;
    }
  }
  for (int r = 0; r < COUNT; ++r) {
    write(out + r * out_stride, sums[r][0]);
    write(out + r * out_stride + WIDTH, sums[r][1]);
  }
}

// One group's keys and values up to `count`, as tile reads them: panels of 32 keys, (head, 32) each, and of 32 numbers
// of the values, (count, 32) each; zeros fill the last ones up.
template <typename T>
void lay_out(const T* keys, const T* values, int64_t count, int64_t head, Floats& k, Floats& v) {
  const int64_t key_panels = (count + COLUMNS - 1) / COLUMNS, value_panels = (head + COLUMNS - 1) / COLUMNS;
  k.resize(key_panels * head * COLUMNS);
  v.resize(value_panels * count * COLUMNS);
  std::fill(k.end() - head * COLUMNS, k.end(), 0.0f);
  std::fill(v.end() - count * COLUMNS, v.end(), 0.0f);
  for (int64_t p = 0; p < key_panels; ++p) {
    const int64_t first = p * COLUMNS, here = std::min(COLUMNS, count - first);
    for (int64_t i = 0; i < head; ++i)
      for (int64_t s = 0; s < here; ++s) k[(p * head + i) * COLUMNS + s] = widen(keys[(first + s) * head + i]);
  }
  for (int64_t p = 0; p < value_panels; ++p) {
    const int64_t first = p * COLUMNS, here = std::min(COLUMNS, head - first);
    for (int64_t s = 0; s < count; ++s)
      for (int64_t i = 0; i < here; ++i) v[(p * count + s) * COLUMNS + i] = widen(values[s * head + first + i]);
  }
}

// Attention of COUNT rows of one head, the first of which sees `seen` keys and each other one more than the one before.
template <int COUNT>
void attend_rows(const float* q, int64_t stride, const Floats& k, const Floats& v, int64_t count, int64_t seen,
                 int64_t head, float* scores, int64_t room, float* mixed, float* out) {
  const int64_t last = seen + COUNT - 1;
  for (int64_t s = 0; s < last; s += COLUMNS) tile<COUNT>(q, stride, &k[s * head], head, scores + s, room);
  float sums[COUNT];
  for (int r = 0; r < COUNT; ++r) {
    float* mine = scores + r * room;
    sums[r] = softmax_parts(mine, seen + r);
    std::fill(mine + seen + r, mine + last, 0.0f);
  }
  for (int64_t i = 0; i < head; i += COLUMNS) {
    tile<COUNT>(scores, room, &v[i * count], last, mixed, COLUMNS);
    for (int r = 0; r < COUNT; ++r)
      for (int64_t j = 0; j < std::min(COLUMNS, head - i); ++j)
        out[r * stride + i + j] = mixed[r * COLUMNS + j] / sums[r];
  }
}

// What one thread works in.
struct Room {
  Floats normal, more, keys, values, gate, up, laid_k, laid_v, scores, mixed, plain;
  RoundedRows rounded;
  void reserve(const Decoder& d) {
    normal.resize(BATCH * d.width);
    more.resize(BATCH * std::max(d.width, d.queries()));
    for (Floats* each : {&keys, &values}) each->resize(BATCH * d.groups * d.head);
    for (Floats* each : {&gate, &up}) each->resize(BATCH * d.inner);
    plain.resize(2 * d.head);
    rounded.reserve(BATCH, d.widest());
  }
};

// Attention of the rows from `from` on, row 0 being the token at `start` of the slot: one thread's share.
template <typename T>
void attend(const Decoder& d, const Layer& l, const float* q, int64_t slot, int64_t start, int64_t from, int64_t rows,
            float* out, Room& room, int64_t part, int64_t parts) {
  const int64_t head = d.head, stride = d.queries(), shared = d.heads / d.groups, count = start + rows;
  // whole groups for each thread where they come out even; else all of them for all, and to each so many of the tiles
  const int64_t stripes = d.groups % parts ? parts : 1, wide = (count + COLUMNS - 1) / COLUMNS * COLUMNS + WIDTH;
  room.scores.resize(ROWS * wide);
  room.mixed.resize(ROWS * COLUMNS);
  for (int64_t unit = part; unit < d.groups * stripes; unit += parts) {
    const int64_t g = unit / stripes, at = (slot * d.groups + g) * d.capacity * head;
    lay_out(static_cast<const T*>(l.keys) + at, static_cast<const T*>(l.values) + at, count, head, room.laid_k,
            room.laid_v);
    auto heads = [&](auto attend_some, int64_t row) {
      for (int64_t n = g * shared; n < (g + 1) * shared; ++n)
        attend_some(q + row * stride + n * head, stride, room.laid_k, room.laid_v, count, start + row + 1, head,
                    room.scores.data(), wide, room.mixed.data(), out + row * stride + n * head);
    };
    for (int64_t row = from + unit % stripes * ROWS; row < rows; row += stripes * ROWS) {
      if (row + ROWS <= rows)
        heads(attend_rows<ROWS>, row);
      else
        for (int64_t r = row; r < rows; ++r) heads(attend_rows<1>, r);
    }
  }
}

void add(const float* more, float* stream, int64_t count) {
  for (int64_t i = 0; i < count; ++i) stream[i] += more[i];
}

// What a batch of rows gives to attention: keys and values into the cache, and queries, turned and scaled, of the rows
// from `from` on.
template <typename T>
void before_attention(const Decoder& d, const Layer& l, const float* stream, int64_t slot, int64_t start, int64_t first,
                      int64_t last, int64_t from, float* q, Room& room) {
  const int64_t rows = last - first, head = d.head, queries = d.queries();
  for (int64_t r = 0; r < rows; ++r)
    normalize(stream + (first + r) * d.width, l.before, &room.normal[r * d.width], d.width, d.eps);
  room.rounded.take(room.normal.data(), 0, rows, d.width);
  multiply(room.rounded, rows, l.k, room.keys.data(), 0, l.k.rounded.panels);
  multiply(room.rounded, rows, l.v, room.values.data(), 0, l.v.rounded.panels);
  float *plain = room.plain.data(), *turned = plain + head;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < d.groups; ++g) {
      const int64_t place = start + first + r, at = ((slot * d.groups + g) * d.capacity + place) * head;
      turn(d, &room.keys[(r * d.groups + g) * head], l.k_gain, place, plain, turned);
      for (int64_t i = 0; i < head; ++i) put(static_cast<T*>(l.keys) + at + i, turned[i]);
      const float* value = &room.values[(r * d.groups + g) * head];
      for (int64_t i = 0; i < head; ++i) put(static_cast<T*>(l.values) + at + i, value[i]);
    }
  const int64_t passed = std::max(first, from) - first;
  if (passed >= rows) return;
  if (passed) room.rounded.take(&room.normal[passed * d.width], 0, rows - passed, d.width);
  multiply(room.rounded, rows - passed, l.q, room.more.data(), 0, l.q.rounded.panels);
  const float scale = 1.0f / std::sqrt(float(head));
  for (int64_t r = first + passed; r < last; ++r)
    for (int64_t n = 0; n < d.heads; ++n) {
      float* to = q + r * queries + n * head;
      turn(d, &room.more[(r - first - passed) * queries + n * head], l.q_gain, start + r, plain, to);
      for (int64_t i = 0; i < head; ++i) to[i] *= scale;
    }
}

void after_attention(const Decoder& d, const Layer& l, const float* mixed, int64_t first, int64_t last, float* stream,
                     Room& room) {
  const int64_t rows = last - first;
  room.rounded.take(mixed + first * d.queries(), 0, rows, d.queries());
  multiply(room.rounded, rows, l.o, room.more.data(), 0, l.o.rounded.panels);
  add(room.more.data(), stream + first * d.width, rows * d.width);
  for (int64_t r = 0; r < rows; ++r)
    normalize(stream + (first + r) * d.width, l.between, &room.normal[r * d.width], d.width, d.eps);
  room.rounded.take(room.normal.data(), 0, rows, d.width);
  multiply(room.rounded, rows, l.gate, room.gate.data(), 0, l.gate.rounded.panels);
  multiply(room.rounded, rows, l.up, room.up.data(), 0, l.up.rounded.panels);
  gated(room.gate.data(), room.up.data(), room.gate.data(), rows * d.inner);
  room.rounded.take(room.gate.data(), 0, rows, d.inner);
  multiply(room.rounded, rows, l.down, room.more.data(), 0, l.down.rounded.panels);
  add(room.more.data(), stream + first * d.width, rows * d.width);
}

}  // namespace

// What the head reads, (1, hidden) float32, after the last of T tokens (T,) int64, that come after the first `start` of
// a slot. Their keys and values are put into the cache.
Tensor read_prompt(const Tensor& plan, const Tensor& ids, int64_t slot, int64_t start) {
  const Decoder& d = decoder_of(plan);
  const int64_t rows = ids.size(0), width = d.width;
  const auto* id = static_cast<const int64_t*>(ids.data_ptr());
  check_ids(d, id, rows);
  STD_TORCH_CHECK(rows > 0, "a prompt of no tokens");
  STD_TORCH_CHECK(0 <= slot && slot < d.slots && 0 <= start && start + rows <= d.capacity,
                  start + rows, " tokens do not fit into slot ", slot);
  Tensor out = torch::stable::new_empty(ids, {1, width}, ScalarType::Float);
  static thread_local Floats kept[3];
  const int64_t widths[] = {width, d.queries(), d.queries()};
  for (int i = 0; i < 3; ++i) kept[i].resize(rows * widths[i]);
  float *stream = kept[0].data(), *q = kept[1].data(), *mixed = kept[2].data();
  Crew& crew = Crew::of(torch::stable::get_num_threads());
  crew.run([&](int64_t part, int64_t parts) {
    static thread_local Room room;
    room.reserve(d);
    const int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
    for (int64_t r = begin; r < end; ++r) embed(d.embedding, id[r], stream + r * width);
    for (const Layer& l : d) {
      // of the last layer nothing is read but the keys, the values and the last row
      const int64_t from = &l + 1 == d.end() ? rows - 1 : 0;
      const auto before = d.half_cache ? before_attention<bfloat16> : before_attention<float>;
      for (int64_t first = begin; first < end; first += BATCH)
        before(d, l, stream, slot, start, first, std::min(end, first + BATCH), from, q, room);
      crew.wait(part);
      const auto attention = d.half_cache ? attend<bfloat16> : attend<float>;
      attention(d, l, q, slot, start, from, rows, mixed, room, part, parts);
      crew.wait(part);
      for (int64_t first = std::max(begin, from); first < end; first += BATCH)
        after_attention(d, l, mixed, first, std::min(end, first + BATCH), stream, room);
    }
    if (part == parts - 1)
      normalize(stream + (rows - 1) * width, d.gain, static_cast<float*>(out.data_ptr()), width, d.eps);
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(modicum, CPU, m) { m.impl("read_prompt", TORCH_BOX(&read_prompt)); }
