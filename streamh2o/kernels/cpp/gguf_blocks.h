// How the blocks of a GGUF file are read, 16 neighbouring weights at a time.
//
// A kind is a struct that is opened at a block: how many bytes and weights that is, for each part of 16 weights its
// integers, and for each group of 16 or 32 a scale and, where the kind is lifted, a least number. A weight is
// scale * integer + least, whose product is exact in float32. Of kinds with levels four bits of what
// `integers` gives, from bit `shift(part)` on, are the place in `kLevels` of the integer that is meant. Source:
// ggml-quants.c of ggml; `gguf_blocks.py` says the same in plain torch.

#pragma once

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "math.h"

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define FAST_BLOCKS
#endif

namespace {

constexpr int64_t kPart = 16;  // weights

using Bytes = uint8_t __attribute__((vector_size(16)));
using Words = uint16_t __attribute__((vector_size(16)));
using Longs = uint64_t __attribute__((vector_size(16)));

// The numbers of a part.
struct Sixteen {
  static constexpr int64_t kVectors = kPart / kLanes;
  Vec vectors[kVectors];

  void store(float* to) const {
    for (int64_t i = 0; i < kVectors; ++i) vectors[i].store(to + i * kLanes);
  }
};

// 16 signed bytes as numbers.
inline Sixteen numbers(Bytes integers) {
#ifdef FAST_BLOCKS
  return {Vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)integers)))};
#else
  float to[kPart];
  for (int64_t i = 0; i < kPart; ++i) to[i] = static_cast<int8_t>(integers[i]);
  Sixteen all;
  for (int64_t i = 0; i < Sixteen::kVectors; ++i) all.vectors[i] = Vec::loadu(to + i * kLanes);
  return all;
#endif
}

inline float half_at(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return _cvtsh_ss(bits);
}

inline uint32_t word_at(const uint8_t* at) {
  uint32_t word;
  std::memcpy(&word, at, 4);
  return word;
}

inline Bytes bytes_at(const uint8_t* at) {
  Bytes bytes;
  std::memcpy(&bytes, at, sizeof(bytes));
  return bytes;
}

// Has what was stored at `at` read from there again: one number for all lanes costs a load that way, else a shuffle.
inline void settle(const float* at) { asm volatile("" : : "r"(at) : "memory"); }

// Bits moved down by `places`, or up where that is negative. Those that cross into another byte the caller masks.
template <int places>
Bytes moved(Bytes x) {
  if constexpr (places >= 0) {
    return (Bytes)((Words)x >> places);
  } else {
    return (Bytes)((Words)x << -places);
  }
}

// 16 for each bit that is set, else 0: the fifth bits of 16 weights.
inline Bytes fifth_bits(const uint8_t* at) {
#ifdef FAST_BLOCKS
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return (Bytes)_mm_maskz_set1_epi8(bits, 16);
#else
  constexpr uint64_t everywhere = 0x0101010101010101;
  const Bytes each = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const Longs both = {at[0] * everywhere, at[1] * everywhere};
  return (Bytes)(((Bytes)both & each) == each) & 16;
#endif
}

