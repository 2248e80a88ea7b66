// What the kernels of AFT-conv share: tokens, gate, the table of W, and the exact path.
//
//   y_t = g(q_t) n_t / d_t,   n_t = sum_s W[t, s] e^k_s v_s,   d_t = sum_s W[t, s] e^k_s
//
// Tokens are channel-major: numbers of neighbouring tokens are neighbours. Terms are relative to the
// largest key of a sequence and channel. Where float32 does not hold them (see `least`), the sequence
// is flagged, and the exact kernels compute it again, each target relative to its own largest term.
//
// Macros: H, W the map; KH, KW the kernel; HALF float16, FULL float32, else bfloat16; EVEN pairs of tokens are
// aligned; MASKED; GATE 0 none, 1 sigmoid, 2 relu; GLOBAL W = 1 outside of the kernel, else 0; CAUSAL
// W = 0 for later tokens in raster order; SHARED a key has several channels, and grad_key is float32; WARPS of a block.
#ifndef AFT_MM_CONV_H
#define AFT_MM_CONV_H
#include "warp.h"
#define T (H * W)
#define RH (KH / 2)
#define RW (KW / 2)
#define NEAR ((RW + 7) / 8 > 0 ? (RW + 7) / 8 : 1)  // blocks of 8 columns that a kernel reaches
#define OFFSET (8 * (NEAR + 1))
#define SPAN (2 * OFFSET)
#define LOG2E 1.4426950408889634f
#define INFINITE FLOAT(0x7f800000u)
#define TINY 1.2e-38f
#define TF32 (HALF || FULL)
#define HIDDEN (FULL ? (Pair)0xff800000ff800000ull : HALF ? 0xfc00fc00u : 0xff80ff80u)  // two keys of -infinity
#define LOWER ((Pair)(Number)~0u)
#define UNROLL _Pragma("unroll")

struct Tokens {  // [channels, batch, T] with the strides of the first two
  void* data;
  i64 channel, batch;
};
struct Arguments {
  Tokens query, key, value, grad, out, grad_key, grad_value;  // out: y, or in the backward pass dq
  const u8* mask;
  i64 mask_batch, mask_token;
  const float* weight;  // [heads, KH, KW]
  u32* table;           // [heads, 2, KH, SPAN]: W[o], for the backward pass W[-o], from o = -OFFSET
  float* least;         // [heads]: the least d that is right
  float* units;         // [channels, batch, 2]: log2 of the unit of the terms, centre of the values
  float* sums;          // [channels, batch, H, BLOCKS, 2]: n, d of a block in this row and those beyond
  u32* targets;         // [channels, batch, H, BLOCKS, 4, WORDS]: the gradients of n and d
  float* parts;         // [splits, channels, KH, KW]: the gradient of W / e^w
  float* extra;         // [channels, KH, KW]: that of w from flagged sequences
  u32* flags;           // [flagged, channels, batch]
  float* scratch;       // [blocks of the launch, T, 4]
  int batch, channels, share, splits, flagged;
};

#if FULL
typedef u32 Number;
typedef unsigned long long Pair;
DEVICE float low(Pair x) { return FLOAT((u32)x); }
DEVICE float high(Pair x) { return FLOAT((u32)(x >> 32)); }
DEVICE Pair pack(float x, float y) { return BITS(x) | (Pair)BITS(y) << 32; }
#else
typedef u16 Number;
typedef u32 Pair;
#if HALF
DEVICE float low(u32 x) { return from_half((u16)x); }
DEVICE float high(u32 x) { return from_half((u16)(x >> 16)); }
DEVICE u32 pack(float x, float y) { return pack_half(x, y); }
#else
DEVICE float low(u32 x) { return FLOAT(x << 16); }
DEVICE float high(u32 x) { return FLOAT(x & 0xffff0000u); }
DEVICE u32 pack(float x, float y) { return pack_bf16(x, y); }
#endif
#endif

// A channel of a sequence from token 2q on; `real` is false beyond the batch.
struct Sequence {
  const Number *query, *key, *value, *grad;
  const u8* mask;
  i64 mask_token;
  bool real;
  int q;
};
template <class N = Number> DEVICE N* start_of(const Tokens& x, int channel, int item, int q = 0) {
  return keep((N*)x.data + channel * x.channel + item * x.batch + 2 * q);
}
DEVICE Sequence sequence_of(const Arguments& a, int channel, int item, int q = 0) {
  return {start_of(a.query, channel, item, q), start_of(a.key, channel / a.share, item, q),
          start_of(a.value, channel, item, q), start_of(a.grad, channel, item, q),
          a.mask + item * a.mask_batch + 2 * q * a.mask_token, a.mask_token, item < a.batch, q};
}
DEVICE bool inside(int r, int col) { return r >= 0 && r < H && col >= 0 && col < W; }

