// Span attention on CPUs: the online softmax of one tile of queries over the key blocks that its spans touch,
// with every intermediate in the caches. One file, two inner products: AMX tiles where the machine has them and
// the rows are bfloat16, else float32 vectors.

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "pallas_kernels/native_tasks.h"
#include "xla/ffi/api/ffi.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__)
#define HAS_AMX 1
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace ffi = xla::ffi;

namespace {

constexpr int kLanes = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));

constexpr int64_t kBlockKv = 128;    // key rows a block: with its scores it stays in the L1 and L2 caches
constexpr int64_t kTileRows = 16;    // query rows of the innermost tile
constexpr int64_t kMaxRows = 384;    // query rows a task: what a packed key block is used for
constexpr float kFloor = -1e30f;     // below every real score, and finite

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
inline Vec splat(float x) { return Vec{} + x; }

inline float from_bf16(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// 2^x for x <= 0, within 2 units in the last place; anything below -126 gives 0.
inline Vec exp2_nonpositive(Vec x) {
#if defined(__AVX512F__)
  __m512 v;
  std::memcpy(&v, &x, sizeof(v));
  const __mmask16 kept = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m512 whole = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(v, whole);
  __m512 p = _mm512_set1_ps(1.535336188e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.339887440e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.618437358e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550332471e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402264791e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931472029e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  p = _mm512_maskz_scalef_ps(kept, p, whole);
  std::memcpy(&x, &p, sizeof(x));
  return x;
#else
  const IntVec tiny = x < -126.0f;
  x = tiny ? splat(0.0f) : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = x + magic;
  const Vec whole = shifted - magic;
  const Vec f = x - whole;  // -0.5 .. 0.5
  Vec p = splat(1.535336188e-4f);
  p = p * f + 1.339887440e-3f;
  p = p * f + 9.618437358e-3f;
  p = p * f + 5.550332471e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472029e-1f;
  p = p * f + 1.0f;
  IntVec bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  IntVec scaled;
  std::memcpy(&scaled, &p, sizeof(scaled));
  scaled += (bits - 0x4B400000) << 23;
  scaled = tiny ? IntVec{} : scaled;
  Vec out;
  std::memcpy(&out, &scaled, sizeof(out));
  return out;
#endif
}

// The lanes of a vector folded in half until one is left.
template <typename Fold>
inline float fold_lanes(Vec v, Fold fold) {
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  Half h[2];
  std::memcpy(h, &v, sizeof(h));
  h[0] = fold(h[0], h[1]);
  Quarter q[2];
  std::memcpy(q, h, sizeof(q));
  q[0] = fold(q[0], q[1]);
  return fold(fold(q[0][0], q[0][1]), fold(q[0][2], q[0][3]));
}
inline float max_lane(Vec v) {
  return fold_lanes(v, [](auto a, auto b) { return a > b ? a : b; });
}
inline float sum_lanes(Vec v) {
  return fold_lanes(v, [](auto a, auto b) { return a + b; });
}

// Buffers start at a cache line, so that no vector and no tile row crosses one.
template <typename T>
struct CacheLineAllocator {
  typedef T value_type;
  CacheLineAllocator() = default;
  template <typename U>
  CacheLineAllocator(const CacheLineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  bool operator==(const CacheLineAllocator&) const { return true; }
  bool operator!=(const CacheLineAllocator&) const { return false; }
};
template <typename T>
using Buffer = std::vector<T, CacheLineAllocator<T>>;

template <typename T>
struct Problem {
  const T *query, *key, *value;
  const int32_t *lo, *hi;
  T* out;
  int64_t batch, q_len, q_heads, kv_heads, kv_len, dim, groups;
  float scale;  // log2(e) / temperature, for exp2
  int64_t block_q, q_blocks;
};

inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return from_bf16(x); }
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, uint16_t* out) { *out = to_bf16(x); }

// What a thread needs for one task; kept between tasks.
struct Scratch {
  Buffer<float> scores, out, top, total, queries, keys, values, float_weights;
  Buffer<uint16_t> packed_queries, packed_keys, packed_values, weights;
  Buffer<int32_t> lo, hi, reads;
};

// Rows of a task: (position, group) pairs of one key/value head, position first.
template <typename T>
struct Task {
  const Problem<T>& p;
  int64_t b, k, first_q, num_q, rows, padded;  // padded: rows up to a whole tile
  int32_t floor, ceiling;                      // the hull of the spans

  Task(const Problem<T>& problem, int64_t index) : p(problem) {
    first_q = (index % p.q_blocks) * p.block_q;
    k = (index / p.q_blocks) % p.kv_heads;
    b = index / p.q_blocks / p.kv_heads;
    num_q = std::min(p.block_q, p.q_len - first_q);
    rows = num_q * p.groups;
    padded = (rows + kTileRows - 1) / kTileRows * kTileRows;
  }
  const T* query_row(int64_t r) const {
    return p.query + ((b * p.q_len + first_q + r / p.groups) * p.q_heads + k * p.groups + r % p.groups) * p.dim;
  }
  T* out_row(int64_t r) const {
    return p.out + ((b * p.q_len + first_q + r / p.groups) * p.q_heads + k * p.groups + r % p.groups) * p.dim;
  }
  const T* rows_of(const T* cache) const { return cache + (b * p.kv_heads + k) * p.kv_len * p.dim; }
};

template <typename T>
bool read_spans(Task<T>& t, Scratch& s) {
  const auto& p = t.p;
  s.lo.assign(t.padded, INT_MAX);
  s.hi.assign(t.padded, -1);
  t.floor = INT_MAX;
  t.ceiling = -1;
  for (int64_t q = 0; q < t.num_q; ++q) {
    const int64_t at = t.b * p.q_len + t.first_q + q;
    const int32_t lo = std::max(p.lo[at], 0);
    const int32_t hi = static_cast<int32_t>(std::min<int64_t>(p.hi[at], p.kv_len - 1));
    if (lo > hi) continue;
    for (int64_t g = 0; g < p.groups; ++g) {
      s.lo[q * p.groups + g] = lo;
      s.hi[q * p.groups + g] = hi;
    }
    t.floor = std::min(t.floor, lo);
    t.ceiling = std::max(t.ceiling, hi);
  }
  return t.floor <= t.ceiling;
}

// Which rows of a block some query reads: a row that nobody reads may hold anything, NaN included.
template <typename T>
void mark_reads(const Task<T>& t, Scratch& s, int64_t start, int64_t count) {
  s.reads.assign(kBlockKv + 1, 0);
  for (int64_t r = 0; r < t.rows; r += t.p.groups) {
    const int64_t lo = std::max<int64_t>(s.lo[r], start), hi = std::min<int64_t>(s.hi[r], start + count - 1);
    if (lo > hi) continue;
    s.reads[lo - start] += 1;
    s.reads[hi + 1 - start] -= 1;
  }
  int32_t depth = 0;
  for (int64_t j = 0; j < count; ++j) {
    depth += s.reads[j];
    s.reads[j] = depth;
  }
}

inline void store_weights(float* p, Vec v) { store(p, v); }
inline void store_weights(uint16_t* p, Vec v) {
#if defined(__AVX512BF16__)
  __m512 wide;
  std::memcpy(&wide, &v, sizeof(wide));
  const __m256bh half = _mm512_cvtneps_pbh(wide);
  std::memcpy(p, &half, sizeof(half));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(v[i]);
#endif
}

struct TileSpans {
  bool touched, whole;
};
inline TileSpans tile_spans(const Scratch& s, int64_t row, int64_t rows, int64_t start, int64_t count) {
  bool touched = false, whole = true;
  for (int64_t r = row; r < row + rows; ++r) {
    const bool any = s.lo[r] <= start + count - 1 && s.hi[r] >= start;
    touched |= any;
    whole &= s.lo[r] <= start && s.hi[r] >= start + kBlockKv - 1;
  }
  return {touched, whole};
}

// Turns a tile's scores [16, kBlockKv] into weights, its first `rows` rows; the others belong to no query.
// `rescale`: by how much what came before shrinks.
template <typename Weight>
inline void softmax_tile(Scratch& s, float* scores, int64_t row, int64_t rows, int64_t start, bool whole,
                         float scale, Weight* weights, float* rescale) {
  static_assert(kTileRows == kLanes, "the rows of a tile are the lanes of one vector");
  constexpr int kVectors = kBlockKv / kLanes;
  const IntVec iota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  alignas(64) float tops[kTileRows] = {}, sums[kTileRows] = {};
  for (int64_t r = 0; r < rows; ++r) {
    float* line = scores + r * kBlockKv;
    Vec greatest[2] = {splat(kFloor), splat(kFloor)};
    if (whole) {
      for (int i = 0; i < kVectors; ++i) {
        const Vec v = load(line + i * kLanes);
        greatest[i % 2] = v > greatest[i % 2] ? v : greatest[i % 2];
      }
    } else {
      const int32_t lo = s.lo[row + r] - static_cast<int32_t>(start), hi = s.hi[row + r] - static_cast<int32_t>(start);
      for (int i = 0; i < kVectors; ++i) {
        const IntVec at = iota + i * kLanes;
        const Vec v = (at >= lo) & (at <= hi) ? load(line + i * kLanes) : splat(-INFINITY);
        store(line + i * kLanes, v);
        greatest[i % 2] = v > greatest[i % 2] ? v : greatest[i % 2];
      }
    }
    tops[r] = max_lane(greatest[0] > greatest[1] ? greatest[0] : greatest[1]);
  }
  const Vec before = load(&s.top[row]), found = load(tops), top = before > found ? before : found;
  store(&s.top[row], top);
  store(tops, top);
  const Vec shrink = exp2_nonpositive((before - top) * scale);
  store(rescale, shrink);
  for (int64_t r = 0; r < rows; ++r) {
    const float* line = scores + r * kBlockKv;
    const float least = tops[r];
    Vec sum[2] = {splat(0.0f), splat(0.0f)};
    for (int i = 0; i < kVectors; ++i) {
      const Vec v = load(line + i * kLanes);
      Vec w = exp2_nonpositive((v - least) * scale);
      w = v == v ? w : v;  // a NaN stays one
      store_weights(weights + r * kBlockKv + i * kLanes, w);
      sum[i % 2] += w;
    }
    sums[r] = sum_lanes(sum[0] + sum[1]);
  }
  store(&s.total[row], load(&s.total[row]) * shrink + load(sums));
}

// Float32 products, for every machine the compiler knows.

// out[16, width] += left[16, depth] * right[depth, width]; width a multiple of 32 lanes handled by 2 vectors.
inline void multiply_tile(const float* left, int64_t left_stride, const float* right, int64_t right_stride,
                          int64_t depth, int64_t width, float* out, int64_t out_stride, bool accumulate) {
  for (int64_t r = 0; r < kTileRows; r += 4) {
    for (int64_t c = 0; c < width; c += 2 * kLanes) {
      const bool two = c + kLanes < width;
      Vec acc[4][2];
      for (int i = 0; i < 4; ++i) {
        float* o = out + (r + i) * out_stride + c;
        acc[i][0] = accumulate ? load(o) : splat(0.0f);
        acc[i][1] = accumulate && two ? load(o + kLanes) : splat(0.0f);
      }
      if (two) {
        for (int64_t d = 0; d < depth; ++d) {
          const Vec x = load(right + d * right_stride + c), y = load(right + d * right_stride + c + kLanes);
          for (int i = 0; i < 4; ++i) {
            const Vec a = splat(left[(r + i) * left_stride + d]);
            acc[i][0] += a * x;
            acc[i][1] += a * y;
          }
        }
      } else {
        for (int64_t d = 0; d < depth; ++d) {
          const Vec x = load(right + d * right_stride + c);
          for (int i = 0; i < 4; ++i) acc[i][0] += splat(left[(r + i) * left_stride + d]) * x;
        }
      }
      for (int i = 0; i < 4; ++i) {
        float* o = out + (r + i) * out_stride + c;
        store(o, acc[i][0]);
        if (two) store(o + kLanes, acc[i][1]);
      }
    }
  }
}

template <typename T>
struct FloatProducts {
  static int64_t padded_dim(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }
  static void pack_queries(const Task<T>& t, Scratch& s) {
    const int64_t dim = t.p.dim;
    s.queries.assign(t.padded * dim, 0.0f);
    for (int64_t r = 0; r < t.rows; ++r) {
      if (s.lo[r] > s.hi[r]) continue;  // reads nothing: may hold anything
      const T* row = t.query_row(r);
      for (int64_t d = 0; d < dim; ++d) s.queries[r * dim + d] = widen(row[d]);
    }
  }
  static void pack_block(const Task<T>& t, Scratch& s, int64_t start, int64_t count) {
    const int64_t dim = t.p.dim, wide = padded_dim(dim);
    s.keys.resize(dim * kBlockKv);
    s.values.resize(kBlockKv * wide);
    const T *keys = t.rows_of(t.p.key) + start * dim, *values = t.rows_of(t.p.value) + start * dim;
    for (int64_t j = 0; j < kBlockKv; ++j) {
      const bool read = j < count && s.reads[j] > 0;
      for (int64_t d = 0; d < dim; ++d) s.keys[d * kBlockKv + j] = read ? widen(keys[j * dim + d]) : 0.0f;
      for (int64_t d = 0; d < dim; ++d) s.values[j * wide + d] = read ? widen(values[j * dim + d]) : 0.0f;
      for (int64_t d = dim; d < wide; ++d) s.values[j * wide + d] = 0.0f;
    }
  }
  static void scores(const Task<T>& t, Scratch& s, int64_t row, float* scores) {
    const int64_t dim = t.p.dim;
    multiply_tile(&s.queries[row * dim], dim, s.keys.data(), kBlockKv, dim, kBlockKv, scores, kBlockKv, false);
  }
  static Buffer<float>& weights(Scratch& s) { return s.float_weights; }
  static void add_values(const Task<T>& t, Scratch& s, const float* weights, float* out) {
    const int64_t wide = padded_dim(t.p.dim);
    multiply_tile(weights, kBlockKv, s.values.data(), wide, kBlockKv, wide, out, wide, true);
  }
};

#if HAS_AMX

// 16 x 16 float32 tiles from 16 x 32 bfloat16 ones; the right operand holds pairs of rows side by side.
struct AmxProducts {
  typedef uint16_t T;
  static int64_t padded_dim(int64_t dim) { return (dim + 31) / 32 * 32; }

  static void configure() {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.bytes[i] = 64;
      config.rows[i] = 16;
    }
    _tile_loadconfig(&config);
  }
  static void pack_queries(const Task<T>& t, Scratch& s) {
    const int64_t dim = t.p.dim, wide = padded_dim(dim);
    s.packed_queries.assign(t.padded * wide, 0);
    for (int64_t r = 0; r < t.rows; ++r) {
      if (s.lo[r] > s.hi[r]) continue;
      std::memcpy(&s.packed_queries[r * wide], t.query_row(r), dim * 2);
    }
  }
  static void pack_block(const Task<T>& t, Scratch& s, int64_t start, int64_t count) {
    const int64_t dim = t.p.dim, wide = padded_dim(dim);
    s.packed_keys.resize(wide * kBlockKv);    // [wide / 2, kBlockKv] pairs
    s.packed_values.resize(wide * kBlockKv);  // [kBlockKv / 2, wide] pairs
    const T *keys = t.rows_of(t.p.key) + start * dim, *values = t.rows_of(t.p.value) + start * dim;
    uint32_t* key_pairs = reinterpret_cast<uint32_t*>(s.packed_keys.data());
    if (dim < wide) std::fill(s.packed_keys.begin() + dim * kBlockKv, s.packed_keys.end(), 0);
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i stride = _mm512_mullo_epi32(steps, _mm512_set1_epi32(static_cast<int>(dim / 2)));
    for (int64_t j = 0; j < kBlockKv; j += kLanes) {
      __mmask16 read = 0;
      for (int64_t i = 0; i < kLanes; ++i)
        if (j + i < count && s.reads[j + i] > 0) read |= static_cast<__mmask16>(1u << i);
      for (int64_t d = 0; d < dim / 2; ++d) {
        const __m512i pairs = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), read, stride,
                                                          keys + j * dim + 2 * d, 4);
        _mm512_storeu_si512(key_pairs + d * kBlockKv + j, pairs);
      }
    }
    for (int64_t j = 0; j < kBlockKv; j += 2) {
      const bool first = j < count && s.reads[j] > 0, second = j + 1 < count && s.reads[j + 1] > 0;
      uint32_t* line = reinterpret_cast<uint32_t*>(&s.packed_values[j * wide]);
      const T *a = values + j * dim, *b = a + dim;
      for (int64_t d = 0; d < dim; d += kLanes) {
        const __mmask16 in = static_cast<__mmask16>(dim - d < kLanes ? (1u << (dim - d)) - 1 : 0xffffu);
        const __m256i low = first ? _mm256_maskz_loadu_epi16(in, a + d) : _mm256_setzero_si256();
        const __m256i high = second ? _mm256_maskz_loadu_epi16(in, b + d) : _mm256_setzero_si256();
        const __m512i pairs = _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                              _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        _mm512_mask_storeu_epi32(line + d, in, pairs);
      }
      for (int64_t d = dim; d < wide; ++d) line[d] = 0;
    }
  }
  static void scores(const Task<T>& t, Scratch& s, int64_t row, float* scores) {
    const int64_t wide = padded_dim(t.p.dim);
    const uint16_t* queries = &s.packed_queries[row * wide];
    for (int64_t c = 0; c < kBlockKv; c += 64) {
      const uint16_t* keys = s.packed_keys.data() + 2 * c;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t d = 0; d < wide; d += 32) {
        const uint16_t* at = keys + d * kBlockKv;
        _tile_loadd(4, queries + d, wide * 2);
        _tile_loadd(5, at, kBlockKv * 4);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, at + 32, kBlockKv * 4);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, at + 64, kBlockKv * 4);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, at + 96, kBlockKv * 4);
        _tile_dpbf16ps(3, 4, 6);
      }
      _tile_stored(0, scores + c, kBlockKv * 4);
      _tile_stored(1, scores + c + 16, kBlockKv * 4);
      _tile_stored(2, scores + c + 32, kBlockKv * 4);
      _tile_stored(3, scores + c + 48, kBlockKv * 4);
    }
  }
  static Buffer<uint16_t>& weights(Scratch& s) { return s.weights; }
  static void add_values(const Task<T>& t, Scratch& s, const uint16_t* weights, float* out) {
    const int64_t wide = padded_dim(t.p.dim);
    for (int64_t c = 0; c < wide; c += 32) {
      _tile_loadd(0, out + c, wide * 4);
      _tile_loadd(1, out + c + 16, wide * 4);
      for (int64_t j = 0; j < kBlockKv; j += 32) {
        const uint16_t* at = &s.packed_values[j * wide + 2 * c];
        _tile_loadd(4, weights + j, kBlockKv * 2);
        _tile_loadd(5, at, wide * 4);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, at + 32, wide * 4);
        _tile_dpbf16ps(1, 4, 6);
      }
      _tile_stored(0, out + c, wide * 4);
      _tile_stored(1, out + c + 16, wide * 4);
    }
  }
};

