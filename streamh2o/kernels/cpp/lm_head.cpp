// For a CPU: what follows a model's last layer, its output embedding and the losses of logits.
//
// Products with many rows are oneDNN's (brgemm), as in kernel.cpp. What the results mean is said by the plain torch
// functions that these replace: `head.losses` and nn.Linear.

#include "math.h"

namespace {

constexpr int64_t kBlock = 64;   // rows of one product
constexpr int64_t kWords = 512;   // of the vocabulary in one product
constexpr int64_t kAhead = 1024;  // numbers: how far ahead weights are fetched
constexpr int64_t kLogits = 1024; // of a row taken at once

template <typename T>
void losses_of(const Tensor& logits, const Tensor& targets, Tensor& losses) {
  const int64_t rows = logits.size(0), n = logits.size(1), whole = n / kLogits * kLogits;
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> part(kLogits);
    for (int64_t r = begin; r < end; ++r) {
      const T* row = logits.const_data_ptr<T>() + r * n;
      float largest = kMinusInfinity, sum = 0.f;
      for (int64_t j = 0; j < n; j += kLogits) {  // the sum is in units of e^largest, which grows as it goes
        const int64_t count = j < whole ? kLogits : n - whole;
        at::vec::convert(row + j, part.data(), count);
        std::fill(part.begin() + count, part.end(), kMinusInfinity);
        const float most = std::max(largest, largest_of(part.data(), kLogits));
        if (std::isnan(most)) {
          sum = most;
          break;
        }
        Vec total(0.f);
        for (int64_t i = 0; i < kLogits; i += kLanes)
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
    std::vector<float> logits(kBlock * kWords);
    std::vector<uint32_t> own(packed ? 0 : dim / kPair<T> * kWords);
    float *const most = largest.data() + at::get_thread_num() * rows, *const total = sum.data() + at::get_thread_num() * rows;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = std::min(kWords, words - i * kWords);
      if (!packed) pack_words(weight, i, own.data());
      const uint32_t* w = packed ? packed->const_data_ptr<uint32_t>() + i * dim / kPair<T> * kWords : own.data();
      for (int64_t start = 0; start < rows; start += kBlock) {
        const int64_t here = std::min(kBlock, rows - start);
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

// A few rows [rows][dim] times the words begin .. end of a weight [vocabulary][dim] as it is: out [rows][vocabulary].
template <typename T>
void few_rows(const T* x, int64_t rows, int64_t dim, const T* weight, const std::optional<Tensor>& bias, int64_t begin,
              int64_t end, int64_t words, T* out) {
  const T* const added = bias ? bias->const_data_ptr<T>() : nullptr;
  int64_t w = begin;
#ifdef STREAMH2O_AVX512_BF16
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    for (; w + kLanes <= end; w += kLanes) {
      for (int64_t r = 0; r < rows; ++r) {
        __m512 sums[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) {
          const T* const row = weight + (w + i) * dim;
          __m512 sum = _mm512_setzero_ps(), other = _mm512_setzero_ps();
          int64_t d = 0;
          for (; d + 64 <= dim; d += 64) {
            if (r == 0) __builtin_prefetch(row + d + kAhead), __builtin_prefetch(row + d + 32 + kAhead);
            sum = _mm512_dpbf16_ps(sum, pairs(row + d), pairs(x + r * dim + d));
            other = _mm512_dpbf16_ps(other, pairs(row + d + 32), pairs(x + r * dim + d + 32));
          }
          for (; d < dim; d += 32) sum = _mm512_dpbf16_ps(sum, pairs(row + d, dim - d), pairs(x + r * dim + d, dim - d));
          sums[i] = _mm512_add_ps(sum, other);
        }
        Vec sum(sums_of(sums));
        if (added) sum = sum + std::get<0>(at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(added + w, kLanes)));
        at::vec::convert_from_float<T>(sum, sum).store(out + r * words + w, kLanes);
      }
    }
  }
#endif
  for (; w < end; ++w)
    for (int64_t r = 0; r < rows; ++r) {
      Vec sum(0.f), other(0.f), a, b, c, d;
      for (int64_t i = 0; i < dim; i += kTwo) {
        const int64_t count = std::min(kTwo, dim - i);
        load_two(weight + w * dim + i, count, a, b);
        load_two(x + r * dim + i, count, c, d);
        sum = at::vec::fmadd(a, c, sum);
        other = at::vec::fmadd(b, d, other);
      }
      const float total = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, sum + other);
      out[r * words + w] = T(total + (added ? float(added[w]) : 0.f));
    }
}

// x [..., dim], a few rows, times the transpose of a weight [vocabulary, dim], plus bias [vocabulary] or none: what
// decoding asks of an output embedding, whose time is that of reading it once.
Tensor few_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && x.size(-1) == weight.size(1), "rows must lie in one piece");
  TORCH_CHECK(weight.dim() == 2 && (!bias || (bias->is_contiguous() && bias->numel() == weight.size(0))),
              "a bias is a number for each row of the weight");
  TORCH_CHECK(x.scalar_type() == weight.scalar_type() && (!bias || bias->scalar_type() == x.scalar_type()),
              "all must be of one number format");
  const int64_t words = weight.size(0), dim = weight.size(1), rows = x.numel() / dim;
  auto sizes = x.sizes().vec();
  sizes.back() = words;
  Tensor out = at::empty(sizes, x.options());
  at::parallel_for(0, (words + kWords - 1) / kWords, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kWords, last = std::min(words, end * kWords);
    if (x.scalar_type() == at::kBFloat16) {
      few_rows(x.const_data_ptr<at::BFloat16>(), rows, dim, weight.const_data_ptr<at::BFloat16>(), bias, first, last,
               words, out.data_ptr<at::BFloat16>());
    } else {
      few_rows(x.const_data_ptr<float>(), rows, dim, weight.const_data_ptr<float>(), bias, first, last, words,
               out.data_ptr<float>());
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(streamh2o, library) {
  library.def("few_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("losses(Tensor logits, Tensor targets) -> Tensor");
  library.def("pack_head(Tensor weight) -> Tensor");
  library.def("head_losses(Tensor hidden, Tensor weight, Tensor? packed, Tensor targets) -> Tensor");
}

TORCH_LIBRARY_IMPL(streamh2o, CPU, library) {
  library.impl("few_linear", few_linear);
  library.impl("losses", losses);
  library.impl("pack_head", pack_head);
  library.impl("head_losses", head_losses);
}
