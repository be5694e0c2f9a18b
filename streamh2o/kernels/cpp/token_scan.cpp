// For a CPU: attention with an eviction after every query. What it gives is what `token_scan.attend_scan` gives in plain
// torch; all is computed in float32.
//
// A head of keys is taken at a time, with the group of query heads that looks at it. Every slot has a column of its own
// until the end. Its key is rotated once, to a place where a query that moves on by one place a token has the right
// distance to it. Sinks, and with rolled positions the middle too, keep their distance to the newest query instead, so
// a second copy of the query stands still; there an eviction moves the younger columns one place back.

#include <numeric>
#include <tuple>

#include "math.h"

namespace {

constexpr int64_t kVectors = kLanes == 16 ? 4 : 2;  // of a row of a product held in registers
constexpr int64_t kRows = 4;                        // of a product held in registers
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// n floats that start where a vector may, n a multiple of one: loads across two lines of the cache take twice as long.
class Floats {
 public:
  explicit Floats(int64_t n, float value = 0.f) : vectors_(n / kLanes, Vec(value)) {}
  float* data() { return reinterpret_cast<float*>(vectors_.data()); }
  float& operator[](int64_t i) { return data()[i]; }

 private:
  std::vector<Vec> vectors_;
};

template <int64_t rows, int64_t vectors>
void tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c, int64_t c_stride) {
  Vec sums[rows][vectors];
  for (auto& row : sums)
    for (auto& sum : row) sum = Vec(0.f);
  for (int64_t k = 0; k < depth; ++k) {
    Vec part[vectors];
#pragma GCC unroll 4
    for (int64_t v = 0; v < vectors; ++v) part[v] = Vec::loadu(b + k * b_stride + v * kLanes);
#pragma GCC unroll 4
    for (int64_t r = 0; r < rows; ++r) {
      const Vec factor(a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int64_t v = 0; v < vectors; ++v) sums[r][v] = at::vec::fmadd(factor, part[v], sums[r][v]);
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t v = 0; v < vectors; ++v) sums[r][v].store(c + r * c_stride + v * kLanes);
}

template <int64_t rows>
void multiply_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, int64_t n, float* c,
                   int64_t c_stride) {
  int64_t j = 0;
  for (; j + kVectors * kLanes <= n; j += kVectors * kLanes)
    tile<rows, kVectors>(a, a_stride, b + j, b_stride, depth, c + j, c_stride);
  for (; j < n; j += kLanes) tile<rows, 1>(a, a_stride, b + j, b_stride, depth, c + j, c_stride);
}

// c [rows][n] = a [rows][depth] times b [depth][n], n a multiple of a vector.
void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t rows, int64_t depth, int64_t n,
              float* c, int64_t c_stride) {
  for (int64_t r = 0; r < rows; r += kRows) {
    const int64_t here = std::min(kRows, rows - r);
    const auto way = here == 4   ? multiply_rows<4>
                     : here == 3 ? multiply_rows<3>
                     : here == 2 ? multiply_rows<2>
                                 : multiply_rows<1>;
    way(a + r * a_stride, a_stride, b, b_stride, depth, n, c + r * c_stride, c_stride);
  }
}

struct Angles {
  const float *cos, *sin;  // [positions][half]
  int64_t half;            // pairs of a head that are rotated
  bool interleaved;        // a pair is 2d and 2d + 1; else d and d + half

  int64_t first(int64_t d) const { return interleaved ? 2 * d : d; }
  int64_t second(int64_t d) const { return interleaved ? 2 * d + 1 : d + half; }

  // One head's vector x [dim] at a position, which may be negative, times `scale`; component d goes to out[d * stride].
  void turn(const float* x, int64_t dim, int64_t position, float scale, float* out, int64_t stride) const {
    const float *const c = cos + std::abs(position) * half, *const s = sin + std::abs(position) * half;
    const float signed_scale = position < 0 ? -scale : scale;
    for (int64_t d = 0; d < half; ++d) {
      const float x1 = x[first(d)], x2 = x[second(d)], co = c[d] * scale, si = s[d] * signed_scale;
      out[first(d) * stride] = x1 * co - x2 * si;
      out[second(d) * stride] = x2 * co + x1 * si;
    }
    for (int64_t d = 2 * half; d < dim; ++d) out[d * stride] = x[d] * scale;
  }

  // The columns begin .. end of keys [dim][columns], `steps` places back.
  void back(float* keys, int64_t columns, int64_t begin, int64_t end, int64_t steps) const {
    for (int64_t d = 0; d < half; ++d) {
      float *__restrict x1 = keys + first(d) * columns, *__restrict x2 = keys + second(d) * columns;
      const float c = cos[steps * half + d], s = sin[steps * half + d];
      for (int64_t j = begin; j < end; ++j) {
        const float x = x1[j], y = x2[j];
        x1[j] = x * c + y * s;
        x2[j] = y * c - x * s;
      }
    }
  }
};

