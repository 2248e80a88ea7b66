// AFT-conv of bfloat16 tokens on maps of at most 16 x 16, not causal.
//
// A warp owns a channel of 8 sequences. Lane (g, q) holds, of sequence g and of each row of the map, the
// tokens 2q, 2q + 1, 2q + 8, 2q + 9: as operand a of a product, whose rows 0 to 7 are the terms of
// the numerators of 8 sequences and rows 8 to 15 those of the denominators; as its result; and again as
// operand a of the gradient. So nothing moves between lanes, and forward needs no shared memory:
//
//   (n, d)_r = sum_i X_{r+i} W_i + rows beyond the kernel          X = (E (v - m), E)
//   P_r = (a, c) = (alpha / d, -alpha n / d^2),  alpha = dy g(q)
//   (A, C)_s = sum_i P_{s-i} W_i^T + rows beyond the kernel        dv = E A,  dk = E ((v - m) A + C)
//   dw_i = e^w (diagonals of sum_r P_r^T X_{r+i})
//
// W_i is a Toeplitz tile with e^w inside of the kernel and 1 outside, so nothing is subtracted.
#include "conv.h"
#define ONES 0x3f803f80u
#define BEYOND (H > RH + 1 ? H - RH - 1 : 1)

typedef u32 Terms[4];  // n, d of the tokens 2q, 2q + 1, then of 2q + 8, 2q + 9

DEVICE void product(float* c, const Terms& x, u32 b0, u32 b1) { mma_k16(c, x[0], x[1], x[2], x[3], b0, b1); }

// Pairs (W[o], W[o + 1]) of KH rows for the distances o = 2q - g - 8, + 0, + 8.
DEVICE void load_tiles(u32 (*tile)[3], const u32* table, int g, int q) {
  table = keep(table + OFFSET + 2 * q - g);
  UNROLL for (int i = 0; i < KH; i++)
    UNROLL for (int j = 0; j < 3; j++) tile[i][j] = load(table + i * SPAN + 8 * (j - 1));
}
// n and d of all rows below those that the kernel of row r reaches, in after[r].
DEVICE void sum_rows(float (*after)[2], const Terms* x) {
  float c[4] = {0, 0, 0, 0};
  UNROLL for (int r = H - 1; GLOBAL && r > RH; r--) {
    product(c, x[r], ONES, ONES);
    after[r - RH - 1][0] = c[0];
    after[r - RH - 1][1] = c[2];
  }
}
// total[j] = (n, n, d, d) of the columns 2q + 8j and 2q + 8j + 1; `before` sums the rows above.
DEVICE void weigh_row(float (*total)[4], int r, const Terms* x, const u32 (*tile)[3], const float (*after)[2], float* before) {
  float n = 0, d = 0;
  if (GLOBAL && r + RH + 1 < H) {
    n = after[r][0];
    d = after[r][1];
  }
  if (GLOBAL && r > RH) {
    product(before, x[r - RH - 1], ONES, ONES);
    n += before[0];
    d += before[2];
  }
  UNROLL for (int j = 0; j < 2; j++) {
    total[j][0] = total[j][1] = n;
    total[j][2] = total[j][3] = d;
  }
  UNROLL for (int i = 0; i < KH; i++)
    if (r + i - RH >= 0 && r + i - RH < H) {
      product(total[0], x[r + i - RH], tile[i][1], tile[i][2]);
      product(total[1], x[r + i - RH], tile[i][0], tile[i][1]);
    }
}
// Terms of all rows. With CENTRE values are relative to their mean in units of e^k.
template <bool CENTRE> DEVICE void make_terms(Terms* x, const Sequence& s, int q, float& unit, float& centre) {
  float most = -INFINITE;
  UNROLL for (int r = 0; r < H; r++) UNROLL for (int j = 0; j < 2; j++) {
    load_key_value(x[r][2 * j + 1], x[r][2 * j], s, r, j);
    most = fmaxf(most, fmaxf(low(x[r][2 * j + 1]), high(x[r][2 * j + 1])));
  }
  most = fmaxf(most, shuffle_xor(most, 1));
  most = fmaxf(most, shuffle_xor(most, 2));
  unit = unit_of(most);
  centre = 0;
  if (CENTRE) {
    float n = 0, d = 0;
    UNROLL for (int r = 0; r < H; r++) UNROLL for (int j = 0; j < 2; j++) {
      const u32 key = x[r][2 * j + 1], value = x[r][2 * j];
      const float e = term(low(key), unit), f = term(high(key), unit);
      n += e * low(value) + f * high(value);
      d += e + f;
    }
    UNROLL for (int i = 1; i < 4; i *= 2) {
      n += shuffle_xor(n, i);
      d += shuffle_xor(d, i);
    }
    centre = n * rcp(fmaxf(d, TINY));
  }
  UNROLL for (int r = 0; r < H; r++) UNROLL for (int j = 0; j < 2; j++) {
    const u32 key = x[r][2 * j + 1], value = x[r][2 * j];
    const float e = term(low(key), unit), f = term(high(key), unit);
    x[r][2 * j] = pack(e * (low(value) - centre), f * (high(value) - centre));
    x[r][2 * j + 1] = pack(e, f);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS) conv_forward_kernel(const Arguments a) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, item = blockIdx.x * 8 + g;
  const int channel = blockIdx.y * WARPS + threadIdx.x / 32;
  if (channel >= a.channels) return;
  const Sequence s = sequence_of(a, channel, item, q);
  u16* out = start_of(a.out, channel, item, q);
  u32 tile[KH][3];
  Terms x[H];
  float unit, centre, after[BEYOND][2], before[4] = {0, 0, 0, 0};
  Watch watch;
  make_terms<false>(x, s, q, unit, centre);
  load_tiles(tile, a.table + (i64)(channel / a.share) * 2 * KH * SPAN, g, q);
  sum_rows(after, x);
  UNROLL for (int r = 0; r < H; r++) {
    float total[2][4];
    weigh_row(total, r, x, tile, after, before);
    UNROLL for (int j = 0; j < 2; j++) {
      const int col = 8 * j + 2 * q;
      const u32 query = GATE ? load_pair(s.query, r, j, q, s.real) : 0;
      const float y = gated(total[j][0], total[j][2], low(query)), z = gated(total[j][1], total[j][3], high(query));
      if (inside(r, col)) watch.see(total[j][2], y);
      if (inside(r, col + 1)) watch.see(total[j][3], z);
      store_pair(out, r, j, q, s.real, y, z);
    }
  }
  const bool fails = any_of_sequence(watch.fails(load(a.least + channel / a.share)));
  if (s.real && q == 0) a.flags[(i64)channel * a.batch + item] = fails;
}

