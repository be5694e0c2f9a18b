// For a CPU: the slots of a cache, moved in place. What the results mean is said by `cache.LayerSlots`.

#include <cstring>

#include "kernel_math.h"

namespace {

// The rows of each head of `buffer` [batch, kv_heads, capacity, ...], contiguous, of which the first `used` are slots:
// keep `sinks` first ones, those `chosen` [batch, kv_heads, n] in ascending order, and the `recent` last ones.
void keep(Tensor& buffer, const Tensor& chosen, int64_t sinks, int64_t recent, int64_t used) {
  TORCH_CHECK(buffer.is_contiguous() && chosen.is_contiguous(), "rows must lie in one piece");
  const int64_t heads = buffer.size(0) * buffer.size(1), capacity = buffer.size(2), hitters = chosen.size(2);
  const int64_t row = heads * capacity ? buffer.nbytes() / (heads * capacity) : 0;
  TORCH_CHECK(used <= capacity && sinks + hitters + recent <= used, "more slots to keep than there are");
  at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      char* const slots = static_cast<char*>(buffer.data_ptr()) + h * capacity * row;
      const int64_t* from = chosen.const_data_ptr<int64_t>() + h * hitters;
      for (int64_t i = 0; i < hitters; ++i)  // never onto one that is still to be moved
        std::memmove(slots + (sinks + i) * row, slots + from[i] * row, row);
      std::memmove(slots + (sinks + hitters) * row, slots + (used - recent) * row, recent * row);
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(streamh2o, library) {
  library.def("keep(Tensor(a!) buffer, Tensor chosen, int sinks, int recent, int used) -> ()");
}

TORCH_LIBRARY_IMPL(streamh2o, CPU, library) { library.impl("keep", keep); }