// The kernel must be asked once a process before tiles may be used.
bool amx_granted() {
  static const bool granted = [] {
#if defined(__linux__)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
  }();
  return granted;
}

#endif  // HAS_AMX

template <typename Products, typename T>
void run_task(const Problem<T>& p, int64_t index, Scratch& s) {
  Task<T> t(p, index);
  const int64_t wide = Products::padded_dim(p.dim);
  s.out.assign(t.padded * wide, 0.0f);
  s.top.assign(t.padded, kFloor);
  s.total.assign(t.padded, 0.0f);
  s.scores.resize(kTileRows * kBlockKv);
  auto& weights = Products::weights(s);
  weights.assign(t.padded * kBlockKv, 0);
  std::vector<char> touched(t.padded / kTileRows);
  if (read_spans(t, s)) {
    Products::pack_queries(t, s);
    for (int64_t start = t.floor / kBlockKv * kBlockKv; start <= t.ceiling; start += kBlockKv) {
      const int64_t count = std::min(kBlockKv, p.kv_len - start);
      bool packed = false;
      // First all tiles against the keys, then all against the values: each packed block is used while it is
      // in the nearest cache, and nothing is loaded as a tile right after it was stored as vectors.
      for (int64_t row = 0; row < t.padded; row += kTileRows) {
        const int64_t live = std::min(kTileRows, t.rows - row);
        const TileSpans spans = tile_spans(s, row, live, start, count);
        touched[row / kTileRows] = spans.touched;
        if (!spans.touched) continue;
        if (!packed) {
          mark_reads(t, s, start, count);
          Products::pack_block(t, s, start, count);
          packed = true;
        }
        float* scores = s.scores.data();
        alignas(64) float rescale[kTileRows];
        Products::scores(t, s, row, scores);
        softmax_tile(s, scores, row, live, start, spans.whole, p.scale, weights.data() + row * kBlockKv, rescale);
        for (int64_t r = 0; r < kTileRows; ++r) {
          if (rescale[r] == 1.0f) continue;
          float* line = &s.out[(row + r) * wide];
          for (int64_t c = 0; c < wide; c += kLanes) store(line + c, load(line + c) * rescale[r]);
        }
      }
      for (int64_t row = 0; row < t.padded; row += kTileRows) {
        if (touched[row / kTileRows])
          Products::add_values(t, s, weights.data() + row * kBlockKv, &s.out[row * wide]);
      }
    }
  }
  for (int64_t r = 0; r < t.rows; ++r) {
    const bool reads = s.lo[r] <= s.hi[r];
    const float inverse = reads ? 1.0f / s.total[r] : 0.0f;
    T* row = t.out_row(r);
    for (int64_t d = 0; d < p.dim; ++d) narrow(reads ? s.out[r * wide + d] * inverse : 0.0f, row + d);
  }
}

