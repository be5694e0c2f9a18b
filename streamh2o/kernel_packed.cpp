// Products with weights that stay the blocks of a GGUF file: x [rows, n] times blocks [m, n / 32 blocks], transposed.
//
// A block is 32 weights of a row: a float16 scale, for Q4_1 a float16 minimum too, and 32 integers. Few rows, as in
// decoding, are multiplied as a block is read, which is what takes the time then. For many, 64 rows of weights at a time
// are unpacked for oneDNN's products (brgemm). Either way the numbers multiplied are those of the unpacked file, in
// bfloat16 rounded as plain torch rounds them, and sums are float32. `gguf_blocks.unpacked` says what a block means.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <tuple>
#include <vector>

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__F16C__)
#define FAST_BLOCKS
#endif

namespace {

using at::Tensor;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();
constexpr int64_t kWeights = 32;   // of a block
constexpr int64_t kFew = 8;        // rows of x for which weights are not laid out
constexpr int64_t kAhead = 2048;   // bytes: how far ahead weights are fetched
constexpr int64_t kColumns = 128;  // most rows of weights that are laid out at a time
constexpr int64_t kRows = 256;     // most rows of x of one product
constexpr int64_t kAtOnce = 16;    // of the rows of weights are laid out together

// The kinds of blocks, and after their scales: where the integers begin, and the bytes of all.
enum Kind { kQ4_0, kQ4_1, kQ8_0 };
constexpr int64_t integers_at(Kind kind) { return kind == kQ4_1 ? 4 : 2; }
constexpr int64_t bytes_of(Kind kind) { return integers_at(kind) + (kind == kQ8_0 ? 32 : 16); }

inline float half_at(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
#ifdef __F16C__
  return _cvtsh_ss(bits);
#else
  return c10::detail::fp16_ieee_to_fp32_value(bits);
#endif
}

// What integer 0 of four bits stands for.
template <Kind kind>
float lowest(const uint8_t* block, float scale) {
  return kind == kQ4_1 ? half_at(block + 2) : -8.f * scale;
}

// As T and back.
template <typename T>
float stored(float x) {
  return static_cast<float>(T(x));
}

// A block as 32 numbers, rounded to T.
template <Kind kind, typename T>
void unpack(const uint8_t* block, float* to) {
  const float scale = half_at(block);
  const uint8_t* const integers = block + integers_at(kind);
  if constexpr (kind == kQ8_0) {
    for (int64_t i = 0; i < kWeights; ++i) to[i] = stored<T>(scale * static_cast<int8_t>(integers[i]));
  } else {
    const float least = lowest<kind>(block, scale);
    for (int64_t i = 0; i < kWeights / 2; ++i) {
      to[i] = stored<T>(scale * (integers[i] & 15) + least);  // the product is exact
      to[i + kWeights / 2] = stored<T>(scale * (integers[i] >> 4) + least);
    }
  }
}

#ifdef FAST_BLOCKS
template <typename T>
__m512 stored(__m512 x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
#ifdef __AVX512BF16__
    const auto half = (__m256i)_mm512_cvtneps_pbh(x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#else
    return std::get<0>(at::vec::convert_to_float<T>(at::vec::convert_from_float<T>(Vec(x), Vec(x))));
#endif
  }
}

inline __m128i integers(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }

// The first and the last 16 weights of a block, rounded to T.
template <Kind kind, typename T>
void read(const uint8_t* block, __m512& first, __m512& last) {
  const uint8_t* const at = block + integers_at(kind);
  const float scale = half_at(block);
  if constexpr (kind == kQ8_0) {
    const __m512 all = _mm512_set1_ps(scale);
    first = stored<T>(_mm512_mul_ps(all, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(integers(at)))));
    last = stored<T>(_mm512_mul_ps(all, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(integers(at + 16)))));
  } else {
    // The 16 numbers that there are, and which of them each weight is.
    const __m512 counted = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 least = _mm512_set1_ps(lowest<kind>(block, scale));
    const __m512 meanings = stored<T>(_mm512_fmadd_ps(counted, _mm512_set1_ps(scale), least));
    const __m512i both = _mm512_cvtepu8_epi32(integers(at));  // a permutation looks at the lowest four bits only
    first = _mm512_permutexvar_ps(both, meanings);
    last = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), meanings);
  }
}
#endif

