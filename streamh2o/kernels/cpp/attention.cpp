// For a CPU: attention of a chunk over the cache with column sums.
//
// Attention takes a block of one head's queries at a time: logits, exponentials, output and sums before the block leaves
// the core's cache. Products are oneDNN's (brgemm: AMX or AVX-512 where the machine has them), sums and exponentials are
// float32. What the results mean is said by the plain torch function that this replaces: `attention.attend_and_sum`.

#include "math.h"

#include <ATen/ops/zeros.h>

#include <tuple>

namespace {

constexpr int64_t kKeys = 128;    // keys of one product, where there are not as many as
constexpr int64_t kManyKeys = 512;
constexpr int64_t kQueries = 64;  // queries of a block
constexpr int64_t kFew = 4;       // queries that need no blocks
constexpr int64_t kTogether = 8;  // rows whose sums are made at once

// Values first .. last of [slots][dim], to [last / pair][dim] of four bytes; zeros beyond `slots`.
void pack_values(const float* values, int64_t stride, int64_t first, int64_t last, int64_t slots, int64_t dim,
                 float* packed) {
  for (int64_t j = first; j < last; ++j)
    for (int64_t d = 0; d < dim; ++d) packed[j * dim + d] = j < slots ? values[j * stride + d] : 0.f;
}

void pack_values(const at::BFloat16* values, int64_t stride, int64_t first, int64_t last, int64_t slots, int64_t dim,
                 at::BFloat16* packed) {
  const auto* from = reinterpret_cast<const uint16_t*>(values);
  auto* to = reinterpret_cast<uint32_t*>(packed);
  for (int64_t j = first; j < last; j += 2) {
    const uint16_t *even = from + j * stride, *odd = even + stride;
    uint32_t* row = to + j / 2 * dim;
    if (j + 1 < slots) {
      for (int64_t d = 0; d < dim; ++d) row[d] = even[d] | uint32_t(odd[d]) << 16;
    } else {
      for (int64_t d = 0; d < dim; ++d) row[d] = j < slots ? even[d] : 0;
    }
  }
}

// One row of logits, n (a multiple of kKeys) of which the first `seen` count, to e^(logit - largest): in place, and as
// T in `raised`. Returns their sum, NaN if a logit is.
template <typename T>
float raise(float* row, T* raised, int64_t seen, int64_t n) {
  std::fill(row + seen, row + n, kMinusInfinity);
  const float largest = largest_of(row, n);
  Vec total(0.f), other(0.f);
  for (int64_t j = 0; j < n; j += 2 * kLanes) {
    Vec x = Vec::loadu(row + j), y = Vec::loadu(row + j + kLanes);
    if constexpr (std::is_same_v<T, float>) {
      x = (x - Vec(largest)).exp();
      y = (y - Vec(largest)).exp();
    } else {
      x = power(x, Vec(largest));
      y = power(y, Vec(largest));
      store_half(x, y, raised + j);
    }
    x.store(row + j);
    y.store(row + j + kLanes);
    total = total + x;
    other = other + y;
  }
  const float sum = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, total + other);
  return std::isnan(largest) ? largest : sum;
}

