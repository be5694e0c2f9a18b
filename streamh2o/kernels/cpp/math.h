// What the files of the kernel share: vectors of floats, exponentials, and numbers as they are stored.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// bfloat16 operands of a product have pairs of rows side by side, in four bytes; those of float32 stand alone.
template <typename T>
constexpr int64_t kPair = 4 / sizeof(T);

// Room for n numbers that stays with the thread: what is given back to the system each time has to be cleared each time.
// `use` tells rooms of one type apart.
template <typename T, int use>
inline T* room(int64_t n) {
  thread_local std::unique_ptr<T[]> kept;
  thread_local int64_t size = 0;
  if (size < n) {
    kept.reset();
    size = 0;  // should there be no room
    kept = std::make_unique_for_overwrite<T[]>(n);
    size = n;
  }
  return kept.get();
}

constexpr int64_t kTwo = 2 * kLanes;

// n numbers, kTwo at most, as two vectors of floats; zeros beyond the last.
template <typename T>
inline void load_two(const T* from, int64_t n, Vec& x, Vec& y) {
  if constexpr (std::is_same_v<T, float>) {
    x = Vec::loadu(from, std::min(n, kLanes));
    y = Vec::loadu(from + kLanes, std::max<int64_t>(0, n - kLanes));
  } else {
    std::tie(x, y) = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(from, n));
  }
}

// The same the other way.
template <typename T>
inline void store_two(const Vec& x, const Vec& y, T* to, int64_t n) {
  if constexpr (std::is_same_v<T, float>) {
    x.store(to, std::min(n, kLanes));
    if (n > kLanes) y.store(to + kLanes, n - kLanes);
  } else {
    at::vec::convert_from_float<T>(x, y).store(to, n);
  }
}

// Rows first .. last of [rows][dim], transposed, to [dim][columns], numbers of four bytes; zeros beyond `rows`.
inline void pack_rows(const uint32_t* from, int64_t stride, int64_t first, int64_t last, int64_t rows, int64_t dim,
                      int64_t columns, uint32_t* packed) {
  const int64_t end = std::max(first, std::min(last, rows));
  at::vec::transpose_mxn<float>(reinterpret_cast<const float*>(from) + first * stride, stride,
                                reinterpret_cast<float*>(packed) + first, columns, end - first, dim);
  for (int64_t d = 0; d < dim && end < last; ++d) std::fill(packed + d * columns + end, packed + d * columns + last, 0);
}

#if defined(__AVX512DQ__) && defined(CPU_CAPABILITY_AVX512)
#define STREAMH2O_AVX512 1
#ifdef __AVX512BF16__
#define STREAMH2O_AVX512_BF16 1
#endif
#endif

#ifdef STREAMH2O_AVX512_BF16
// The sums of 16 vectors as one vector.
inline __m512 sums_of(__m512* x) {
  for (int64_t i = 0; i < 8; ++i)
    x[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  for (int64_t i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(x[2 * i]), b = _mm512_castps_pd(x[2 * i + 1]);
    x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto both = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return both(both(x[0], x[1]), both(x[2], x[3]));
}

// n numbers, 32 at most, as pairs; zeros beyond the last.
inline __m512bh pairs(const at::BFloat16* from, int64_t n = 32) {
  return (__m512bh)_mm512_maskz_loadu_epi16(n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1, from);
}
#endif

// e^(x - most) to five decimal places: what is stored in bfloat16 has fewer than three. NaN stays NaN.
inline Vec power(const Vec& x, const Vec& most) {
#ifdef STREAMH2O_AVX512
  const __m512 log2e = _mm512_set1_ps(1.44269504f);  // 2^t = 2^floor(t) 2^f
  const __m512 t = _mm512_fmsub_ps(x, log2e, _mm512_mul_ps(most, log2e));
  const __m512 f = _mm512_reduce_ps(t, 1);
  __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(0.013534167f), _mm512_set1_ps(0.052011462f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(0.241442756f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(0.693003835f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(1.000002593f));
  return _mm512_scalef_ps(p, t);
#else
  return (x - most).fexp_u20();
#endif
}

// Two vectors in a row as bfloat16.
inline void store_half(const Vec& x, const Vec& y, at::BFloat16* to) {
#ifdef STREAMH2O_AVX512_BF16
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(y, x));
#else
  at::vec::convert_from_float<at::BFloat16>(x, y).store(to);
#endif
}

// The largest of n floats, a multiple of four vectors. NaN if one of them is, where powers don't tell of it.
inline float largest_of(const float* row, int64_t n) {
#ifdef STREAMH2O_AVX512
  __m512 largest[4];
  for (int64_t i = 0; i < 4; ++i) largest[i] = _mm512_set1_ps(kMinusInfinity);
  for (int64_t j = 0; j < n; j += 4 * kLanes)
    for (int64_t i = 0; i < 4; ++i) largest[i] = _mm512_max_ps(_mm512_loadu_ps(row + j + i * kLanes), largest[i]);
  return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(largest[0], largest[1]), _mm512_max_ps(largest[2], largest[3])));
#endif
  Vec most[4] = {Vec(kMinusInfinity), Vec(kMinusInfinity), Vec(kMinusInfinity), Vec(kMinusInfinity)};
  for (int64_t j = 0; j < n; j += 4 * kLanes)
    for (int64_t i = 0; i < 4; ++i) most[i] = at::vec::maximum(most[i], Vec::loadu(row + j + i * kLanes));
  const auto larger = [](Vec& x, Vec& y) { return at::vec::maximum(x, y); };
  return at::vec::vec_reduce_all<float>(larger, larger(most[0] = larger(most[0], most[1]), most[2] = larger(most[2], most[3])));
}

// Numbers as T and back, as where the model's own code would have stored them.
template <typename T>
inline Vec stored(const Vec& x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return std::get<0>(at::vec::convert_to_float<T>(at::vec::convert_from_float<T>(x, x)));
  }
}

}  // namespace