// One row of weights, `blocks` long and rounded to T, times `count` rows of x, `stride` apart.
template <Kind kind, typename T, int64_t count>
void multiply(const uint8_t* row, int64_t blocks, const float* x, int64_t stride, float* sums) {
  Vec sum[count];
  for (auto& each : sum) each = Vec(0.f);
  for (int64_t b = 0; b < blocks; ++b, row += bytes_of(kind), x += kWeights) {
    __builtin_prefetch(row + kAhead);
#ifdef FAST_BLOCKS
    __m512 first, last;
    read<kind, T>(row, first, last);
#pragma GCC unroll 8
    for (int64_t r = 0; r < count; ++r) {
      sum[r] = at::vec::fmadd(Vec::loadu(x + r * stride), Vec(first), sum[r]);
      sum[r] = at::vec::fmadd(Vec::loadu(x + r * stride + kLanes), Vec(last), sum[r]);
    }
#else
    float weights[kWeights];
    unpack<kind, T>(row, weights);
#pragma GCC unroll 8
    for (int64_t r = 0; r < count; ++r)
      for (int64_t i = 0; i < kWeights; i += kLanes)
        sum[r] = at::vec::fmadd(Vec::loadu(x + r * stride + i), Vec::loadu(weights + i), sum[r]);
#endif
  }
  for (int64_t r = 0; r < count; ++r)
    sums[r] = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sum[r]);
}

template <Kind kind, typename T, int64_t count = kFew>
void multiply_rows(int64_t rows, const uint8_t* row, int64_t blocks, const float* x, int64_t stride, float* sums) {
  if (rows == count) {
    multiply<kind, T, count>(row, blocks, x, stride, sums);
  } else if constexpr (count > 1) {
    multiply_rows<kind, T, count - 1>(rows, row, blocks, x, stride, sums);
  }
}

struct Job {
  const uint8_t* blocks;  // [words][across] blocks
  int64_t words, across;
  int64_t rows;       // of x, each across * kWeights long
  const float* bias;  // [words] or none
};

// A few rows of x: nothing is laid out.
template <Kind kind, typename T>
void few(const Job& job, const T* x, T* out) {
  const int64_t n = job.across * kWeights;
  std::vector<float> wide(job.rows * n);  // a row of x is read for every row of weights
  at::vec::convert(x, wide.data(), job.rows * n);
  at::parallel_for(0, job.words, 16, [&](int64_t begin, int64_t end) {
    float sums[kFew];
    for (int64_t w = begin; w < end; ++w) {
      multiply_rows<kind, T>(job.rows, job.blocks + w * job.across * bytes_of(kind), job.across, wide.data(), n, sums);
      for (int64_t r = 0; r < job.rows; ++r) out[r * job.words + w] = T(sums[r] + (job.bias ? job.bias[w] : 0.f));
    }
  });
}

// The block of each of kAtOnce rows of weights, `stride` bytes apart, as products want them: [32 / pair][columns] of
// four bytes, of which the first kAtOnce columns are written. Rows from `count` on are zeros.
template <Kind kind, typename T>
void lay_out(const uint8_t* block, int64_t stride, int64_t count, int64_t columns, T* to) {
  constexpr int64_t wide = kWeights * sizeof(T) / 4;  // numbers of four bytes in a block
  alignas(64) T rows[kAtOnce * kWeights];
  for (int64_t w = 0; w < kAtOnce; ++w, block += stride) {
    T* const row = rows + w * kWeights;
    if (w >= count) {
      std::fill_n(row, kWeights, T(0.f));
      continue;
    }
    alignas(64) float weights[kWeights];
#ifdef FAST_BLOCKS
    __m512 first, last;
    read<kind, float>(block, first, last);
    if constexpr (std::is_same_v<T, float>) {
      _mm512_store_ps(row, first);
      _mm512_store_ps(row + kLanes, last);
      continue;
    }
#ifdef __AVX512BF16__
    _mm512_store_si512(row, (__m512i)_mm512_cvtne2ps_pbh(last, first));
    continue;
#endif
    _mm512_store_ps(weights, first);
    _mm512_store_ps(weights + kLanes, last);
#else
    unpack<kind, float>(block, weights);
#endif
    at::vec::convert(weights, row, kWeights);
  }
  for (int64_t i = 0; i < wide; i += kLanes)
    at::vec::transpose_mxn<float>(reinterpret_cast<const float*>(rows) + i, wide,
                                  reinterpret_cast<float*>(to) + i * columns, columns, kAtOnce, kLanes);
}

