// Products with weights that stay the blocks of a GGUF file: x [rows, n] times blocks [m, bytes], transposed.
//
// For few rows of x, as in decoding, a strip of a row of weights is unpacked, multiplied and forgotten. For many, up to
// 128 rows of weights at a time are laid out for oneDNN's products (brgemm). Either way the numbers multiplied are
// those of the unpacked file, in bfloat16 rounded as plain torch rounds them, and sums are float32.

#include "gguf_blocks.h"

namespace {

constexpr int64_t kFew = 8;        // rows of x for which weights are not laid out
constexpr int64_t kStrip = 1024;   // weights that are unpacked at a time: whole blocks of every kind
constexpr int64_t kColumns = 128;  // most rows of weights that are laid out at a time
constexpr int64_t kRows = 256;     // most rows of x of one product
constexpr int64_t kAtOnce = 16;    // of the rows of weights are laid out together
constexpr int64_t kDepth = 256;    // of their weights are laid out at a time: whole blocks again

template <typename T>
using Unpack = void (*)(const uint8_t* at, int64_t count, T* to);

struct Blocks {
  int64_t bytes, weights;
  Unpack<float> in_float32;
  Unpack<at::BFloat16> in_bfloat16;

  template <typename T>
  Unpack<T> unpack() const {
    if constexpr (std::is_same_v<T, float>) return in_float32;
    else return in_bfloat16;
  }
};

template <typename Kind>
constexpr Blocks kOf{Kind::kBytes, Kind::kWeights, unpack<Kind, float>, unpack<Kind, at::BFloat16>};

// By the numbers of `gguf_blocks.KINDS`.
constexpr Blocks kKinds[] = {kOf<Q4_0>, kOf<Q4_1>, kOf<Q5_0>, kOf<Q5_1>, kOf<Q8_0>, kOf<IQ4_NL>,
                             kOf<Q2_K>, kOf<Q3_K>, kOf<Q4_K>, kOf<Q5_K>, kOf<Q6_K>};

struct Job {
  Blocks kind;
  const uint8_t* blocks;  // [words][across] blocks
  int64_t words, across;
  int64_t rows, n;    // x is [rows][n]
  const float* bias;  // [words] or none

  int64_t stride() const { return across * kind.bytes; }
};

// sum, and the products of neighbouring numbers at x and y, as many as a vector of T holds.
template <typename T>
Vec add_products(const T* x, const T* y, Vec sum) {
  if constexpr (std::is_same_v<T, float>) {
    return at::vec::fmadd(Vec::loadu(x), Vec::loadu(y), sum);
  } else {
#if defined(FAST_BLOCKS) && defined(__AVX512BF16__)
    return Vec(_mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x), (__m512bh)_mm512_loadu_si512(y)));
#else
    using Halves = at::vec::Vectorized<T>;
    const auto [x_first, x_last] = at::vec::convert_to_float<T>(Halves::loadu(x));
    const auto [y_first, y_last] = at::vec::convert_to_float<T>(Halves::loadu(y));
    return at::vec::fmadd(x_last, y_last, at::vec::fmadd(x_first, y_first, sum));
#endif
  }
}

// Adds the products of n weights and each of `rows` rows of x, which are `stride` apart, to `sums`.
template <typename T, int64_t count = kFew>
void multiply(int64_t rows, const T* weights, int64_t n, const T* x, int64_t stride, Vec* sums) {
  constexpr int64_t lanes = at::vec::Vectorized<T>::size(), chains = count == 1 ? 4 : count == 2 ? 2 : 1;
  if (rows == count) {
    Vec sum[count][chains];  // several of a row, since each waits for the sum before
    for (auto& each : sum) std::fill_n(each, chains, Vec(0.f));
    int64_t i = 0;
    for (; i + chains * lanes <= n; i += chains * lanes)
#pragma GCC unroll 8
      for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 4
        for (int64_t c = 0; c < chains; ++c)
          sum[r][c] = add_products(x + r * stride + i + c * lanes, weights + i + c * lanes, sum[r][c]);
    for (; i < n; i += lanes)
      for (int64_t r = 0; r < count; ++r) sum[r][0] = add_products(x + r * stride + i, weights + i, sum[r][0]);
    for (int64_t r = 0; r < count; ++r)
      for (const Vec& each : sum[r]) sums[r] = sums[r] + each;
  } else if constexpr (count > 1) {
    multiply<T, count - 1>(rows, weights, n, x, stride, sums);
  }
}