// Add to `sums` what slots receive from a few rows, of which row r counts for the first `seen` + r slots.
void receive(const float* raised, int64_t stride, const float* weights, const float* totals, int64_t rows, int64_t seen,
             int64_t reached, float* sums) {
  float scales[kTogether];
  for (int64_t r = 0; r < kTogether; ++r) scales[r] = r < rows ? weights[r] / totals[r] : 0.f;
  int64_t j = 0;
  if (rows == kTogether) {
    for (; j + kLanes <= std::min(seen, reached); j += kLanes) {
      Vec sum = Vec::loadu(sums + j);
#pragma GCC unroll 8
      for (int64_t r = 0; r < kTogether; ++r)
        sum = at::vec::fmadd(Vec(scales[r]), Vec::loadu(raised + r * stride + j), sum);
      sum.store(sums + j);
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = j; i < std::min(seen + r, reached); ++i) sums[i] += scales[r] * raised[r * stride + i];
}

template <typename T>
void attend(const Tensor& query, const Tensor& keys, const Tensor& values, const float* weights, int64_t far,
            Tensor& output, float* sums) {
  const int64_t batch = query.size(0), heads = query.size(1), chunk = query.size(2), dim = query.size(3);
  const int64_t kv_heads = keys.size(1), slots = keys.size(2), value_dim = values.size(3);
  const int64_t group = heads / kv_heads, past = slots - chunk, columns = padded(slots, kKeys);
  const int64_t reached = std::max<int64_t>(0, slots - far);

  const Tensor packed_keys = at::empty({batch * kv_heads, dim / kPair<T> * columns}, keys.options().dtype(at::kUInt32));
  const Tensor packed_values = at::empty({batch * kv_heads, columns * value_dim}, keys.options());
  const int64_t pieces = columns / kKeys;
  at::parallel_for(0, batch * kv_heads * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t bh = i / pieces, first = i % pieces * kKeys, b = bh / kv_heads, h = bh % kv_heads;
      const T* k = keys.const_data_ptr<T>() + b * keys.stride(0) + h * keys.stride(1);
      const T* v = values.const_data_ptr<T>() + b * values.stride(0) + h * values.stride(1);
      pack_rows(reinterpret_cast<const uint32_t*>(k), keys.stride(2) / kPair<T>, first, first + kKeys, slots,
                dim / kPair<T>, columns, packed_keys.data_ptr<uint32_t>() + bh * dim / kPair<T> * columns);
      pack_values(v, values.stride(2), first, first + kKeys, slots, value_dim,
                  packed_values.data_ptr<T>() + bh * columns * value_dim);
    }
  });

  const int64_t blocks = (chunk + kQueries - 1) / kQueries, threads = at::get_num_threads();
  const Tensor received = at::zeros({weights ? threads : 0, batch * kv_heads, reached}, keys.options().dtype(at::kFloat));
  float* const received_data = received.data_ptr<float>();
  at::parallel_for(0, batch * heads * blocks, 1, [&](int64_t begin, int64_t end) {
    float* const logits = room<float, 0>(kQueries * columns);
    T* const raised = std::is_same_v<T, float> ? nullptr : room<T, 1>(kQueries * columns);
    std::vector<float> sum(kQueries * value_dim), total(kQueries);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t bh = i / blocks, b = bh / heads, h = bh % heads, kv = b * kv_heads + h / group;
      const int64_t start = i % blocks * kQueries, rows = std::min(kQueries, chunk - start);
      const int64_t used = padded(past + start + rows, kKeys);
      const T* q = query.const_data_ptr<T>() + b * query.stride(0) + h * query.stride(1) + start * query.stride(2);
      const T* k = reinterpret_cast<const T*>(packed_keys.const_data_ptr<uint32_t>()) + kv * dim * columns;
      const T* v = packed_values.const_data_ptr<T>() + kv * columns * value_dim;
      for (int64_t j = 0, n; j < used; j += n) {
        n = used - j >= kManyKeys ? kManyKeys : kKeys;
        at::native::cpublas::brgemm(rows, n, dim, query.stride(2), columns, columns, false, q, k + j * kPair<T>,
                                    logits + j, kPair<T> == 2);
      }
      for (int64_t r = 0; r < rows; ++r)
        total[r] = raise(logits + r * columns, raised + (raised ? r * columns : 0),
                         past + start + r + 1, used);
      const T* probabilities;
      if constexpr (std::is_same_v<T, float>) {
        probabilities = logits;
      } else {
        probabilities = raised;
      }
      for (int64_t j = 0, n; j < used; j += n) {
        n = used - j >= kManyKeys ? kManyKeys : kKeys;
        at::native::cpublas::brgemm(rows, value_dim, n, columns, value_dim, value_dim, j > 0, probabilities + j,
                                    v + j * value_dim, sum.data(), kPair<T> == 2);
      }
      T* out = output.data_ptr<T>() + b * output.stride(0) + h * output.stride(1) + start * output.stride(2);
      for (int64_t r = 0; r < rows; ++r) {
        const float scale = 1.f / total[r];
        for (int64_t d = 0; d < value_dim; ++d) out[r * output.stride(2) + d] = T(sum[r * value_dim + d] * scale);
      }
      if (!weights) continue;
      float* const mine = received_data + (at::get_thread_num() * batch * kv_heads + kv) * reached;
      for (int64_t r = 0; r < rows; r += kTogether)
        receive(logits + r * columns, columns, weights + start + r, total.data() + r,
                std::min(kTogether, rows - r), past + start + r + 1 - far, reached, mine);
    }
    at::native::cpublas::brgemm_release(kPair<T> == 2);
  });
  if (weights)
    for (int64_t t = 0; t < threads; ++t)
      for (int64_t j = 0; j < batch * kv_heads * reached; ++j)
        sums[j] += received_data[t * batch * kv_heads * reached + j];
}

