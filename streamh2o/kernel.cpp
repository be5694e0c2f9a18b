// For a CPU: attention of a chunk over the cache with column sums, the rotation before it, and losses of logits.
//
// Attention takes a block of one head's queries at a time: logits, exponentials, output and sums before the block leaves
// the core's cache. Products are oneDNN's (brgemm: AMX or AVX-512 where the machine has them), sums and exponentials are
// float32. What the results mean is said by the plain torch functions that these replace: `attention.attend_and_sum`,
// `RotaryTable.rotate` and `head.losses`.

#include "kernel_math.h"

#include <ATen/ops/zeros.h>

#include <tuple>

namespace {

constexpr int64_t kKeys = 128;    // keys of one product, where there are not as many as
constexpr int64_t kManyKeys = 512;
constexpr int64_t kQueries = 64;  // queries of a block
constexpr int64_t kFew = 4;       // queries that need no blocks
constexpr int64_t kTogether = 8;  // rows whose sums are made at once
constexpr int64_t kWords = 512;   // of the vocabulary in one product
constexpr int64_t kTogetherLogits = 1024;  // logits of a row of the vocabulary taken at once

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

// The same for a few queries, as in decoding: nothing is packed, a key or value is read once for all heads of its group.
template <typename T>
void attend_few(const Tensor& query, const Tensor& keys, const Tensor& values, const float* weights, int64_t far,
                Tensor& output, float* sums) {
  const int64_t heads = query.size(1), chunk = query.size(2), dim = query.size(3), value_dim = values.size(3);
  const int64_t kv_heads = keys.size(1), slots = keys.size(2), group = heads / kv_heads, rows = group * chunk;
  const int64_t past = slots - chunk, reached = std::max<int64_t>(0, slots - far), columns = padded(slots, kKeys);
  const int64_t width = padded(dim, kLanes), value_width = padded(value_dim, kLanes);
  at::parallel_for(0, query.size(0) * kv_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> queries(rows * width), row(std::max(width, value_width)), logits(rows * columns);
    std::vector<float> sum(rows * value_width), total(rows);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / kv_heads, kv = i % kv_heads;
      const T* q = query.const_data_ptr<T>() + b * query.stride(0) + kv * group * query.stride(1);
      const T* k = keys.const_data_ptr<T>() + b * keys.stride(0) + kv * keys.stride(1);
      const T* v = values.const_data_ptr<T>() + b * values.stride(0) + kv * values.stride(1);
      for (int64_t r = 0; r < rows; ++r)  // row r is query r % chunk of the group's head r / chunk
        at::vec::convert(q + r / chunk * query.stride(1) + r % chunk * query.stride(2), queries.data() + r * width, dim);
      std::fill(row.begin(), row.end(), 0.f);
      for (int64_t j = 0; j < slots; ++j) {
        at::vec::convert(k + j * keys.stride(2), row.data(), dim);
        for (int64_t r = 0; r < rows; ++r) {
          Vec dot(0.f);
          for (int64_t d = 0; d < width; d += kLanes)
            dot = at::vec::fmadd(Vec::loadu(queries.data() + r * width + d), Vec::loadu(row.data() + d), dot);
          logits[r * columns + j] = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, dot);
        }
      }
      for (int64_t r = 0; r < rows; ++r)
        total[r] = raise<float>(logits.data() + r * columns, nullptr, past + r % chunk + 1, columns);
      std::fill(sum.begin(), sum.end(), 0.f);
      std::fill(row.begin(), row.end(), 0.f);
      for (int64_t j = 0; j < slots; ++j) {
        at::vec::convert(v + j * values.stride(2), row.data(), value_dim);
        for (int64_t r = 0; r < rows; ++r) {
          const Vec share(logits[r * columns + j]);
          for (int64_t d = 0; d < value_width; d += kLanes) {
            float* const at = sum.data() + r * value_width + d;
            at::vec::fmadd(share, Vec::loadu(row.data() + d), Vec::loadu(at)).store(at);
          }
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        T* const out = output.data_ptr<T>() + b * output.stride(0) + (kv * group + r / chunk) * output.stride(1) +
                       r % chunk * output.stride(2);
        for (int64_t d = 0; d < value_dim; ++d) out[d] = T(sum[r * value_width + d] / total[r]);
        const int64_t seen = std::min(reached, past + r % chunk + 1 - far);
        for (int64_t j = 0; weights && j < seen; ++j)
          sums[i * reached + j] += weights[r % chunk] / total[r] * logits[r * columns + j];
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

// x [dim], whose first 2 * half numbers are pairs, rotated by cos and sin [half], times scale.
template <typename T, bool interleaved>
void turn(const T* __restrict x, const float* __restrict cos, const float* __restrict sin, int64_t half, int64_t dim,
          float scale, T* __restrict out) {
  if (!interleaved && half % kTwo == 0) {
    Vec a, b, c, d;
    for (int64_t i = 0; i < half; i += kTwo) {
      const Vec c0 = Vec::loadu(cos + i) * Vec(scale), c1 = Vec::loadu(cos + i + kLanes) * Vec(scale);
      const Vec s0 = Vec::loadu(sin + i) * Vec(scale), s1 = Vec::loadu(sin + i + kLanes) * Vec(scale);
      load_two(x + i, kTwo, a, b);
      load_two(x + half + i, kTwo, c, d);
      store_two(a * c0 - c * s0, b * c1 - d * s1, out + i, kTwo);
      store_two(c * c0 + a * s0, d * c1 + b * s1, out + half + i, kTwo);
    }
  } else {
    constexpr int64_t step = interleaved ? 2 : 1;    // from one pair to the next
    const int64_t partner = interleaved ? 1 : half;  // from the first of a pair to the second
    for (int64_t i = 0; i < half; ++i) {
      const float first = x[i * step], second = x[i * step + partner], c = cos[i] * scale, s = sin[i] * scale;
      out[i * step] = T(first * c - second * s);
      out[i * step + partner] = T(second * c + first * s);
    }
  }
  for (int64_t i = 2 * half; i < dim; ++i) out[i] = T(float(x[i]) * scale);
}

// Consecutive slots: those before `end` that no run before has.
struct Run {
  int64_t end, shift;  // slot j is at position j + shift, unless
  const int64_t* own;  // each has its own: of slot j, head h and batch b at own[b * of_batch + h * of_head + j * of_slot]
  int64_t of_batch, of_head, of_slot;
};

template <typename T, bool interleaved>
void rotate_rows(const Tensor& x, const std::vector<Run>& runs, const Tensor& cos, const Tensor& sin, float scale,
                 Tensor& out) {
  const int64_t heads = x.size(1), n = x.size(2), dim = x.size(3), half = cos.size(1);
  const int64_t batch_stride = x.stride(0), head_stride = x.stride(1), stride = x.stride(2);
  const int64_t parts = (n + kQueries - 1) / kQueries;
  const T* const rows = x.const_data_ptr<T>();
  const float *const cosines = cos.const_data_ptr<float>(), *const sines = sin.const_data_ptr<float>();
  T* const results = out.data_ptr<T>();
  at::parallel_for(0, x.size(0) * heads * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / parts / heads, h = i / parts % heads, first = i % parts * kQueries;
      const Run* run = runs.data();
      for (int64_t j = first; j < std::min(n, first + kQueries); ++j) {
        while (run->end <= j) ++run;
        const int64_t at = run->own ? run->own[b * run->of_batch + h * run->of_head + j * run->of_slot] : j + run->shift;
        turn<T, interleaved>(rows + b * batch_stride + h * head_stride + j * stride, cosines + at * half, sines + at * half,
                             half, dim, scale, results + ((b * heads + h) * n + j) * dim);
      }
    }
  });
}

// x [batch, heads, n, dim], rotated: run r of its slots ends before ends[r]; its first is at position firsts[r], the
// others follow; or each has its own, and firsts[r] is -1, as the next of `own` [batch or 1, heads or 1, n of the run]
// says. cos, sin [positions, rotary dim / 2] float32.
Tensor rotate(const Tensor& x, at::IntArrayRef ends, at::IntArrayRef firsts, at::TensorList own, const Tensor& cos,
              const Tensor& sin, double scale, bool interleaved) {
  TORCH_CHECK(x.stride(3) == 1 && cos.is_contiguous() && sin.is_contiguous(), "rows must lie in one piece");
  TORCH_CHECK(ends.size() == firsts.size() && !ends.empty() && ends.back() == x.size(2), "the runs must cover all slots");
  std::vector<Run> runs;
  size_t next = 0;
  for (size_t r = 0; r < ends.size(); ++r) {
    const int64_t start = r ? ends[r - 1] : 0;
    if (firsts[r] >= 0) {
      TORCH_CHECK(firsts[r] + ends[r] - start <= cos.size(0), "there is no such position");
      runs.push_back({ends[r], firsts[r] - start, nullptr, 0, 0, 0});
      continue;
    }
    const Tensor& places = own[next++];
    TORCH_CHECK(places.size(2) == ends[r] - start, "each slot of a run must have a position");
    const int64_t of_batch = places.size(0) == 1 ? 0 : places.stride(0), of_head = places.size(1) == 1 ? 0 : places.stride(1);
    runs.push_back({ends[r], 0, places.const_data_ptr<int64_t>() - start * places.stride(2), of_batch, of_head,
                    places.stride(2)});
  }
  Tensor out = at::empty(x.sizes(), x.options());
  const bool half_precision = x.scalar_type() == at::kBFloat16;
  const auto rows = half_precision ? (interleaved ? rotate_rows<at::BFloat16, true> : rotate_rows<at::BFloat16, false>)
                                   : (interleaved ? rotate_rows<float, true> : rotate_rows<float, false>);
  rows(x, runs, cos, sin, scale, out);
  return out;
}

template <typename T>
void losses_of(const Tensor& logits, const Tensor& targets, Tensor& losses) {
  const int64_t rows = logits.size(0), n = logits.size(1), whole = n / kTogetherLogits * kTogetherLogits;
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> part(kTogetherLogits);
    for (int64_t r = begin; r < end; ++r) {
      const T* row = logits.const_data_ptr<T>() + r * n;
      float largest = kMinusInfinity, sum = 0.f;
      for (int64_t j = 0; j < n; j += kTogetherLogits) {  // the sum is in units of e^largest, which grows as it goes
        const int64_t count = j < whole ? kTogetherLogits : n - whole;
        at::vec::convert(row + j, part.data(), count);
        std::fill(part.begin() + count, part.end(), kMinusInfinity);
        const float most = std::max(largest, largest_of(part.data(), kTogetherLogits));
        if (std::isnan(most)) {
          sum = most;
          break;
        }
        Vec total(0.f);
        for (int64_t i = 0; i < kTogetherLogits; i += kLanes)
          total = total + (Vec::loadu(part.data() + i) - Vec(most)).exp();
        sum = sum * std::exp(largest - most) + at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, total);
        largest = most;
      }
      losses.data_ptr<float>()[r] = std::log(sum) + largest - float(row[targets.const_data_ptr<int64_t>()[r]]);
    }
  });
}

