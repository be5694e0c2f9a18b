// For a CPU: the slots of a cache, moved in place and rotated. What the results mean is said by `slots.LayerSlots` and
// `RotaryTable.rotate`.

#include <cstring>

#include "math.h"

namespace {

constexpr int64_t kTogether = 64;  // rows that one thread copies at least
constexpr int64_t kRotated = 64;   // slots that one thread rotates

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
  const int64_t parts = (n + kRotated - 1) / kRotated;
  const T* const rows = x.const_data_ptr<T>();
  const float *const cosines = cos.const_data_ptr<float>(), *const sines = sin.const_data_ptr<float>();
  T* const results = out.data_ptr<T>();
  at::parallel_for(0, x.size(0) * heads * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / parts / heads, h = i / parts % heads, first = i % parts * kRotated;
      const Run* run = runs.data();
      for (int64_t j = first; j < std::min(n, first + kRotated); ++j) {
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(streamh2o, library) {
  library.def(
      "append(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) scores, Tensor(d!) source_index, Tensor key, Tensor value, "
      "int used, int first) -> ()");
  library.def("highest(Tensor priority, int n) -> Tensor");
  library.def(
      "rotate(Tensor x, int[] ends, int[] firsts, Tensor[] own, Tensor cos, Tensor sin, float scale, bool interleaved) "
      "-> Tensor");
  library.def("keep(Tensor(a!)[] buffers, Tensor chosen, int sinks, int recent, int used) -> ()");
}

TORCH_LIBRARY_IMPL(streamh2o, CPU, library) {
  library.impl("append", append);
  library.impl("highest", highest);
  library.impl("keep", keep);
  library.impl("rotate", rotate);
}
