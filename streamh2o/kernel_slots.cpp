// For a CPU: the slots of a cache, moved in place. What the results mean is said by `cache.LayerSlots`.

#include <cstring>

#include "kernel_math.h"

namespace {

constexpr int64_t kTogether = 64;  // rows that one thread copies at least

// Of the rows of each head of all `buffers` [batch, kv_heads, capacity, ...], contiguous, of which the first `used` are
// slots, keep `sinks` first ones, those `chosen` [batch, kv_heads, n] in ascending order, and the `recent` last ones.
void keep(at::TensorList buffers, const Tensor& chosen, int64_t sinks, int64_t recent, int64_t used) {
  const int64_t heads = chosen.size(0) * chosen.size(1), hitters = chosen.size(2);
  TORCH_CHECK(chosen.is_contiguous() && sinks + hitters + recent <= used, "more slots to keep than there are");
  for (const Tensor& buffer : buffers)
    TORCH_CHECK(buffer.is_contiguous() && buffer.size(0) * buffer.size(1) == heads && used <= buffer.size(2),
                "each buffer must lie in one piece, with a row for each slot");
  at::parallel_for(0, heads * buffers.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Tensor& buffer = buffers[i / heads];
      const int64_t h = i % heads, capacity = buffer.size(2);
      if (capacity == 0) continue;
      const int64_t row = buffer.nbytes() / (heads * capacity);
      char* const slots = static_cast<char*>(buffer.data_ptr()) + h * capacity * row;
      const int64_t* from = chosen.const_data_ptr<int64_t>() + h * hitters;
      for (int64_t k = 0; k < hitters; ++k)  // never onto one that is still to be moved
        std::memmove(slots + (sinks + k) * row, slots + from[k] * row, row);
      std::memmove(slots + (sinks + hitters) * row, slots + (used - recent) * row, recent * row);
    }
  });
}

// Copy `rows` [batch, kv_heads, n, dim] behind the first `used` slots of `buffer`.
void add(Tensor& buffer, const Tensor& rows, int64_t used) {
  TORCH_CHECK(buffer.is_contiguous() && rows.stride(3) == 1, "rows must lie in one piece");
  TORCH_CHECK(buffer.scalar_type() == rows.scalar_type() && buffer.size(3) == rows.size(3), "slots must be of one kind");
  const int64_t heads = rows.size(1), n = rows.size(2), capacity = buffer.size(2);
  const int64_t size = rows.element_size(), bytes = rows.size(3) * size, step = rows.stride(2) * size;
  at::parallel_for(0, rows.size(0) * heads * n, kTogether, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t h = i / n, j = i % n, first = h / heads * rows.stride(0) + h % heads * rows.stride(1);
      std::memcpy(static_cast<char*>(buffer.data_ptr()) + (h * capacity + used + j) * bytes,
                  static_cast<const char*>(rows.const_data_ptr()) + first * size + j * step, bytes);
    }
  });
}

// The slots [rows, n], int64 in ascending order, of the n highest priorities [rows, slots]; of equal ones the newest.
Tensor highest(const Tensor& priority, int64_t n) {
  TORCH_CHECK(priority.is_contiguous() && priority.scalar_type() == at::kFloat && n <= priority.size(1), "rows of floats");
  const int64_t rows = priority.size(0), slots = priority.size(1);
  Tensor chosen = at::empty({rows, n}, priority.options().dtype(at::kLong));
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> order(slots), sorted(slots);
    for (int64_t r = begin; r < end && n > 0; ++r) {
      std::memcpy(order.data(), priority.const_data_ptr<float>() + r * slots, slots * sizeof(float));
      for (auto& bits : order) bits ^= bits < 0 ? 0x7fffffff : 0;  // whole numbers in the order of the floats
      sorted = order;
      std::nth_element(sorted.begin(), sorted.begin() + (slots - n), sorted.end());
      const int32_t least = sorted[slots - n];
      int64_t equal = n - std::count_if(order.begin(), order.end(), [&](int32_t bits) { return bits > least; });
      int64_t* to = chosen.data_ptr<int64_t>() + (r + 1) * n;
      for (int64_t j = slots - 1; j >= 0; --j)
        if (order[j] > least || (order[j] == least && equal-- > 0)) *--to = j;
    }
  });
  return chosen;
}

// Behind the first `used` slots of the buffers [batch, kv_heads, capacity, ...], the keys and values [batch, kv_heads, n,
// dim] of the tokens `first` .. of the stream, with scores of zero.
void append(Tensor& keys, Tensor& values, Tensor& scores, Tensor& source_index, const Tensor& key, const Tensor& value,
            int64_t used, int64_t first) {
  const int64_t n = key.size(2), capacity = keys.size(2);
  TORCH_CHECK(used + n <= capacity && scores.is_contiguous() && source_index.is_contiguous(), "there is no room");
  TORCH_CHECK(key.sizes().slice(0, 2) == keys.sizes().slice(0, 2) && value.size(2) == n, "heads must be the same");
  add(keys, key, used);
  add(values, value, used);
  for (int64_t h = 0; h < keys.size(0) * keys.size(1); ++h) {
    std::fill_n(scores.data_ptr<float>() + h * capacity + used, n, 0.f);
    for (int64_t j = 0; j < n; ++j) source_index.data_ptr<int64_t>()[h * capacity + used + j] = first + j;
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(streamh2o, library) {
  library.def(
      "append(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) scores, Tensor(d!) source_index, Tensor key, Tensor value, "
      "int used, int first) -> ()");
  library.def("highest(Tensor priority, int n) -> Tensor");
  library.def("keep(Tensor(a!)[] buffers, Tensor chosen, int sinks, int recent, int used) -> ()");
}

TORCH_LIBRARY_IMPL(streamh2o, CPU, library) {
  library.impl("append", append);
  library.impl("highest", highest);
  library.impl("keep", keep);
}