// Logits [n] plus `hidden` [n], to probabilities; n is a multiple of a vector.
void softmax(float* row, const float* hidden, int64_t n) {
  Vec most(-kInfinity), total(0.f);
  for (int64_t j = 0; j < n; j += kLanes) {
    const Vec x = Vec::loadu(row + j) + Vec::loadu(hidden + j);
    x.store(row + j);
    most = at::vec::maximum(most, x);
  }
  const float largest = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, most);
  for (int64_t j = 0; j < n; j += kLanes) {
    const Vec x = (Vec::loadu(row + j) - Vec(largest)).exp_u20();
    x.store(row + j);
    total = total + x;
  }
  const float sum = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, total);
  const Vec scale(std::isfinite(largest) ? 1.f / sum : std::nanf(""));  // the exponential hides what is not a number
  for (int64_t j = 0; j < n; j += kLanes) (Vec::loadu(row + j) * scale).store(row + j);
}

// scores [n] fade, and the first `reached` get `weight` times the probabilities [rows][n].
void receive(float* scores, const float* probabilities, int64_t stride, int64_t rows, int64_t n, int64_t reached,
             float weight, float fade) {
  for (int64_t j = 0; j < n; j += kLanes) {
    Vec sum(0.f);
    for (int64_t r = 0; r < rows; ++r) sum = sum + Vec::loadu(probabilities + r * stride + j);
    if (j + kLanes > reached) sum = Vec::set(Vec(0.f), sum, std::max<int64_t>(0, reached - j));
    (Vec::loadu(scores + j) * Vec(fade) + sum * Vec(weight)).store(scores + j);
  }
}

struct Rule {
  int64_t sinks, hitters, sink_distance, far;
  float weight, fade, scaling;
  bool rolled;
  const float* divisors;  // of a score, by age; none: 1
  int64_t ages;
};

// One head of keys: query [group] heads of [C][dim], keys [n + C][dim], values [n + C][value_dim], scores and
// source_index [n + C]; out as query, kept [hitters].
template <typename T>
void scan_head(const T* query, int64_t head_stride, int64_t query_stride, int64_t group, int64_t chunk, int64_t dim,
               const T* keys, int64_t key_stride, const T* values, int64_t value_stride, int64_t value_dim, int64_t slots,
               float* scores, const int64_t* source_index, const Angles& angles, const Rule& rule, T* out,
               int64_t* kept) {
  const int64_t n = slots - chunk, middle = rule.sinks + rule.hitters;
  const int64_t columns = padded(slots, kLanes), width = padded(value_dim, kLanes);
  const int64_t seen = source_index[n];
  Floats placed(dim * columns), mixed(slots * width), hidden(columns, -kInfinity), score(columns), worth(columns);
  Floats logits(group * columns), near(group * columns), result(group * width);
  std::vector<float> row(dim), still(group * dim), moving(group * dim);
  std::vector<int32_t> age(columns, 0);  // before the first query
  std::vector<int64_t> order(rule.hitters + 1);
  std::copy_n(scores, slots, score.data());
  std::iota(order.begin(), order.end(), rule.sinks);

  const auto add = [&](int64_t j) {
    const int64_t position = rule.rolled || j < rule.sinks ? j : source_index[j] - seen;
    at::vec::convert(keys + j * key_stride, row.data(), dim);
    angles.turn(row.data(), dim, position, 1.f, placed.data() + j, columns);
    at::vec::convert(values + j * value_stride, mixed.data() + j * width, value_dim);
    hidden[j] = 0.f;
    age[j] = std::min(seen - source_index[j], rule.ages);
  };
  for (int64_t j = 0; j < n; ++j) add(j);

  for (int64_t i = 0; i < chunk; ++i) {
    const int64_t used = n + i + 1, filled = padded(used, kLanes), newest = middle + i;  // that leaves the window now
    add(n + i);
    for (int64_t g = 0; g < group; ++g) {
      at::vec::convert(query + g * head_stride + i * query_stride, row.data(), dim);
      angles.turn(row.data(), dim, rule.sink_distance, rule.scaling, still.data() + g * dim, 1);
      angles.turn(row.data(), dim, rule.rolled ? n + i : i, rule.scaling, moving.data() + g * dim, 1);
    }
    const int64_t edge = rule.rolled ? newest : rule.sinks, from = edge / kLanes * kLanes;
    multiply(moving.data(), dim, placed.data() + from, columns, group, dim, filled - from, logits.data() + from, columns);
    multiply(still.data(), dim, placed.data(), columns, group, dim, padded(edge, kLanes), near.data(), columns);
    for (int64_t g = 0; g < group; ++g) {
      std::copy_n(near.data() + g * columns, edge, logits.data() + g * columns);
      softmax(logits.data() + g * columns, hidden.data(), filled);
    }
    multiply(logits.data(), columns, mixed.data(), width, group, used, width, result.data(), width);
    for (int64_t g = 0; g < group; ++g)
      at::vec::convert(result.data() + g * width, out + (g * chunk + i) * value_dim, value_dim);
    receive(score.data(), logits.data(), columns, group, filled, used - rule.far, rule.weight, rule.fade);

    order.back() = newest;
    const float* best = score.data();
    if (rule.divisors) {
      const int32_t now = i + 1, last = rule.ages - 1;
      for (int64_t j = rule.sinks; j <= newest; ++j) {
        const float divisor = rule.divisors[std::min(age[j] + now, last)];
        worth[j] = divisor == kInfinity ? -kInfinity : score[j] / divisor;
      }
      best = worth.data();
    }
    int64_t least = 0;
    for (int64_t k = 1; k <= rule.hitters; ++k)
      if (best[order[k]] < best[order[least]]) least = k;
    const int64_t evicted = order[least];
    hidden[evicted] = -kInfinity;
    order.erase(order.begin() + least);
    order.push_back(0);
    if (rule.rolled) {
      angles.back(placed.data(), columns, newest, newest + 1, i);
      angles.back(placed.data(), columns, evicted + 1, newest + 1, 1);
    }
  }
  std::copy_n(order.begin(), rule.hitters, kept);
  std::copy_n(score.data(), slots, scores);
}