// Many rows of x: a tile of rows of weights at a time is laid out as products want it, [n / pair][columns] of four bytes.
template <Kind kind, typename T>
void many(const Job& job, const T* x, T* out) {
  constexpr int64_t pair = 4 / sizeof(T);
  const int64_t n = job.across * kWeights, threads = at::get_num_threads();
  const int64_t columns = job.words < 2 * kColumns * threads ? kColumns / 2 : kColumns;
  const int64_t tiles = (job.words + columns - 1) / columns;
  const int64_t stride = job.across * bytes_of(kind);
  at::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<T[]> laid_out(new T[columns * n]);  // not a vector: zeros would take time
    const std::unique_ptr<float[]> product(new float[std::min(kRows, job.rows) * columns]);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile * columns, count = std::min(columns, job.words - first);
      const int64_t used = (count + kAtOnce - 1) / kAtOnce * kAtOnce;
      for (int64_t w = 0; w < used; w += kAtOnce)
        for (int64_t b = 0; b < job.across; ++b)
          lay_out<kind, T>(job.blocks + (first + w) * stride + b * bytes_of(kind), stride, count - w, columns,
                           laid_out.get() + b * kWeights * columns + w * pair);
      for (int64_t start = 0; start < job.rows; start += kRows) {
        const int64_t here = std::min(kRows, job.rows - start);
        at::native::cpublas::brgemm(here, used, n, n, columns, columns, false, x + start * n, laid_out.get(),
                                    product.get(), pair == 2);
        for (int64_t r = 0; r < here; ++r) {
          float* const row = product.get() + r * columns;
          for (int64_t j = 0; job.bias && j < count; ++j) row[j] += job.bias[first + j];
          at::vec::convert(row, out + (start + r) * job.words + first, count);
        }
      }
    }
    at::native::cpublas::brgemm_release(pair == 2);
  });
}

template <Kind kind, typename T>
void linear_of(const Job& job, const Tensor& x, Tensor& out) {
  const auto way = job.rows <= kFew ? few<kind, T> : many<kind, T>;
  way(job, x.const_data_ptr<T>(), out.data_ptr<T>());
}

template <typename T>
void linear_in(Kind kind, const Job& job, const Tensor& x, Tensor& out) {
  const auto way = kind == kQ4_0 ? linear_of<kQ4_0, T> : kind == kQ4_1 ? linear_of<kQ4_1, T> : linear_of<kQ8_0, T>;
  way(job, x, out);
}

// x [..., n] times blocks [m, bytes], transposed, plus bias [m] float32 or none: [..., m]. kind: of `Kind`.
Tensor packed_linear(const Tensor& x, const Tensor& blocks, int64_t kind, const std::optional<Tensor>& bias) {
  TORCH_CHECK(kind == kQ4_0 || kind == kQ4_1 || kind == kQ8_0, "there is no such kind of blocks");
  TORCH_CHECK(x.is_contiguous() && blocks.is_contiguous() && blocks.dim() == 2, "rows must lie in one piece");
  TORCH_CHECK(blocks.scalar_type() == at::kByte, "blocks are bytes");
  const Kind of = static_cast<Kind>(kind);
  const int64_t words = blocks.size(0), across = blocks.size(1) / bytes_of(of), n = across * kWeights;
  TORCH_CHECK(x.size(-1) == n && blocks.size(1) == across * bytes_of(of), "x and weights must be equally wide");
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->numel() == words),
              "a bias is float32, one for each row of weights");
  auto shape = x.sizes().vec();
  shape.back() = words;
  Tensor out = at::empty(shape, x.options());
  if (!out.numel()) return out;
  const Job job{blocks.const_data_ptr<uint8_t>(), words, across, x.numel() / n,
                bias ? bias->const_data_ptr<float>() : nullptr};
  if (x.scalar_type() == at::kBFloat16) {
    linear_in<at::BFloat16>(of, job, x, out);
  } else {
    linear_in<float>(of, job, x, out);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(streamh2o, library) {
  library.def("packed_linear(Tensor x, Tensor blocks, int kind, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(streamh2o, CPU, library) { library.impl("packed_linear", packed_linear); }