// The pair of tokens (r, 8 block + 2q) and the next of x, which begins at token 2q, so that offsets are
// known to the compiler; `other` where there are none.
DEVICE Pair load_pair(const Number* x, int r, int block, int q, bool real, Pair other = 0) {
  const int col = 8 * block + 2 * q;
  x = x + (i64)r * W + 8 * block;
#if EVEN
  return real && inside(r, col) ? load((const Pair*)x) : other;
#else
  const Pair first = real && inside(r, col) ? load(x) : other & LOWER;
  const Pair second = real && inside(r, col + 1) ? load(x + 1) : other >> 8 * sizeof(Number);
  return first | second << 8 * sizeof(Number);
#endif
}
DEVICE void store_pair(Number* x, int r, int block, int q, bool real, float first, float second) {
  const int col = 8 * block + 2 * q;
  const Pair pair = pack(first, second);
  x = x + (i64)r * W + 8 * block;
#if EVEN
  if (real && inside(r, col)) store((Pair*)x, pair);
#else
  if (real && inside(r, col)) store(x, (Number)pair);
  if (real && inside(r, col + 1)) store(x + 1, (Number)(pair >> 8 * sizeof(Number)));
#endif
}
DEVICE void store_pair(float* x, int r, int block, int q, bool real, float first, float second) {
  const int col = 8 * block + 2 * q;
  x = x + (i64)r * W + 8 * block;
  if (real && inside(r, col)) store(x, first);
  if (real && inside(r, col + 1)) store(x + 1, second);
}
#if SHARED
typedef float KeyGrad;
#else
typedef Number KeyGrad;
#endif
DEVICE bool shown(const Sequence& s, int token) { return !MASKED || load(s.mask + token * s.mask_token); }

// Keys and values of a pair; a hidden key is -infinity, a hidden value 0, as it may be NaN.
DEVICE void load_key_value(Pair& key, Pair& value, const Sequence& s, int r, int block) {
  const int col = 8 * block + 2 * s.q, at = r * W + 8 * block;
  key = load_pair(s.key, r, block, s.q, s.real, HIDDEN);
  value = load_pair(s.value, r, block, s.q, s.real);
  if (MASKED && s.real) {
    if (inside(r, col) && !shown(s, at)) {
      key = (key & ~LOWER) | (HIDDEN & LOWER);
      value &= ~LOWER;
    }
    if (inside(r, col + 1) && !shown(s, at + 1)) {
      key = (key & LOWER) | (HIDDEN & ~LOWER);
      value &= LOWER;
    }
  }
}
// log2 of the unit of the terms; clamped, so that terms of keys near the largest number are infinite
// or 0, which is flagged, and not NaN for all other rows.
DEVICE float unit_of(float most) {
  return fminf(fmaxf(most * LOG2E, -3e38f), 3e38f);
}
DEVICE float term(float key, float unit) { return ex2(fmaf(key, LOG2E, -unit)); }

DEVICE float sigmoid(float x) { return rcp(1 + ex2(-LOG2E * x)); }
DEVICE float gate_of(float query) {
  return GATE == 0 ? 1 : GATE == 1 ? sigmoid(query) : query < 0 ? 0 : query;
}
DEVICE float gated(float n, float d, float query) {
  return GATE == 1 ? n * rcp(d * (1 + ex2(-LOG2E * query))) : n * rcp(d) * gate_of(query);
}
// With mean = n / d + centre: a, c are the gradients of n and d, dq that of the query. `a` is cut once
// for both, so that a v + c loses nothing where all values are equal.
DEVICE void target(float& a, float& c, float& dq, float grad, float query, float n, float d, float centre, bool real) {
  const float inverse = rcp(d), gate = gate_of(query), mean = n * inverse;
  const float slope = GATE == 1 ? gate * (1 - gate) : GATE == 2 ? query > 0 : 0;
  const float exact = grad * gate * inverse;
  a = real ? FULL ? exact : HALF ? FLOAT(to_tf32(exact)) : FLOAT(pack_bf16(0, exact) & 0xffff0000u) : 0;
  c = real ? -a * mean : 0;
  dq = grad * (mean + centre) * slope;
}
// Whether sums are right: float32 holds the terms that they lack, and results are finite. They are not
// where a sequence has no key.
struct Watch {
  float smallest = INFINITE, zero = 0;
  DEVICE void see(float result) { zero = fmaf(result, 0, zero); }
  DEVICE void see(float d, float result) {
    smallest = fminf(smallest, d);
    see(result);
  }
  DEVICE bool fails(float least) const { return !(smallest >= least) || zero != 0; }
};
// For lane (g, q): whether one of the four lanes of sequence g fails.
DEVICE bool any_of_sequence(bool fails) {
  return ballot(fails) >> (threadIdx.x % 32 / 4 * 4) & 15;
}

