// A matrix times a few vectors on CPUs, at the speed of reading the matrix once: out[r, n] = sum_d W[n, d] x[r, d].
// Inputs are float32 vectors; the matrix is float32, bfloat16 or int8, converted in registers. Plain vectors of
// the compiler, so that any instruction set will do.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "pallas_kernels/native_tasks.h"
#include "xla/ffi/api/ffi.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kLanes = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint32_t UintVec __attribute__((vector_size(64)));
typedef uint16_t HalfVec __attribute__((vector_size(32)));
typedef int8_t ByteVec __attribute__((vector_size(16)));

constexpr int64_t kBlockBytes = 1 << 17;  // of the matrix a task
constexpr int64_t kPrefetchBytes = 1024;  // ahead, on each of the rows read together

inline Vec widen(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline Vec widen(const uint16_t* p) {
  HalfVec half;
  std::memcpy(&half, p, sizeof(half));
  const UintVec bits = __builtin_convertvector(half, UintVec) << 16;
  Vec v;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
}
inline Vec widen(const int8_t* p) {
  ByteVec bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
#if defined(__AVX512F__)
  // GCC 12 makes dozens of instructions of the general form.
  const __m512i wide = _mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(bytes));
  return reinterpret_cast<Vec>(_mm512_cvtepi32_ps(wide));
#else
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
#endif
}
inline float widen_one(float x) { return x; }
inline float widen_one(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}
inline float widen_one(int8_t x) { return x; }

inline float sum(Vec v) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  return v[0];
}

template <typename T>
struct Problem {
  const float* rows;    // [num_rows, width]
  const T* matrix;      // [channels, width]
  float* out;           // [num_rows, channels]
  int64_t num_rows, width, channels;
};

// kChannels channels of the matrix at once, each a stream of its own, against kRows rows.
template <typename T, int kChannels, int kRows>
void multiply(const Problem<T>& p, int64_t channel, int64_t row) {
  Vec acc[kChannels][kRows] = {};
  const T* weight = p.matrix + channel * p.width;
  const float* rows = p.rows + row * p.width;
  int64_t d = 0;
  for (; d + kLanes <= p.width; d += kLanes) {
    Vec x[kRows];
    for (int r = 0; r < kRows; ++r) std::memcpy(&x[r], rows + r * p.width + d, sizeof(Vec));
    for (int c = 0; c < kChannels; ++c) {
      const T* at = weight + c * p.width + d;
      __builtin_prefetch(reinterpret_cast<const char*>(at) + kPrefetchBytes);
      const Vec w = widen(at);
      for (int r = 0; r < kRows; ++r) acc[c][r] += w * x[r];
    }
  }
  for (int c = 0; c < kChannels; ++c)
    for (int r = 0; r < kRows; ++r) {
      float total = sum(acc[c][r]);
      for (int64_t rest = d; rest < p.width; ++rest)
        total += widen_one(weight[c * p.width + rest]) * rows[r * p.width + rest];
      p.out[(row + r) * p.channels + channel + c] = total;
    }
}

template <typename T, int kRows>
void multiply_rows(const Problem<T>& p, int64_t begin, int64_t end, int64_t row) {
  constexpr int kChannels = kRows <= 4 ? 4 : 2;
  int64_t channel = begin;
  for (; channel + kChannels <= end; channel += kChannels) multiply<T, kChannels, kRows>(p, channel, row);
  for (; channel < end; ++channel) multiply<T, 1, kRows>(p, channel, row);
}

template <typename T>
void run_channels(const Problem<T>& p, int64_t begin, int64_t end) {
  int64_t row = 0;
  for (; row + 8 <= p.num_rows; row += 8) multiply_rows<T, 8>(p, begin, end, row);
  if (p.num_rows - row >= 4) multiply_rows<T, 4>(p, begin, end, row), row += 4;
  if (p.num_rows - row >= 2) multiply_rows<T, 2>(p, begin, end, row), row += 2;
  if (p.num_rows - row >= 1) multiply_rows<T, 1>(p, begin, end, row);
}

template <typename T>
void run(const Problem<T>& p, ffi::ThreadPool pool) {
  const int64_t row_bytes = std::max<int64_t>(1, p.width * sizeof(T));
  const int64_t block = std::max<int64_t>(4, kBlockBytes / row_bytes / 4 * 4);
  const int64_t num_blocks = (p.channels + block - 1) / block;
  pallas_kernels::run_tasks(pool, num_blocks, [&](std::atomic<int64_t>& next) {
    for (int64_t i; (i = next.fetch_add(1)) < num_blocks;)
      run_channels(p, i * block, std::min(p.channels, (i + 1) * block));
  });
}

template <typename T, ffi::DataType kType>
ffi::Error dense(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rows, ffi::Buffer<kType> matrix,
                 ffi::ResultBuffer<ffi::F32> out) {
  Problem<T> p;
  p.rows = rows.typed_data();
  p.matrix = reinterpret_cast<const T*>(matrix.untyped_data());
  p.out = out->typed_data();
  p.num_rows = rows.dimensions()[0];
  p.channels = matrix.dimensions()[0], p.width = matrix.dimensions()[1];
  run(p, pool);
  return ffi::Error::Success();
}

}  // namespace

#define BIND(type)                   \
  ffi::Ffi::Bind()                   \
      .Ctx<ffi::ThreadPool>()        \
      .Arg<ffi::Buffer<ffi::F32>>()  \
      .Arg<ffi::Buffer<ffi::type>>() \
      .Ret<ffi::Buffer<ffi::F32>>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(dense_float32, (dense<float, ffi::F32>), BIND(F32));
XLA_FFI_DEFINE_HANDLER_SYMBOL(dense_bfloat16, (dense<uint16_t, ffi::BF16>), BIND(BF16));
XLA_FFI_DEFINE_HANDLER_SYMBOL(dense_int8, (dense<int8_t, ffi::S8>), BIND(S8));