// Cross entropy [rows] of logits [rows, vocabulary], nats, float32.
Tensor losses(const Tensor& logits, const Tensor& targets) {
  TORCH_CHECK(logits.is_contiguous() && targets.is_contiguous(), "rows must lie in one piece");
  Tensor result = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
  if (logits.scalar_type() == at::kBFloat16) {
    losses_of<at::BFloat16>(logits, targets, result);
  } else {
    losses_of<float>(logits, targets, result);
  }
  return result;
}

// Words i * kWords .. of an output embedding [vocabulary, dim], to [dim / pair][kWords] of four bytes; zeros beyond the last.
void pack_words(const Tensor& weight, int64_t i, uint32_t* packed) {
  const int64_t dim = weight.size(1) * weight.element_size() / 4, first = i * kWords;
  pack_rows(static_cast<const uint32_t*>(weight.const_data_ptr()) + first * dim, dim, 0, kWords, weight.size(0) - first,
            dim, kWords, packed);
}

// The whole of it: [vocabulary / kWords][dim / pair][kWords].
Tensor pack_head(const Tensor& weight) {
  TORCH_CHECK(weight.is_contiguous() && weight.size(1) % 2 == 0, "rows must lie in one piece, of even size");
  const int64_t words = weight.size(0), blocks = (words + kWords - 1) / kWords;
  const int64_t pair = 4 / weight.element_size(), dim = weight.size(1) / pair;
  Tensor packed = at::empty({blocks, dim, kWords}, weight.options().dtype(at::kUInt32));
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) pack_words(weight, i, packed.data_ptr<uint32_t>() + i * dim * kWords);
  });
  return packed;
}