constexpr int8_t kCounted[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr int8_t kCentred[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr int8_t kUneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Kinds of 32 weights, with one scale. Of four bits, and the lowest four of five, the first 16 weights lie in the lower
// halves of 16 bytes, the others in the upper ones.
template <int64_t bytes, bool lifted>
struct Small {
  static constexpr int64_t kBytes = bytes, kWeights = 32, kGroup = 32;
  static constexpr bool kLifted = lifted;
  static constexpr const int8_t* kLevels = nullptr;
  const uint8_t* block;
  float scale[4];
  const float* const least = scale + 1;

  Small(const Small&) = delete;  // `least` points into it
  explicit Small(const uint8_t* block) : block(block) {
    _mm_storeu_ps(scale, _mm_cvtph_ps(_mm_cvtsi32_si128(word_at(block))));  // of kinds that are not lifted one counts
    settle(scale);
  }
};

template <int64_t bytes, bool lifted, const int8_t* levels>
struct SmallOfFour : Small<bytes, lifted> {
  static constexpr const int8_t* kLevels = levels;
  static constexpr int shift(int part) { return part * 4; }
  using Small<bytes, lifted>::Small;
  template <int part>
  Bytes integers() const {
    return bytes_at(this->block + bytes - 16);
  }
};

using Q4_0 = SmallOfFour<18, false, kCentred>;
using Q4_1 = SmallOfFour<20, true, kCounted>;
using IQ4_NL = SmallOfFour<18, false, kUneven>;

template <int64_t bytes, bool lifted>
struct SmallOfFive : Small<bytes, lifted> {
  using Small<bytes, lifted>::Small;
  template <int part>
  Bytes integers() const {
    const Bytes four = moved<4 * part>(bytes_at(this->block + bytes - 16)) & 15;
    const Bytes all = four | fifth_bits(this->block + bytes - 20 + 2 * part);
    return lifted ? all : all - 16;
  }
};

using Q5_0 = SmallOfFive<22, false>;
using Q5_1 = SmallOfFive<24, true>;

struct Q8_0 : Small<34, false> {
  using Small::Small;
  template <int part>
  Bytes integers() const {
    return bytes_at(block + 2 + part * kPart);
  }
};

// Kinds of 256 weights, of which each `group` has a scale.
template <int64_t bytes, int64_t group, bool lifted>
struct Super {
  static constexpr int64_t kBytes = bytes, kWeights = 256, kGroup = group;
  static constexpr bool kLifted = lifted;
  static constexpr const int8_t* kLevels = nullptr;
  const uint8_t* block;
  alignas(64) float scale[16], least[16];  // 8 of each where a group is 32

  explicit Super(const uint8_t* block) : block(block) {}

  // Signed bytes times `factor`.
  static void spread(Bytes integers, float factor, float* to) {
    Sixteen all = numbers(integers);
    for (Vec& each : all.vectors) each = each * Vec(factor);
    all.store(to);
    settle(to);
  }
};

// Of 256 weights two bits each, in 64 bytes: weights 32 apart lie in one byte, of each 128.
template <int part>
Bytes two_bits_at(const uint8_t* at) {
  return bytes_at(at + part / 8 * 32 + part % 2 * kPart);
}

struct Q2_K : Super<84, 16, true> {
  explicit Q2_K(const uint8_t* block) : Super(block) {
    const Bytes both = bytes_at(block);
    spread(both & 15, half_at(block + 80), scale);
    spread(moved<4>(both) & 15, -half_at(block + 82), least);
  }
  template <int part>
  Bytes integers() const {
    return moved<part / 2 % 4 * 2>(two_bits_at<part>(block + 16)) & 3;
  }
};

struct Q3_K : Super<110, 16, false> {
  explicit Q3_K(const uint8_t* block) : Super(block) {
    const uint64_t low = word_at(block + 96) | uint64_t(word_at(block + 100)) << 32, high = word_at(block + 104);
    const Longs fours = {low, low >> 4}, twos = {high << 4 | high << 34, high | high << 30};
    spread(((Bytes)fours & 15 | (Bytes)twos & 48) - 32, half_at(block + 108), scale);
  }
  template <int part>
  Bytes integers() const {
    const Bytes third = moved<part / 2 - 2>(bytes_at(block + part % 2 * kPart)) & 4;
    return (moved<part / 2 % 4 * 2>(two_bits_at<part>(block + 32)) & 3 | third) - 4;
  }
};

// Scales and least numbers of six bits, which follow the block's float16 ones.
template <int64_t bytes>
struct SuperOfSix : Super<bytes, 32, true> {
  explicit SuperOfSix(const uint8_t* block) : Super<bytes, 32, true>(block) {
    constexpr uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
    const uint32_t first = word_at(block + 4), second = word_at(block + 8), rest = word_at(block + 12);
    const uint64_t scales = rest & four | first >> 2 & two, leasts = rest >> 4 & four | second >> 2 & two;
    this->spread((Bytes)Longs{first & six | scales << 32}, half_at(block), this->scale);
    this->spread((Bytes)Longs{second & six | leasts << 32}, -half_at(block + 2), this->least);
  }
  // Four bits, of weights 32 apart in one byte.
  static constexpr int shift(int part) { return part / 2 % 2 * 4; }
  template <int part>
  Bytes fours(int64_t at) const {
    return bytes_at(this->block + at + part / 4 * 32 + part % 2 * kPart);
  }
};

struct Q4_K : SuperOfSix<144> {
  static constexpr const int8_t* kLevels = kCounted;
  using SuperOfSix::SuperOfSix;
  template <int part>
  Bytes integers() const {
    return fours<part>(16);
  }
};

struct Q5_K : SuperOfSix<176> {
  using SuperOfSix::SuperOfSix;
  template <int part>
  Bytes integers() const {
    return moved<shift(part)>(fours<part>(48)) & 15 | moved<part / 2 - 4>(bytes_at(block + 16 + part % 2 * kPart)) & 16;
  }
};

struct Q6_K : Super<210, 16, false> {
  explicit Q6_K(const uint8_t* block) : Super(block) {
    spread(bytes_at(block + 192), half_at(block + 208), scale);
  }
  template <int part>
  Bytes integers() const {
    constexpr int quarter = part / 2 % 4;  // of 128 weights
    const Bytes four = bytes_at(block + part / 8 * 64 + quarter % 2 * 32 + part % 2 * kPart);
    const Bytes two = two_bits_at<part>(block + 128);
    return (moved<quarter / 2 * 4>(four) & 15 | moved<quarter * 2 - 4>(two) & 48) - 32;
  }
};

// What integers of a part stand for.
template <int part, typename Kind>
Sixteen meant(const Kind& block, Sixteen integers) {
  constexpr int64_t group = part * kPart / Kind::kGroup;
  const Vec scale(block.scale[group]);
  for (Vec& each : integers.vectors)
    each = Kind::kLifted ? at::vec::fmadd(each, scale, Vec(block.least[group])) : each * scale;
  return integers;
}

template <int part, typename Kind>
Sixteen read(const Kind& block) {
  const Bytes integers = block.template integers<part>();
  if constexpr (Kind::kLevels != nullptr) {
    const Bytes levels = bytes_at(reinterpret_cast<const uint8_t*>(Kind::kLevels));
#ifdef FAST_BLOCKS  // what the 16 levels stand for is the same for the other part of a group, and worked out once
    const Sixteen meanings = meant<part>(block, numbers(levels));
    __m512i places = _mm512_cvtepu8_epi32((__m128i)integers);  // a permutation looks at the lowest four bits only
    if constexpr (Kind::shift(part) > 0) places = _mm512_srli_epi32(places, Kind::shift(part));
    return {Vec(_mm512_permutexvar_ps(places, meanings.vectors[0]))};
#else
    const Bytes places = moved<Kind::shift(part)>(integers) & 15;
    const auto chosen = (Bytes)_mm_shuffle_epi8((__m128i)levels, (__m128i)places);
    return meant<part>(block, numbers(chosen));
#endif
  } else {
    return meant<part>(block, numbers(integers));
  }
}

// 32 weights as T.
template <typename T>
void store(const Sixteen& first, const Sixteen& last, T* to) {
  if constexpr (std::is_same_v<T, float>) {
    first.store(to);
    last.store(to + kPart);
  } else {
#if defined(FAST_BLOCKS) && defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(last.vectors[0], first.vectors[0]));
#else
    float both[2 * kPart];
    first.store(both);
    last.store(both + kPart);
    at::vec::convert(both, to, 2 * kPart);
#endif
  }
}

// `count` blocks as T.
template <typename Kind, typename T>
void unpack(const uint8_t* at, int64_t count, T* to) {
  constexpr int64_t ahead = 2048;  // bytes: how far ahead blocks are fetched
  for (int64_t b = 0; b < count; ++b, at += Kind::kBytes, to += Kind::kWeights) {
    for (int64_t i = 0; i < Kind::kBytes; i += 64) __builtin_prefetch(at + ahead + i);
    const Kind block(at);
    [&]<int... pair>(std::integer_sequence<int, pair...>) {
      (store(read<2 * pair>(block), read<2 * pair + 1>(block), to + 2 * pair * kPart), ...);
    }(std::make_integer_sequence<int, Kind::kWeights / (2 * kPart)>());
  }
}

}  // namespace