// A few rows of x: nothing is laid out.
template <typename T>
void few(const Job& job, const T* x, T* out) {
  const int64_t most = kStrip / job.kind.weights;  // blocks of a strip
  at::parallel_for(0, job.words, 16, [&](int64_t begin, int64_t end) {
    alignas(64) T weights[kStrip];
    for (int64_t w = begin; w < end; ++w) {
      Vec sums[kFew];
      std::fill_n(sums, job.rows, Vec(0.f));
      const uint8_t* const row = job.blocks + w * job.stride();
      for (int64_t b = 0; b < job.across; b += most) {
        const int64_t count = std::min(most, job.across - b);
        job.kind.unpack<T>()(row + b * job.kind.bytes, count, weights);
        multiply(job.rows, weights, count * job.kind.weights, x + b * job.kind.weights, job.n, sums);
      }
      for (int64_t r = 0; r < job.rows; ++r) {
        const float sum = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sums[r]);
        out[r * job.words + w] = T(sum + (job.bias ? job.bias[w] : 0.f));
      }
    }
  });
}

// `count` blocks of each of kAtOnce rows of weights as products want them: [weights / pair][columns] of four bytes, of
// which the first kAtOnce columns are written. Rows from `rows` on are zeros.
template <typename T>
void lay_out(const Job& job, const uint8_t* blocks, int64_t count, int64_t rows, int64_t columns, T* to) {
  alignas(64) T weights[kAtOnce * kDepth];
  for (int64_t w = 0; w < kAtOnce; ++w, blocks += job.stride()) {
    if (w < rows) {
      job.kind.unpack<T>()(blocks, count, weights + w * kDepth);
    } else {
      std::fill_n(weights + w * kDepth, kDepth, T(0.f));
    }
  }
  constexpr int64_t wide = kDepth * sizeof(T) / 4;  // numbers of four bytes
  for (int64_t i = 0; i < count * job.kind.weights * wide / kDepth; i += kLanes)
    at::vec::transpose_mxn<float>(reinterpret_cast<const float*>(weights) + i, wide,
                                  reinterpret_cast<float*>(to) + i * columns, columns, kAtOnce, kLanes);
}

// Many rows of x: a tile of rows of weights at a time is laid out as products want it, [n / pair][columns] of four
// bytes.
template <typename T>
void many(const Job& job, const T* x, T* out) {
  constexpr int64_t pair = 4 / sizeof(T);
  const int64_t n = job.n, threads = at::get_num_threads();
  const int64_t columns = job.words < 2 * kColumns * threads ? kColumns / 2 : kColumns;
  const int64_t tiles = (job.words + columns - 1) / columns, most = kDepth / job.kind.weights;
  at::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<T[]> laid_out(new T[columns * n]);  // not a vector: zeros would take time
    const std::unique_ptr<float[]> product(new float[std::min(kRows, job.rows) * columns]);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile * columns, count = std::min(columns, job.words - first);
      const int64_t used = (count + kAtOnce - 1) / kAtOnce * kAtOnce;
      for (int64_t w = 0; w < used; w += kAtOnce)
        for (int64_t b = 0; b < job.across; b += most)
          lay_out(job, job.blocks + (first + w) * job.stride() + b * job.kind.bytes, std::min(most, job.across - b),
                  count - w, columns, laid_out.get() + b * job.kind.weights * columns + w * pair);
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

template <typename T>
void linear(const Job& job, const Tensor& x, Tensor& out) {
  (job.rows <= kFew ? few<T> : many<T>)(job, x.const_data_ptr<T>(), out.data_ptr<T>());
}

// x [..., n] times blocks [m, bytes], transposed, plus bias [m] float32 or none: [..., m]. kind: of `kKinds`.
Tensor packed_linear(const Tensor& x, const Tensor& blocks, int64_t kind, const std::optional<Tensor>& bias) {
  TORCH_CHECK(kind >= 0 && kind < int64_t(std::size(kKinds)), "there is no such kind of blocks");
  TORCH_CHECK(x.is_contiguous() && blocks.is_contiguous() && blocks.dim() == 2, "rows must lie in one piece");
  TORCH_CHECK(blocks.scalar_type() == at::kByte, "blocks are bytes");
  const Blocks& of = kKinds[kind];
  const int64_t words = blocks.size(0), across = blocks.size(1) / of.bytes, n = across * of.weights;
  TORCH_CHECK(n > 0 && x.size(-1) == n && blocks.size(1) == across * of.bytes, "x and weights must be equally wide, and not empty");
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->numel() == words),
              "a bias is float32, one for each row of weights");
  auto shape = x.sizes().vec();
  shape.back() = words;
  Tensor out = at::empty(shape, x.options());
  if (!out.numel()) return out;
  const float* const added = bias ? bias->const_data_ptr<float>() : nullptr;
  const Job job{of, blocks.const_data_ptr<uint8_t>(), words, across, x.numel() / n, n, added};
  (x.scalar_type() == at::kBFloat16 ? linear<at::BFloat16> : linear<float>)(job, x, out);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(streamh2o, library) {
  library.def("packed_linear(Tensor x, Tensor blocks, int kind, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(streamh2o, CPU, library) { library.impl("packed_linear", packed_linear); }