template <typename T>
void take_tasks(const Problem<T>& p, std::atomic<int64_t>& next, int64_t num_tasks) {
  thread_local Scratch scratch;
#if HAS_AMX
  if constexpr (std::is_same_v<T, uint16_t>) {
    if (amx_granted() && p.dim % 2 == 0) {
      AmxProducts::configure();
      for (int64_t i; (i = next.fetch_add(1)) < num_tasks;) run_task<AmxProducts, T>(p, i, scratch);
      _tile_release();
      return;
    }
  }
#endif
  for (int64_t i; (i = next.fetch_add(1)) < num_tasks;) run_task<FloatProducts<T>, T>(p, i, scratch);
}

template <typename T, ffi::DataType kType>
ffi::Error attend(ffi::ThreadPool pool, ffi::Buffer<kType> query, ffi::Buffer<kType> key, ffi::Buffer<kType> value,
                  ffi::Buffer<ffi::S32> lo, ffi::Buffer<ffi::S32> hi, ffi::ResultBuffer<kType> out,
                  float softmax_scale) {
  const auto q = query.dimensions(), k = key.dimensions();
  Problem<T> p;
  p.query = reinterpret_cast<const T*>(query.untyped_data());
  p.key = reinterpret_cast<const T*>(key.untyped_data());
  p.value = reinterpret_cast<const T*>(value.untyped_data());
  p.lo = lo.typed_data();
  p.hi = hi.typed_data();
  p.out = reinterpret_cast<T*>(out->untyped_data());
  p.batch = q[0], p.q_len = q[1], p.q_heads = q[2], p.dim = q[3];
  p.kv_heads = k[1], p.kv_len = k[2];
  p.groups = p.q_heads / p.kv_heads;
  p.scale = softmax_scale * 1.44269504088896341f;
  // As many queries as share a packed block, but tasks enough for every thread.
  p.block_q = std::max<int64_t>(1, std::min<int64_t>(kMaxRows / p.groups, p.q_len));
  const int64_t wanted = 2 * pool.num_threads();
  while (p.batch * p.kv_heads * ((p.q_len + p.block_q - 1) / p.block_q) < wanted && p.block_q * p.groups > 64)
    p.block_q = (p.block_q + 1) / 2;
  p.q_blocks = (p.q_len + p.block_q - 1) / p.block_q;
  const int64_t num_tasks = p.batch * p.kv_heads * p.q_blocks;
  pallas_kernels::run_tasks(pool, num_tasks, [&](std::atomic<int64_t>& next) { take_tasks(p, next, num_tasks); });
  return ffi::Error::Success();
}

}  // namespace

#define BIND(type)                  \
  ffi::Ffi::Bind()                  \
      .Ctx<ffi::ThreadPool>()       \
      .Arg<ffi::Buffer<ffi::type>>() \
      .Arg<ffi::Buffer<ffi::type>>() \
      .Arg<ffi::Buffer<ffi::type>>() \
      .Arg<ffi::Buffer<ffi::S32>>() \
      .Arg<ffi::Buffer<ffi::S32>>() \
      .Ret<ffi::Buffer<ffi::type>>() \
      .Attr<float>("softmax_scale")

XLA_FFI_DEFINE_HANDLER_SYMBOL(span_attention_bfloat16, (attend<uint16_t, ffi::BF16>), BIND(BF16));
XLA_FFI_DEFINE_HANDLER_SYMBOL(span_attention_float32, (attend<float, ffi::F32>), BIND(F32));