template <typename T>
void head_losses_of(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& packed,
                    const int64_t* targets, float* losses) {
  const int64_t rows = hidden.size(0), dim = hidden.size(1), words = weight.size(0);
  const int64_t blocks = (words + kWords - 1) / kWords;
  // Of each row and thread: the largest logit so far, and the sum of the exponentials in units of its own.
  const int64_t threads = at::get_num_threads();
  std::vector<float> largest(threads * rows, kMinusInfinity), sum(threads * rows, 0.f), target(rows, 0.f);
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> logits(kQueries * kWords);
    std::vector<uint32_t> own(packed ? 0 : dim / kPair<T> * kWords);
    float *const most = largest.data() + at::get_thread_num() * rows, *const total = sum.data() + at::get_thread_num() * rows;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = std::min(kWords, words - i * kWords);
      if (!packed) pack_words(weight, i, own.data());
      const uint32_t* w = packed ? packed->const_data_ptr<uint32_t>() + i * dim / kPair<T> * kWords : own.data();
      for (int64_t start = 0; start < rows; start += kQueries) {
        const int64_t here = std::min(kQueries, rows - start);
        at::native::cpublas::brgemm(here, kWords, dim, dim, kWords, kWords, false,
                                    hidden.const_data_ptr<T>() + start * dim, reinterpret_cast<const T*>(w), logits.data(),
                                    kPair<T> == 2);
        for (int64_t r = 0; r < here; ++r) {
          float* const row = logits.data() + r * kWords;
          for (int64_t j = 0; j < kWords; j += kLanes) stored<T>(Vec::loadu(row + j)).store(row + j);
          std::fill(row + count, row + kWords, kMinusInfinity);
          const int64_t at = start + r, wanted = targets[at] - i * kWords;
          if (wanted >= 0 && wanted < count) target[at] = row[wanted];
          const float peak = std::max(largest_of(row, kWords), most[at]);  // NaN where a logit is
          Vec part(0.f);
          for (int64_t j = 0; j < kWords; j += kLanes) {
            const Vec x = Vec::loadu(row + j);
            part = part + (std::is_same_v<T, float> ? (x - Vec(peak)).exp_u20() : power(x, Vec(peak)));
          }
          total[at] = total[at] * std::exp(most[at] - peak) +
                      at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, part);
          if (std::isnan(peak)) total[at] = peak;
          most[at] = peak;
        }
      }
    }
    at::native::cpublas::brgemm_release(kPair<T> == 2);
  });
  for (int64_t r = 0; r < rows; ++r) {
    float peak = kMinusInfinity, total = 0.f;
    for (int64_t t = 0; t < threads; ++t) peak = std::max(peak, largest[t * rows + r]);
    for (int64_t t = 0; t < threads; ++t)
      if (sum[t * rows + r] != 0.f) total += sum[t * rows + r] * std::exp(largest[t * rows + r] - peak);
    losses[r] = std::log(total) + peak - target[r];
  }
}