DEVICE float weight_at(const float* weight, int i, int o) {
  if (CAUSAL && i == RH && o > 0) return 0;  // later rows are not read
  if (o < -RW || o > RW) return GLOBAL;
  return ex2(LOG2E * load(weight + i * KW + o + RW));
}
extern "C" __global__ void __launch_bounds__(32) conv_table_kernel(const Arguments a) {
  const int lane = threadIdx.x, head = blockIdx.x;
  const float* weight = a.weight + (i64)head * KH * KW;  // [KH, KW]
  float most = GLOBAL;
  for (int i = lane; i < KH * KW; i += 32) most = fmaxf(most, ex2(LOG2E * load(weight + i)));
  for (int i = 1; i < 32; i *= 2) most = fmaxf(most, shuffle_xor(most, i));
  // Lost terms are at most T most 2^-126. A sum that may overflow is never right.
  if (lane == 0) a.least[head] = T * most < 1e37f ? T * most * 1.2e-35f : INFINITE;
  u32* table = a.table + (i64)head * 2 * KH * SPAN;
  for (int i = lane; i < KH * SPAN; i += 32) {
    const int row = i / SPAN, o = i % SPAN - OFFSET;
    const float forward[] = {weight_at(weight, row, o), weight_at(weight, row, o + 1)};
    const float backward[] = {weight_at(weight, KH - 1 - row, -o), weight_at(weight, KH - 1 - row, -o - 1)};
    table[i] = FULL ? BITS(forward[0]) : HALF ? to_tf32(forward[0]) : pack_bf16(forward[0], forward[1]);
    table[KH * SPAN + i] = FULL ? BITS(backward[0]) : HALF ? to_tf32(backward[0]) : pack_bf16(backward[0], backward[1]);
  }
}