template <typename T>
void scan(const Tensor& query, const Tensor& keys, const Tensor& values, Tensor& scores, const Tensor& source_index,
          const Angles& angles, const Rule& rule, Tensor& output, Tensor& kept) {
  const int64_t kv_heads = keys.size(1), group = query.size(1) / kv_heads, chunk = query.size(2), dim = query.size(3);
  const int64_t slots = keys.size(2), value_dim = values.size(3);
  at::parallel_for(0, query.size(0) * kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / kv_heads, h = i % kv_heads;
      scan_head<T>(query.const_data_ptr<T>() + b * query.stride(0) + h * group * query.stride(1), query.stride(1),
                   query.stride(2), group, chunk, dim,
                   keys.const_data_ptr<T>() + b * keys.stride(0) + h * keys.stride(1), keys.stride(2),
                   values.const_data_ptr<T>() + b * values.stride(0) + h * values.stride(1), values.stride(2), value_dim,
                   slots, scores.data_ptr<float>() + b * scores.stride(0) + h * scores.stride(1),
                   source_index.const_data_ptr<int64_t>() + b * source_index.stride(0) + h * source_index.stride(1),
                   angles, rule, output.data_ptr<T>() + i * group * chunk * value_dim,
                   kept.data_ptr<int64_t>() + i * rule.hitters);
    }
  });
}

// query [batch, heads, C, dim], keys and values [batch, kv_heads, n + C, dim], not rotated; scores (changed) and
// source_index [batch, kv_heads, n + C]; cos, sin [positions, rotary dim / 2]; divisors [ages], the last for all older
// ones. Returns the output [batch, heads, C, value dim] and the columns kept [batch, kv_heads, hitters].
std::tuple<Tensor, Tensor> attend_scan(const Tensor& query, const Tensor& keys, const Tensor& values, Tensor& scores,
                                       const Tensor& source_index, const Tensor& cos, const Tensor& sin,
                                       const std::optional<Tensor>& divisors, int64_t sinks, int64_t hitters,
                                       int64_t sink_distance, int64_t far, double weight, double fade, double scaling,
                                       bool interleaved, bool rolled) {
  const int64_t chunk = query.size(2), slots = keys.size(2), n = slots - chunk, positions = cos.size(0);
  TORCH_CHECK(query.stride(3) == 1 && keys.stride(3) == 1 && values.stride(3) == 1 && scores.stride(2) == 1 &&
                  source_index.stride(2) == 1 && cos.is_contiguous() && sin.is_contiguous(),
              "rows must lie in one piece");
  TORCH_CHECK(sinks >= 0 && hitters >= 0 && sinks + hitters <= n && chunk > 0, "the cache before the queries must be full");
  const int64_t newest = source_index.select(2, n).max().item<int64_t>();
  const int64_t oldest = rolled || sinks == n ? newest : source_index.slice(2, sinks, n).min().item<int64_t>();
  TORCH_CHECK(std::max({rolled ? slots : chunk, newest - oldest + 1, sink_distance + 1}) <= positions,
              "a slot is farther away than the model has positions");
  const Angles angles{cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), cos.size(1), interleaved};
  const Rule rule{sinks, hitters, sink_distance, far, float(weight), float(fade), float(scaling), rolled,
                  divisors ? divisors->const_data_ptr<float>() : nullptr, divisors ? divisors->size(0) : 0};
  Tensor output = at::empty({query.size(0), query.size(1), chunk, values.size(3)}, query.options());
  Tensor kept = at::empty({keys.size(0), keys.size(1), hitters}, source_index.options());
  const auto way = query.scalar_type() == at::kBFloat16 ? scan<at::BFloat16> : scan<float>;
  way(query, keys, values, scores, source_index, angles, rule, output, kept);
  return {output, kept};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(streamh2o, library) {
  library.def(
      "attend_scan(Tensor query, Tensor keys, Tensor values, Tensor(a!) scores, Tensor source_index, Tensor cos, "
      "Tensor sin, Tensor? divisors, int sinks, int hitters, int sink_distance, int far, float weight, float fade, "
      "float scaling, bool interleaved, bool rolled) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(streamh2o, CPU, library) { library.impl("attend_scan", attend_scan); }