// Of a few rows of queries [rows][width] in one head, all logits [rows][columns].
template <typename T>
void few_logits(const float* queries, int64_t rows, int64_t width, const T* keys, int64_t stride, int64_t slots,
                int64_t dim, int64_t columns, float* logits) {
  std::vector<float> row(width);
  for (int64_t j = 0; j < slots; ++j) {
    at::vec::convert(keys + j * stride, row.data(), dim);
    for (int64_t r = 0; r < rows; ++r) {
      Vec dot(0.f);
      for (int64_t d = 0; d < width; d += kLanes)
        dot = at::vec::fmadd(Vec::loadu(queries + r * width + d), Vec::loadu(row.data() + d), dot);
      logits[r * columns + j] = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, dot);
    }
  }
}

#ifdef STREAMH2O_AVX512_BF16
// The same for heads of so many pairs of vectors, whose numbers are bfloat16 anyway.
template <int64_t parts>
void few_logits_of(const float* queries, int64_t rows, int64_t width, const at::BFloat16* keys, int64_t stride,
                   int64_t slots, int64_t columns, float* logits) {
  for (int64_t j = 0; j < slots; j += kLanes)
    for (int64_t r = 0; r < rows; ++r) {
      __m512 dots[kLanes];
      __m512bh query[parts];
      for (int64_t p = 0; p < parts; ++p) {
        const float* const from = queries + r * width + 32 * p;
        query[p] = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + kLanes), _mm512_loadu_ps(from));
      }
      for (int64_t i = 0; i < kLanes; ++i) {
        const at::BFloat16* const key = keys + std::min(j + i, slots - 1) * stride;
        dots[i] = _mm512_setzero_ps();
        for (int64_t p = 0; p < parts; ++p) dots[i] = _mm512_dpbf16_ps(dots[i], pairs(key + 32 * p), query[p]);
      }
      _mm512_storeu_ps(logits + r * columns + j, sums_of(dots));
    }
}
#endif

// The values, weighted: for each of a few rows [rows][width].
template <typename T>
void few_sums(const float* weights, int64_t rows, int64_t columns, const T* values, int64_t stride, int64_t slots,
              int64_t dim, int64_t width, float* sums) {
  constexpr int64_t vectors = 4, together = 4;  // in one piece of a value, and rows
  for (int64_t d = 0; d < width; d += vectors * kLanes)
    for (int64_t first = 0; first < rows; first += together) {
      const int64_t here = std::min(together, rows - first), count = std::min(dim - d, vectors * kLanes);
      Vec sum[together][vectors], part[vectors];
      for (auto& row : sum)
        for (auto& each : row) each = Vec(0.f);
      for (int64_t j = 0; j < slots; ++j) {
        for (int64_t v = 0; v < vectors; v += 2)
          load_two(values + j * stride + d + v * kLanes, std::clamp<int64_t>(count - v * kLanes, 0, kTwo), part[v], part[v + 1]);
#pragma GCC unroll 4
        for (int64_t r = 0; r < together; ++r) {
          if (r >= here) break;
          const Vec share(weights[(first + r) * columns + j]);
#pragma GCC unroll 4
          for (int64_t v = 0; v < vectors; ++v) sum[r][v] = at::vec::fmadd(share, part[v], sum[r][v]);
        }
      }
      for (int64_t r = 0; r < here; ++r)
        for (int64_t v = 0; v < vectors && d + v * kLanes < width; ++v)
          sum[r][v].store(sums + (first + r) * width + d + v * kLanes);
    }
}