// The exact path. A lane has one target, or one source, of a flagged sequence.
DEVICE float number(const Number* x, int token) { return low(load(x + token)); }
DEVICE float key_at(const Sequence& s, int token) { return shown(s, token) ? number(s.key, token) : -INFINITE; }
// Whether target t sees source s, and its bias.
DEVICE bool sees(float& bias, const float* weight, int t, int s) {
  const int dr = s / W - t / W, dc = s % W - t % W;
  bias = 0;
  if (CAUSAL && s > t) return false;
  if (dr < -RH || dr > RH || dc < -RW || dc > RW) return GLOBAL;
  bias = load(weight + (dr + RH) * KW + dc + RW);
  return true;
}
struct ExactRow {
  float key, log_sum, mean;  // the largest key; the logarithm of d relative to it; n / d
  DEVICE float share(float other_key, float bias) const { return ex2(LOG2E * ((other_key - key) + bias - log_sum)); }
};
DEVICE ExactRow exact_row(const Sequence& s, const float* weight, int t) {
  float key = -INFINITE, most = -INFINITE, n = 0, d = 0, bias;
  for (int i = 0; i < T; i++)
    if (sees(bias, weight, t, i)) key = fmaxf(key, key_at(s, i));
  if (key == -INFINITE) key = 0;
  for (int i = 0; i < T; i++)
    if (sees(bias, weight, t, i)) most = fmaxf(most, key_at(s, i) - key + bias);
  for (int i = 0; i < T; i++) {
    const float other = key_at(s, i);
    if (!sees(bias, weight, t, i) || other == -INFINITE) continue;
    const float e = ex2(LOG2E * (other - key + bias - most));
    n += e * number(s.value, i);
    d += e;
  }
  return {key, d == 0 ? INFINITE : most + lg2(d) / LOG2E, d == 0 ? 0 : n / d};
}
DEVICE bool has_key(const Sequence& s) {
  bool found = false;
  for (int i = threadIdx.x; i < T; i += 32) found |= key_at(s, i) != -INFINITE;
  return ballot(found);
}
// Calls f(item) for each flagged sequence of a channel.
template <class F> DEVICE void each_flagged(const Arguments& a, int channel, F f) {
  const int lane = threadIdx.x;
  for (int first = 0; first < a.batch; first += 32) {
    bool set = false;
    for (int i = 0; i < a.flagged && first + lane < a.batch; i++)
      set |= load(a.flags + ((i64)i * a.channels + channel) * a.batch + first + lane) != 0;
    for (u32 left = ballot(set); left; left &= left - 1) f(first + __ffs(left) - 1);
  }
}
DEVICE void store_number(const Tokens& x, int channel, int item, int token, float number) {
  start_of(x, channel, item)[token] = (Number)pack(number, 0);
}
extern "C" __global__ void __launch_bounds__(32) conv_exact_forward_kernel(const Arguments a) {
  for (int channel = blockIdx.x; channel < a.channels; channel += gridDim.x)
    each_flagged(a, channel, [&](int item) {
      const Sequence s = sequence_of(a, channel, item);
      const float* weight = a.weight + (i64)(channel / a.share) * KH * KW;
      const bool seen = has_key(s);
      for (int t = threadIdx.x; t < T; t += 32) {
        const ExactRow row = seen ? exact_row(s, weight, t) : ExactRow{};
        store_number(a.out, channel, item, t, row.mean * gate_of(GATE ? number(s.query, t) : 0));
      }
    });
}
extern "C" __global__ void __launch_bounds__(32) conv_exact_backward_kernel(const Arguments a) {
  const int lane = threadIdx.x;
  float* rows = a.scratch + (i64)blockIdx.x * T * 4;  // [T, 4]: an ExactRow and grad g(q)
  for (int channel = blockIdx.x; channel < a.channels; channel += gridDim.x) {
    float* extra = a.extra + (i64)channel * KH * KW;
    for (int i = lane; i < KH * KW; i += 32) extra[i] = 0;
    each_flagged(a, channel, [&](int item) {
      const Sequence s = sequence_of(a, channel, item);
      const float* weight = a.weight + (i64)(channel / a.share) * KH * KW;
      const bool seen = has_key(s);
      for (int t = lane; t < T; t += 32) {
        const ExactRow row = seen ? exact_row(s, weight, t) : ExactRow{};
        const float grad = number(s.grad, t), query = GATE ? number(s.query, t) : 0, gate = gate_of(query);
        const float slope = GATE == 1 ? gate * (1 - gate) : query > 0;
        if (GATE) store_number(a.out, channel, item, t, grad * row.mean * slope);
        rows[4 * t] = row.key;
        rows[4 * t + 1] = row.log_sum;
        rows[4 * t + 2] = row.mean;
        rows[4 * t + 3] = grad * gate;
      }
      sync_warp();
      float bias;
      for (int i = lane; i < T; i += 32) {  // a source
        const float key = key_at(s, i), value = key == -INFINITE ? 0 : number(s.value, i);
        float dk = 0, dv = 0;
        for (int t = 0; seen && t < T; t++) {
          const float* row = rows + 4 * t;
          if (!sees(bias, weight, t, i) || key == -INFINITE) continue;
          const float part = row[3] * ExactRow{row[0], row[1], row[2]}.share(key, bias);
          dv += part;
          dk += part * (value - row[2]);
        }
        store_number(a.grad_value, channel, item, i, dv);
        if (SHARED) start_of<float>(a.grad_key, channel, item)[i] = dk;
        else store_number(a.grad_key, channel, item, i, dk);
      }
      for (int i = lane; seen && i < KH * KW; i += 32) {  // an entry of the kernel
        const int dr = i / KW - RH, dc = i % KW - RW, distance = dr * W + dc;
        for (int t = 0; t < T && !(CAUSAL && distance > 0); t++) {
          if (!inside(t / W + dr, t % W + dc)) continue;
          const float* row = rows + 4 * t;
          const float key = key_at(s, t + distance);
          if (key == -INFINITE) continue;
          const float part = row[3] * ExactRow{row[0], row[1], row[2]}.share(key, load(weight + i));
          extra[i] += part * (number(s.value, t + distance) - row[2]);
        }
      }
      sync_warp();
    });
  }
}
#endif
