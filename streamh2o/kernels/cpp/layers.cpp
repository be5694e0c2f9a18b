// For a CPU: a model's linear layers, and what stands between them.
//
// What the results mean is said by the modules that `fused.py` names. Weights of a linear layer are bfloat16 and laid out
// once, in blocks of columns that stay in the core's cache while rows pass by; products are oneDNN's (brgemm), as in
// kernel.cpp.

#include "math.h"

namespace {

using Half = at::BFloat16;
constexpr int64_t kRows = 128;  // of the input in one product
constexpr int64_t kFew = 4;     // rows of a norm or gate that one thread takes at least

// Columns of a block: those that leave no block half empty.
int64_t columns_of(int64_t features) { return features % 96 == 0 ? 96 : 64; }

// Weights [features, dim] to [blocks][dim / 2][columns] of pairs; zeros beyond the last.
Tensor pack_linear(const Tensor& weight) {
  TORCH_CHECK(weight.is_contiguous() && weight.size(1) % 2 == 0, "rows must lie in one piece, of even size");
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16, "weights must be bfloat16");
  const int64_t features = weight.size(0), dim = weight.size(1) / 2, columns = columns_of(features);
  const int64_t blocks = (features + columns - 1) / columns;
  Tensor packed = at::empty({blocks, dim, columns}, weight.options().dtype(at::kUInt32));
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      pack_rows(static_cast<const uint32_t*>(weight.const_data_ptr()) + i * columns * dim, dim, 0, columns,
                features - i * columns, dim, columns, packed.data_ptr<uint32_t>() + i * dim * columns);
  });
  return packed;
}

// Rows of x [rows][2 * dim] times one block of packed weights: out [rows][columns].
void product(const Half* x, int64_t rows, const uint32_t* weights, int64_t dim, int64_t columns, float* out) {
  at::native::cpublas::brgemm(rows, columns, 2 * dim, 2 * dim, columns, columns, false, x,
                              reinterpret_cast<const Half*>(weights), out, true);
}

// Calls work(block of columns, its first row, how many rows) for all of a layer's output, by several threads.
template <typename Work>
void for_blocks(int64_t rows, int64_t blocks, const Work& work) {
  const int64_t parts = (rows + kRows - 1) / kRows;
  at::parallel_for(0, blocks * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i / parts, i % parts * kRows, std::min(kRows, rows - i % parts * kRows));
    at::native::cpublas::brgemm_release(true);
  });
}

// n floats, as many as leave room for whole vectors in `from`, to bfloat16.
void store_row(const float* from, Half* to, int64_t n) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) store_half(Vec::loadu(from + j), Vec::loadu(from + j + kLanes), to + j);
  for (; j < n; ++j) to[j] = Half(from[j]);
}

// Add n numbers to n floats as they would be stored.
void add_row(const Half* from, float* to, int64_t n) {
  Vec a, b;
  for (int64_t j = 0; j < n; j += kTwo) {
    const int64_t count = std::min(kTwo, n - j);
    load_two(from + j, count, a, b);
    float* const x = to + j;
    (stored<Half>(Vec::loadu(x, std::min(count, kLanes))) + a).store(x, std::min(count, kLanes));
    if (count > kLanes) (stored<Half>(Vec::loadu(x + kLanes, count - kLanes)) + b).store(x + kLanes, count - kLanes);
  }
}

// x [..., dim] times the transpose of a weight [features, dim] that `pack_linear` has laid out, plus bias [features]; to
// that, as it would be stored, residual [..., features] is added.
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t features,
              const std::optional<Tensor>& residual) {
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "the input of bfloat16 weights must be bfloat16");
  TORCH_CHECK(x.is_contiguous() && x.size(-1) == 2 * packed.size(1), "rows must lie in one piece, as long as the weights'");
  auto sizes = x.sizes().vec();
  sizes.back() = features;
  Tensor out = at::empty(sizes, x.options());
  TORCH_CHECK(!residual || (residual->is_contiguous() && residual->sizes() == out.sizes()), "residual must be as the result");
  const int64_t dim = packed.size(1), columns = packed.size(2), rows = x.numel() / (2 * dim);
  for_blocks(rows, packed.size(0), [&](int64_t block, int64_t first, int64_t count) {
    float sums[kRows * 96];
    const int64_t start = block * columns, n = std::min(columns, features - start);
    product(x.const_data_ptr<Half>() + first * 2 * dim, count, packed.const_data_ptr<uint32_t>() + block * dim * columns,
            dim, columns, sums);
    for (int64_t r = 0; r < count; ++r) {
      if (bias)
        for (int64_t j = 0; j < n; ++j) sums[r * columns + j] += float(bias->const_data_ptr<Half>()[start + j]);
      const int64_t at = (first + r) * features + start;
      if (residual) add_row(residual->const_data_ptr<Half>() + at, sums + r * columns, n);
      store_row(sums + r * columns, out.data_ptr<Half>() + at, n);
    }
  });
  return out;
}

// x * sigmoid(x) * y
template <typename T>
Vec gated(const Vec& x, const Vec& y) {
  Vec raised;
  if constexpr (std::is_same_v<T, float>) {
    raised = x.neg().exp();
  } else {
    raised = power(x.neg(), Vec(0.f));
  }
  return stored<T>(x / (Vec(1.f) + raised)) * y;
}