// The same for a few queries, as in decoding: nothing is packed, keys and values are read as they lie.
template <typename T>
void attend_few(const Tensor& query, const Tensor& keys, const Tensor& values, const float* weights, int64_t far,
                Tensor& output, float* sums) {
  const int64_t heads = query.size(1), chunk = query.size(2), dim = query.size(3), value_dim = values.size(3);
  const int64_t kv_heads = keys.size(1), slots = keys.size(2), group = heads / kv_heads, rows = group * chunk;
  const int64_t past = slots - chunk, reached = std::max<int64_t>(0, slots - far), columns = padded(slots, kKeys);
  const int64_t width = padded(dim, kLanes), value_width = padded(value_dim, kLanes);
  at::parallel_for(0, query.size(0) * kv_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> queries(rows * width), logits(rows * columns), sum(rows * value_width), total(rows);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / kv_heads, kv = i % kv_heads;
      const T* q = query.const_data_ptr<T>() + b * query.stride(0) + kv * group * query.stride(1);
      const T* k = keys.const_data_ptr<T>() + b * keys.stride(0) + kv * keys.stride(1);
      const T* v = values.const_data_ptr<T>() + b * values.stride(0) + kv * values.stride(1);
      for (int64_t r = 0; r < rows; ++r)  // row r is query r % chunk of the group's head r / chunk
        at::vec::convert(q + r / chunk * query.stride(1) + r % chunk * query.stride(2), queries.data() + r * width, dim);
      bool done = false;
#ifdef STREAMH2O_AVX512_BF16
      if constexpr (!std::is_same_v<T, float>) {
        const auto way = dim == 64 ? few_logits_of<2> : dim == 128 ? few_logits_of<4> : nullptr;
        if ((done = way != nullptr)) way(queries.data(), rows, width, k, keys.stride(2), slots, columns, logits.data());
      }
#endif
      if (!done) few_logits(queries.data(), rows, width, k, keys.stride(2), slots, dim, columns, logits.data());
      for (int64_t r = 0; r < rows; ++r)
        total[r] = raise<float>(logits.data() + r * columns, nullptr, past + r % chunk + 1, columns);
      few_sums(logits.data(), rows, columns, v, values.stride(2), slots, value_dim, value_width, sum.data());
      for (int64_t r = 0; r < rows; ++r) {
        T* const out = output.data_ptr<T>() + b * output.stride(0) + (kv * group + r / chunk) * output.stride(1) +
                       r % chunk * output.stride(2);
        for (int64_t d = 0; d < value_dim; ++d) out[d] = T(sum[r * value_width + d] / total[r]);
        const int64_t seen = weights ? std::min(reached, past + r % chunk + 1 - far) : 0;
        const float scale = weights ? weights[r % chunk] / total[r] : 0.f;
        for (int64_t j = 0; j < seen; ++j) sums[i * reached + j] += scale * logits[r * columns + j];
      }
    }
  });
}

// query [batch, heads, C, dim] rotated and scaled; keys, values [batch, kv_heads, n + C, dim]; weights [C] or none.
std::tuple<Tensor, Tensor> attend_and_sum(const Tensor& query, const Tensor& keys, const Tensor& values,
                                          const std::optional<Tensor>& weights, int64_t far) {
  TORCH_CHECK(query.stride(3) == 1 && keys.stride(3) == 1 && values.stride(3) == 1, "a head must lie in one piece");
  TORCH_CHECK(query.size(3) % 2 == 0 && keys.stride(2) % 2 == 0, "a head must have an even size");
  // In the order of the queries, as the model goes on with it.
  Tensor output = at::empty({query.size(0), query.size(2), query.size(1), values.size(3)}, query.options()).transpose(1, 2);
  const int64_t reached = weights ? std::max<int64_t>(0, keys.size(2) - far) : 0;
  Tensor sums = at::zeros({keys.size(0), keys.size(1), reached}, query.options().dtype(at::kFloat));
  const float* w = weights ? weights->const_data_ptr<float>() : nullptr;
  const bool few = query.size(2) <= kFew, half_precision = query.scalar_type() == at::kBFloat16;
  const auto way = half_precision ? (few ? attend_few<at::BFloat16> : attend<at::BFloat16>)
                                  : (few ? attend_few<float> : attend<float>);
  way(query, keys, values, w, far, output, sums.data_ptr<float>());
  return {output, sums};
}

}  // namespace

TORCH_LIBRARY(streamh2o, library) {
  library.def("attend_and_sum(Tensor query, Tensor keys, Tensor values, Tensor? weights, int far) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(streamh2o, CPU, library) {
  library.impl("attend_and_sum", attend_and_sum);
}