// Adds the diagonals of G [16, 16] to sums [KW, 4]. Lane + 9 has the same distance, so chains of lanes
// are added first. Each of the four numbers of a distance has one lane that adds to it.
DEVICE void add_diagonals(float* sums, const float (*G)[4], int lane) {
  const int g = lane / 4, q = lane % 4;
  const float s[3][2] = {{G[0][2], G[0][3]}, {G[0][0] + G[1][2], G[0][1] + G[1][3]}, {G[1][0], G[1][1]}};
  UNROLL for (int j = 0; j < 3; j++)
    UNROLL for (int e = 0; e < 2; e++) {
      float z = s[j][e], other = shuffle_down(z, 9);
      if (g < 6 && q < 3) z += other;
      other = shuffle_down(z, 18);
      if (g < 4 && q < 2) z += other;
      const int o = 2 * q - g + 8 * (j - 1) + e + RW;
      if ((q == 0 || g < 2) && o >= 0 && o < KW) sums[4 * o + 2 * (j % 2) + e] += z;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 8 / WARPS) conv_backward_kernel(const Arguments a) {
  __shared__ float all_sums[WARPS][KH * KW * 4];
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int channel = blockIdx.y * WARPS + threadIdx.x / 32;
  if (channel >= a.channels) return;
  float* sums = all_sums[threadIdx.x / 32];
  const float least = load(a.least + channel / a.share);
  const u32* table = a.table + (i64)(channel / a.share) * 2 * KH * SPAN;
  for (int i = lane; i < KH * KW * 4; i += 32) sums[i] = 0;
  sync_warp();
  for (int group = blockIdx.x; group * 8 < a.batch; group += gridDim.x) {
    const int item = group * 8 + g;
    const Sequence s = sequence_of(a, channel, item, q);
    u16* grad_query = start_of(a.out, channel, item, q);
    u16* grad_value = start_of(a.grad_value, channel, item, q);
    KeyGrad* grad_key = start_of<KeyGrad>(a.grad_key, channel, item, q);
    u32 tile[KH][3];
    Terms x[H], p[H];
    float unit, centre, after[BEYOND][2], before[4] = {0, 0, 0, 0};
    Watch watch;
    make_terms<true>(x, s, q, unit, centre);
    load_tiles(tile, table, g, q);
    sum_rows(after, x);
    UNROLL for (int r = 0; r < H; r++) {
      float total[2][4];
      weigh_row(total, r, x, tile, after, before);
      UNROLL for (int j = 0; j < 2; j++) {
        const int col = 8 * j + 2 * q;
        const u32 grad = load_pair(s.grad, r, j, q, s.real), query = GATE ? load_pair(s.query, r, j, q, s.real) : 0;
        float ga[2], gc[2], dq[2];
        target(ga[0], gc[0], dq[0], low(grad), low(query), total[j][0], total[j][2], centre, inside(r, col));
        target(ga[1], gc[1], dq[1], high(grad), high(query), total[j][1], total[j][3], centre, inside(r, col + 1));
        if (GATE) store_pair(grad_query, r, j, q, s.real, dq[0], dq[1]);
        if (inside(r, col)) watch.see(total[j][2], gc[0]);
        if (inside(r, col + 1)) watch.see(total[j][3], gc[1]);
        p[r][2 * j] = pack(ga[0], ga[1]);
        p[r][2 * j + 1] = pack(gc[0], gc[1]);
      }
    }
    load_tiles(tile, table + KH * SPAN, g, q);
    sum_rows(after, p);
    UNROLL for (int i = 0; i < 4; i++) before[i] = 0;
    UNROLL for (int r = 0; r < H; r++) {
      float total[2][4];
      weigh_row(total, r, p, tile, after, before);
      UNROLL for (int j = 0; j < 2; j++) {
        const int col = 8 * j + 2 * q;
        u32 key, value;
        load_key_value(key, value, s, r, j);
        const float e = term(low(key), unit), f = term(high(key), unit);
        const float dv[] = {e * total[j][0], f * total[j][1]};
        const float dk[] = {e * ((low(value) - centre) * total[j][0] + total[j][2]),
                            f * ((high(value) - centre) * total[j][1] + total[j][3])};
        if (inside(r, col)) watch.see(dk[0]);
        if (inside(r, col + 1)) watch.see(dk[1]);
        store_pair(grad_value, r, j, q, s.real, dv[0], dv[1]);
        store_pair(grad_key, r, j, q, s.real, dk[0], dk[1]);
      }
    }
    const bool fails = any_of_sequence(watch.fails(least));
    if (s.real && q == 0) a.flags[(i64)channel * a.batch + item] = fails;
    if (fails) {
      UNROLL for (int r = 0; r < H; r++)
        UNROLL for (int i = 0; i < 4; i++) x[r][i] = p[r][i] = 0;
    }
    // The operands of the third product are the transposed tiles of the others.
    UNROLL for (int r = 0; r < H; r++)
      UNROLL for (int i = 0; i < 4; i++) {
        x[r][i] = transpose(x[r][i]);
        p[r][i] = transpose(p[r][i]);
      }
    UNROLL for (int i = 0; i < KH; i++) {
      float G[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};  // 16 targets x 8 sources, twice
      UNROLL for (int r = 0; r < H; r++)
        if (r + i - RH >= 0 && r + i - RH < H) {
          const u32* sources = x[r + i - RH];
          mma_k16(G[0], p[r][0], p[r][2], p[r][1], p[r][3], sources[0], sources[1]);
          mma_k16(G[1], p[r][0], p[r][2], p[r][1], p[r][3], sources[2], sources[3]);
        }
      add_diagonals(sums + i * KW * 4, G, lane);
    }
  }
  sync_warp();
  float* parts = a.parts + ((i64)blockIdx.x * a.channels + channel) * KH * KW;
  for (int i = lane; i < KH * KW; i += 32) parts[i] = sums[4 * i] + sums[4 * i + 1] + sums[4 * i + 2] + sums[4 * i + 3];
}