// silu(x times gate) * (x times up), of two weights [features, dim] that `pack_linear` has laid out.
Tensor gated_linear(const Tensor& x, const Tensor& gate, const Tensor& up, int64_t features) {
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "the input of bfloat16 weights must be bfloat16");
  TORCH_CHECK(x.is_contiguous() && x.size(-1) == 2 * gate.size(1), "rows must lie in one piece, as long as the weights'");
  TORCH_CHECK(gate.sizes() == up.sizes(), "gate and up must be of one shape");
  auto sizes = x.sizes().vec();
  sizes.back() = features;
  Tensor out = at::empty(sizes, x.options());
  const int64_t dim = gate.size(1), columns = gate.size(2), rows = x.numel() / (2 * dim);
  for_blocks(rows, gate.size(0), [&](int64_t block, int64_t first, int64_t count) {
    float sums[2][kRows * 96];
    const int64_t start = block * columns, n = std::min(columns, features - start);
    const Half* from = x.const_data_ptr<Half>() + first * 2 * dim;
    product(from, count, gate.const_data_ptr<uint32_t>() + block * dim * columns, dim, columns, sums[0]);
    product(from, count, up.const_data_ptr<uint32_t>() + block * dim * columns, dim, columns, sums[1]);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t j = r * columns; j < (r + 1) * columns; j += kLanes)
        gated<Half>(stored<Half>(Vec::loadu(sums[0] + j)), stored<Half>(Vec::loadu(sums[1] + j))).store(sums[0] + j);
      store_row(sums[0] + r * columns, out.data_ptr<Half>() + (first + r) * features + start, n);
    }
  });
  return out;
}

// The same for n numbers, in place of x.
template <typename T>
void gate_row(T* x, const T* y, int64_t n) {
  Vec a, b, c, d;
  for (int64_t j = 0; j < n; j += kTwo) {
    const int64_t count = std::min(kTwo, n - j);
    load_two(x + j, count, a, b);
    load_two(y + j, count, c, d);
    store_two(gated<T>(a, c), gated<T>(b, d), x + j, count);
  }
}

// gate, up [..., n]: silu(gate) * up, in place of gate.
Tensor gate(Tensor& gate, const Tensor& up) {
  TORCH_CHECK(gate.is_contiguous() && up.is_contiguous() && gate.sizes() == up.sizes(), "rows must lie in one piece");
  const int64_t n = gate.size(-1), rows = gate.numel() / n;
  at::parallel_for(0, rows, kFew, [&](int64_t begin, int64_t end) {
    const int64_t at = begin * n, count = (end - begin) * n;
    if (gate.scalar_type() == at::kBFloat16) {
      gate_row(gate.data_ptr<at::BFloat16>() + at, up.const_data_ptr<at::BFloat16>() + at, count);
    } else {
      gate_row(gate.data_ptr<float>() + at, up.const_data_ptr<float>() + at, count);
    }
  });
  return gate;
}

template <typename T>
void norm_rows(const T* x, const T* weight, float eps, int64_t n, int64_t begin, int64_t end, T* out) {
  for (int64_t r = begin; r < end; ++r) {
    const T* const row = x + r * n;
    Vec squares(0.f), others(0.f), a, b, scale, other;
    for (int64_t j = 0; j < n; j += kTwo) {
      load_two(row + j, std::min(kTwo, n - j), a, b);
      squares = at::vec::fmadd(a, a, squares);
      others = at::vec::fmadd(b, b, others);
    }
    const float sum = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, squares + others);
    const Vec factor(1.f / std::sqrt(sum / n + eps));
    for (int64_t j = 0; j < n; j += kTwo) {
      const int64_t count = std::min(kTwo, n - j);
      load_two(row + j, count, a, b);
      load_two(weight + j, count, scale, other);
      store_two(stored<T>(a * factor) * scale, stored<T>(b * factor) * other, out + r * n + j, count);
    }
  }
}

// x [..., n] divided by the root of the mean of its squares, times weight [n].
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous(), "rows must lie in one piece");
  Tensor out = at::empty(x.sizes(), x.options());
  const int64_t n = x.size(-1);
  at::parallel_for(0, x.numel() / n, kFew, [&](int64_t begin, int64_t end) {
    if (x.scalar_type() == at::kBFloat16) {
      norm_rows(x.const_data_ptr<at::BFloat16>(), weight.const_data_ptr<at::BFloat16>(), eps, n, begin, end,
                out.data_ptr<at::BFloat16>());
    } else {
      norm_rows(x.const_data_ptr<float>(), weight.const_data_ptr<float>(), eps, n, begin, end, out.data_ptr<float>());
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(streamh2o, library) {
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int features, Tensor? residual) -> Tensor");
  library.def("gated_linear(Tensor x, Tensor gate, Tensor up, int features) -> Tensor");
  library.def("gate(Tensor(a!) gate, Tensor up) -> Tensor(a!)");
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(streamh2o, CPU, library) {
  library.impl("pack_linear", pack_linear);
  library.impl("linear", linear);
  library.impl("gated_linear", gated_linear);
  library.impl("gate", gate);
  library.impl("rms_norm", rms_norm);
}