// `losses` of the logits of hidden [rows, dim], which are not written. packed: `pack_head` of the weight, or none, and
// then each part of it is laid out when its turn comes; the losses are the same.
Tensor head_losses(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& packed,
                   const Tensor& targets) {
  TORCH_CHECK(hidden.is_contiguous() && weight.is_contiguous() && targets.is_contiguous(), "rows must lie in one piece");
  Tensor result = at::empty({hidden.size(0)}, hidden.options().dtype(at::kFloat));
  const auto way = hidden.scalar_type() == at::kBFloat16 ? head_losses_of<at::BFloat16> : head_losses_of<float>;
  way(hidden, weight, packed, targets.const_data_ptr<int64_t>(), result.data_ptr<float>());
  return result;
}

}  // namespace

TORCH_LIBRARY(streamh2o, library) {
  library.def("attend_and_sum(Tensor query, Tensor keys, Tensor values, Tensor? weights, int far) -> (Tensor, Tensor)");
  library.def(
      "rotate(Tensor x, int[] ends, int[] firsts, Tensor[] own, Tensor cos, Tensor sin, float scale, bool interleaved) "
      "-> Tensor");
  library.def("losses(Tensor logits, Tensor targets) -> Tensor");
  library.def("pack_head(Tensor weight) -> Tensor");
  library.def("head_losses(Tensor hidden, Tensor weight, Tensor? packed, Tensor targets) -> Tensor");
}

TORCH_LIBRARY_IMPL(streamh2o, CPU, library) {
  library.impl("attend_and_sum", attend_and_sum);
  library.impl("rotate", rotate);
  library.impl("losses", losses);
  library.impl("pack_head", pack_head);
  library.impl("head_losses", head_losses);
}
