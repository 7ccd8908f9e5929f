// One step of the gated delta rule on CPUs: each head's state is read from memory once and written once.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pallas_kernels/native_tasks.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kVectors = 8;  // columns a pass, in vectors: the two sums of each stay in registers
typedef float Vec __attribute__((vector_size(64)));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

struct Head {
  const float *query, *key, *value, *before;
  float decay, beta;
  float *out, *after;
  int64_t key_dim, value_dim;
};

// Columns c .. c + width * kLanes of a head, for a width the compiler knows.
template <int kWidth>
void advance_columns(const Head& h, int64_t c, float key_query) {
  Vec reads[kWidth] = {}, answers[kWidth] = {};
  for (int64_t i = 0; i < h.key_dim; ++i) {
    const float* row = h.before + i * h.value_dim + c;
    for (int j = 0; j < kWidth; ++j) {
      const Vec s = load(row + j * kLanes);
      reads[j] += s * h.key[i];
      answers[j] += s * h.query[i];
    }
  }
  Vec written[kWidth];
  for (int j = 0; j < kWidth; ++j) {
    written[j] = (load(h.value + c + j * kLanes) - reads[j] * h.decay) * h.beta;
    store(h.out + c + j * kLanes, answers[j] * h.decay + written[j] * key_query);
  }
  for (int64_t i = 0; i < h.key_dim; ++i) {
    const float* row = h.before + i * h.value_dim + c;
    float* next = h.after + i * h.value_dim + c;
    for (int j = 0; j < kWidth; ++j) store(next + j * kLanes, load(row + j * kLanes) * h.decay + written[j] * h.key[i]);
  }
}

// One column, where the value dimension is no multiple of the lanes.
void advance_column(const Head& h, int64_t c, float key_query) {
  float read = 0, answer = 0;
  for (int64_t i = 0; i < h.key_dim; ++i) {
    const float s = h.before[i * h.value_dim + c];
    read += s * h.key[i];
    answer += s * h.query[i];
  }
  const float written = (h.value[c] - read * h.decay) * h.beta;
  h.out[c] = answer * h.decay + written * key_query;
  for (int64_t i = 0; i < h.key_dim; ++i)
    h.after[i * h.value_dim + c] = h.before[i * h.value_dim + c] * h.decay + written * h.key[i];
}

void advance(const Head& h) {
  float key_query = 0;
  for (int64_t i = 0; i < h.key_dim; ++i) key_query += h.key[i] * h.query[i];
  int64_t c = 0;
  for (; c + kVectors * kLanes <= h.value_dim; c += kVectors * kLanes) advance_columns<kVectors>(h, c, key_query);
  for (; c + kLanes <= h.value_dim; c += kLanes) advance_columns<1>(h, c, key_query);
  for (; c < h.value_dim; ++c) advance_column(h, c, key_query);
}

ffi::Error step(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query, ffi::Buffer<ffi::F32> key,
                ffi::Buffer<ffi::F32> value, ffi::Buffer<ffi::F32> decay, ffi::Buffer<ffi::F32> beta,
                ffi::Buffer<ffi::F32> before, ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> after) {
  const auto shape = before.dimensions();  // [B, nv, dk, dv]
  const int64_t heads = shape[0] * shape[1], key_dim = shape[2], value_dim = shape[3];
  pallas_kernels::run_tasks(pool, heads, [&](std::atomic<int64_t>& next) {
    for (int64_t h; (h = next.fetch_add(1)) < heads;) {
      const int64_t state = h * key_dim * value_dim;
      advance({query.typed_data() + h * key_dim, key.typed_data() + h * key_dim, value.typed_data() + h * value_dim,
               before.typed_data() + state, decay.typed_data()[h], beta.typed_data()[h],
               out->typed_data() + h * value_dim, after->typed_data() + state, key_dim, value_dim});
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gated_delta_step, step,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
