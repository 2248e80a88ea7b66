// AFT-conv on maps of any size, also causal.
//
// A block is 8 columns of a row. A warp owns a channel of 8 sequences and COUNT blocks of targets, and
// walks down the rows; lane (g, q) holds of sequence g the columns 2q, 2q + 1 of each block: terms,
// sums and gradients alike, as in conv_small.cu. A block of targets is multiplied with the NEAR blocks
// on either side; what is further away has W = 1 and enters as sums of blocks:
//
//   (n, d)_r = sum_i X_{r+i} W_i + near blocks of the rows beyond the kernel + far blocks of all rows
//
// so nothing is subtracted here either. If causal, W of later rows is 0, and the sums are those of the
// rows before this one. Terms of bfloat16 tokens are bfloat16, those of float16 tf32, of float32 float32.
// The launches of a forward pass: table, units, sums, forward, exact; of a backward pass: table, units,
// sums, targets, target sums, sources, weight, exact. A warp that has a whole map finds its units and
// sums itself, while the tokens are in the cache.
//
// More macros: COUNT blocks of a warp; HALO blocks that it reads beyond them; ROWS of the kernel whose
// gradient a warp sums.
#include "conv.h"
#define BLOCKS ((W + 7) / 8)
#define READ (COUNT + 2 * HALO)
#define STRIPS ((BLOCKS + COUNT - 1) / COUNT)
// The terms of KH rows stay in registers if they fit, and all indices are then known; the loop over
// rows is then unrolled KH times.
#define IN_REGISTERS (KH <= (FULL ? 3 : 15) && KH * READ * WORDS <= 96)
#define KEEP_TILES (IN_REGISTERS && KH * (2 * NEAR + 1) * TILE <= 40)
#if TF32
#define WORDS 4  // n, d of the column 2q, then of 2q + 1
#define TILE 2
#else
#define WORDS 2  // n, then d, of both columns in bfloat16
#define TILE 1
#endif

struct alignas(4 * WORDS) Block {
  u32 word[WORDS];
};
DEVICE Block block_of(float n0, float n1, float d0, float d1) {
#if TF32
  return FULL ? Block{{BITS(n0), BITS(d0), BITS(n1), BITS(d1)}} : Block{{to_tf32(n0), to_tf32(d0), to_tf32(n1), to_tf32(d1)}};
#else
  return {{pack_bf16(n0, n1), pack_bf16(d0, d1)}};
#endif
}
#if TF32
// a b; of float32 numbers as three products of their parts.
DEVICE void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if FULL
  const u32 x[] = {a0, a1, a2, a3, b0, b1};
  u32 part[6], rest[6];
  UNROLL for (int i = 0; i < 6; i++) {
    part[i] = to_tf32(FLOAT(x[i]));
    rest[i] = to_tf32(FLOAT(x[i]) - FLOAT(part[i]));
  }
  mma_tf32(c, rest[0], rest[1], rest[2], rest[3], part[4], part[5]);
  mma_tf32(c, part[0], part[1], part[2], part[3], rest[4], rest[5]);
  mma_tf32(c, part[0], part[1], part[2], part[3], part[4], part[5]);
#else
  mma_tf32(c, a0, a1, a2, a3, b0, b1);
#endif
}
#endif
DEVICE void product(float* c, const Block& x, const u32* tile) {
#if TF32
  multiply(c, x.word[0], x.word[1], x.word[2], x.word[3], tile[0], tile[1]);
#else
  mma_k8(c, x.word[0], x.word[1], tile[0]);
#endif
}
DEVICE void products(float* c, const Block& x, const Block& y, const u32* tile, const u32* next) {
#if TF32
  product(c, x, tile);
  product(c, y, next);
#else
  mma_k16(c, x.word[0], x.word[1], y.word[0], y.word[1], tile[0], next[0]);
#endif
}
DEVICE void sum_block(float* c, const Block& x) {
  const u32 ones[] = {TF32 ? 0x3f800000u : 0x3f803f80u, 0x3f800000u};
  product(c, x, ones);
}
// W of the distances 8 j + 2q - g and one more; `row` is that of the distance 2q - g.
DEVICE void load_tile(u32* tile, const u32* row, int j) {
  UNROLL for (int e = 0; e < TILE; e++) tile[e] = load(row + 8 * j + e);
}
DEVICE void transpose_block(Block& x) {
#if TF32
  UNROLL for (int i = 0; i < 2; i++) {  // n, d: 32 bits of two columns as two pairs of 16
    const u32 first = x.word[i], second = x.word[i + 2];
    const u32 lower = transpose((first & 0xffffu) | second << 16);
    const u32 upper = transpose(first >> 16 | (second & 0xffff0000u));
    x.word[i] = (lower & 0xffffu) | upper << 16;
    x.word[i + 2] = lower >> 16 | (upper & 0xffff0000u);
  }
#else
  UNROLL for (int i = 0; i < 2; i++) x.word[i] = transpose(x.word[i]);
#endif
}
// c[16, 8] += the transposed targets of two blocks times the transposed sources of one.
DEVICE void outer_product(float* c, const Block& p, const Block& next, const Block& x) {
#if TF32
  UNROLL for (int i = 0; i < 2; i++)
    multiply(c, p.word[i], next.word[i], p.word[i + 2], next.word[i + 2], x.word[i], x.word[i + 2]);
#else
  mma_k16(c, p.word[0], next.word[0], p.word[1], next.word[1], x.word[0], x.word[1]);
#endif
}

struct Place {  // of a lane, with the channel and sequence that it computes
  int g, q, channel, item;
};
DEVICE Place place_of(int groups_of_8) {
  const int lane = threadIdx.x % 32;
  return {lane / 4, lane % 4, (int)(blockIdx.y * WARPS + threadIdx.x / 32), groups_of_8 * 8 + lane / 4};
}
DEVICE i64 number_of(const Arguments& a, const Place& p) { return (i64)p.channel * a.batch + p.item; }

// Where blocks of terms come from: keys and values, or the gradients of n and d.
struct Sources {
  static const bool BACKWARD = false;
  Sequence s;
  float unit, centre;
  DEVICE Sources(const Arguments& a, const Place& p) : s(sequence_of(a, p.channel, p.item, p.q)), unit(0), centre(0) {
    if (!s.real) return;
    unit = a.units[2 * number_of(a, p)];
    centre = a.units[2 * number_of(a, p) + 1];
  }
  DEVICE Block operator()(int r, int block) const {
    Pair key, value;
    load_key_value(key, value, s, r, block);
    const float e = term(low(key), unit), f = term(high(key), unit);
    return block_of(e * (low(value) - centre), f * (high(value) - centre), e, f);
  }
};
struct Targets {
  static const bool BACKWARD = true;
  const Block* blocks;  // [H, BLOCKS, 4] from lane q on
  bool real;
  DEVICE Targets(const Arguments& a, const Place& p)
      : blocks((const Block*)a.targets + number_of(a, p) * H * BLOCKS * 4 + p.q), real(p.item < a.batch) {}
  DEVICE Block operator()(int r, int block) const {
    const bool there = real && r >= 0 && r < H && block >= 0 && block < BLOCKS;
    return there ? blocks[((i64)r * BLOCKS + block) * 4] : Block{};
  }
};

// The unit of each sequence and channel, and with a gradient the mean of the values in units of e^k.
DEVICE void find_units(const Arguments& a, const Place& p) {
  const Sequence s = sequence_of(a, p.channel, p.item, p.q);
  float most = -INFINITE, n = 0, d = 0;
  Pair key, value;
  for (int i = 0; i < H * BLOCKS; i++) {
    load_key_value(key, value, s, i / BLOCKS, i % BLOCKS);
    most = fmaxf(most, fmaxf(low(key), high(key)));
  }
  UNROLL for (int i = 1; i < 4; i *= 2) most = fmaxf(most, shuffle_xor(most, i));
  const float unit = unit_of(most);
  for (int i = 0; a.grad.data && i < H * BLOCKS; i++) {
    load_key_value(key, value, s, i / BLOCKS, i % BLOCKS);
    const float e = term(low(key), unit), f = term(high(key), unit);
    n += e * low(value) + f * high(value);
    d += e + f;
  }
  UNROLL for (int i = 1; i < 4; i *= 2) {
    n += shuffle_xor(n, i);
    d += shuffle_xor(d, i);
  }
  if (s.real && p.q == 0) {
    float* unit_of_sequence = a.units + 2 * number_of(a, p);
    unit_of_sequence[0] = unit;
    unit_of_sequence[1] = n * rcp(fmaxf(d, TINY));
  }
}
struct alignas(8) Sum {
  float n, d;
};
// [H, BLOCKS]: n and d of a block in this row and those below, of causal sources in those above.
DEVICE Sum* sums_of(const Arguments& a, const Place& p) { return (Sum*)a.sums + number_of(a, p) * H * BLOCKS; }
template <class Terms> DEVICE void sum_rows(const Arguments& a, const Place& p, int first, int last) {
  const Terms terms(a, p);
  for (int block = first; block < BLOCKS && block < last; block++) {
    float c[4] = {0, 0, 0, 0};
    for (int i = 0; i < H; i++) {
      const int r = CAUSAL && !Terms::BACKWARD ? i : H - 1 - i;
      sum_block(c, terms(r, block));
      if (p.item < a.batch && p.q == 0) {
        sums_of(a, p)[(i64)r * BLOCKS + block] = {c[0], c[2]};
      }
    }
  }
}
template <class Terms> DEVICE void sum_some_rows(const Arguments& a) {
  const int groups = (a.batch + 7) / 8, first = blockIdx.x / groups * 8;
  const Place p = place_of(blockIdx.x % groups);
  if (p.channel < a.channels) sum_rows<Terms>(a, p, first, first + 8);
}
extern "C" __global__ void __launch_bounds__(32 * WARPS) conv_units_kernel(const Arguments a) {
  const Place p = place_of(blockIdx.x);
  if (p.channel < a.channels) find_units(a, p);
}
extern "C" __global__ void __launch_bounds__(32 * WARPS) conv_sums_kernel(const Arguments a) { sum_some_rows<Sources>(a); }
extern "C" __global__ void __launch_bounds__(32 * WARPS) conv_target_sums_kernel(const Arguments a) { sum_some_rows<Targets>(a); }
template <class Terms> DEVICE void sum_whole_map(const Arguments& a, const Place& p) {
  if (STRIPS > 1) return;
  sync_warp();
  sum_rows<Terms>(a, p, 0, BLOCKS);
  sync_warp();
}

// n and d of the blocks beyond the near ones, of all rows; if causal, of those up to row r on the side of
// what it sees, and without it on the other.
template <bool BACKWARD> DEVICE void sum_far(float (*far)[2], const Sum* sums, int q, int first, int r, bool real) {
  const int next = BACKWARD ? r + 1 : r - 1;
  UNROLL for (int i = 0; i < COUNT; i++) far[i][0] = far[i][1] = 0;
  if (!GLOBAL || BLOCKS <= NEAR + 1) return;
  for (int j = q; real && j < BLOCKS; j += 4) {
    const Sum here = sums[(i64)r * BLOCKS + j];
    Sum other = here;
    if (CAUSAL) other = next >= 0 && next < H ? sums[(i64)next * BLOCKS + j] : Sum{0, 0};
    UNROLL for (int i = 0; i < COUNT; i++) {
      const bool left = j < first + i - NEAR, right = j > first + i + NEAR;
      if (left || right) {
        far[i][0] += (BACKWARD ? left : right) ? other.n : here.n;
        far[i][1] += (BACKWARD ? left : right) ? other.d : here.d;
      }
    }
  }
  UNROLL for (int i = 0; i < COUNT; i++)
    UNROLL for (int e = 0; e < 2; e++) {
      far[i][e] += shuffle_xor(far[i][e], 1);
      far[i][e] += shuffle_xor(far[i][e], 2);
    }
}
// Calls finish(r, n, total) for each row and block of targets, with total = (n, n, d, d) of a lane's two
// columns. With BACKWARD a source takes the place of a target, and W is transposed.
template <class Terms, class F> DEVICE void weigh_rows(const Arguments& a, const Place& p, int first, F finish) {
  constexpr bool BACKWARD = Terms::BACKWARD;
  const Terms terms(a, p);
  const u32* table = keep(a.table + ((i64)(p.channel / a.share) * 2 + BACKWARD) * KH * SPAN + OFFSET + 2 * p.q - p.g);
  const bool real = p.item < a.batch;
  const Sum* sums = sums_of(a, p);
  float far[COUNT][2], before[READ][4] = {};
  if (!CAUSAL) sum_far<BACKWARD>(far, sums, p.q, first, 0, real);
#if KEEP_TILES
  u32 tile[KH][2 * NEAR + 1][TILE];
  UNROLL for (int i = 0; i < KH; i++)
    UNROLL for (int j = 0; j <= 2 * NEAR; j++) load_tile(tile[i][j], table + i * SPAN, j - NEAR);
#endif
  Block x[KH][READ];  // row s in s % KH; 0 where there is no row
  UNROLL for (int s = 0; s < KH; s++)
    UNROLL for (int j = 0; j < READ; j++) x[s][j] = s < RH && s < H ? terms(s, first + j - HALO) : Block{};
  for (int r0 = 0; r0 < H; r0 += KH) {
#if IN_REGISTERS
    UNROLL
#endif
    for (int u = 0; u < KH; u++) {
      const int r = r0 + u;
      if (r >= H) break;
      Block* newest = x[(u + RH) % KH];
      if (CAUSAL) sum_far<BACKWARD>(far, sums, p.q, first, r, real);
      UNROLL for (int j = 0; j < READ; j++) {
        if (GLOBAL && r > RH && !(CAUSAL && BACKWARD)) sum_block(before[j], newest[j]);
        newest[j] = terms(r + RH, first + j - HALO);
      }
      float total[COUNT][4], near[READ][2];
      UNROLL for (int j = 0; j < READ; j++) {
        const int block = first + j - HALO;
        near[j][0] = before[j][0];
        near[j][1] = before[j][2];
        const bool sees_below = GLOBAL && (BACKWARD || !CAUSAL);
        if (sees_below && real && r + RH + 1 < H && block >= 0 && block < BLOCKS) {
          const Sum below = sums[(i64)(r + RH + 1) * BLOCKS + block];
          near[j][0] += below.n;
          near[j][1] += below.d;
        }
      }
      UNROLL for (int n = 0; n < COUNT; n++) {
        float sum[2] = {far[n][0], far[n][1]};
        UNROLL for (int j = 0; j < READ; j++)
          if (j - n - HALO >= -NEAR && j - n - HALO <= NEAR) {
            sum[0] += near[j][0];
            sum[1] += near[j][1];
          }
        total[n][0] = total[n][1] = sum[0];
        total[n][2] = total[n][3] = sum[1];
      }
#if IN_REGISTERS
      UNROLL
#endif
      for (int i = 0; i < KH; i++) {
        if (CAUSAL && (BACKWARD ? i < RH : i > RH)) continue;
        const Block* row = x[(u + i - RH + KH) % KH];
#if KEEP_TILES
        const u32 (*tiles)[TILE] = tile[i];
#else
        u32 tiles[2 * NEAR + 1][TILE];
        UNROLL for (int j = 0; j <= 2 * NEAR; j++) load_tile(tiles[j], table + i * SPAN, j - NEAR);
#endif
        UNROLL for (int n = 0; n < COUNT; n++) {
          bool paired = false;
          UNROLL for (int j = 0; j < READ; j++) {
            const int t = j - n - HALO + NEAR;
            if (paired) {
              paired = false;
            } else if (t >= 0 && t <= 2 * NEAR) {
              // Pairs begin at even blocks, so that their registers are neighbours.
              paired = j % 2 == 0 && t < 2 * NEAR && j + 1 < READ;
              if (paired) products(total[n], row[j], row[j + 1], tiles[t], tiles[t + 1]);
              else product(total[n], row[j], tiles[t]);
            }
          }
        }
      }
      UNROLL for (int n = 0; n < COUNT; n++) finish(r, n, total[n]);
    }
  }
}
DEVICE void keep_flag(const Arguments& a, const Place& p, int stage, bool fails) {
  fails = any_of_sequence(fails);
  if (p.item < a.batch && p.q == 0) a.flags[(i64)stage * a.channels * a.batch + number_of(a, p)] = fails;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 8 / WARPS) conv_forward_kernel(const Arguments a) {
  const Place p = place_of(blockIdx.x / STRIPS);
  if (p.channel >= a.channels) return;
  const int strip = blockIdx.x % STRIPS, first = strip * COUNT;
  const Sequence s = sequence_of(a, p.channel, p.item, p.q);
  Number* out = start_of(a.out, p.channel, p.item, p.q);
  Watch watch;
  if (STRIPS == 1) find_units(a, p);
  sum_whole_map<Sources>(a, p);
  weigh_rows<Sources>(a, p, first, [&](int r, int n, const float* total) {
    const int col = 8 * (first + n) + 2 * p.q;
    const Pair query = GATE ? load_pair(s.query, r, first + n, p.q, s.real) : 0;
    const float y = gated(total[0], total[2], low(query)), z = gated(total[1], total[3], high(query));
    if (inside(r, col)) watch.see(total[2], y);
    if (inside(r, col + 1)) watch.see(total[3], z);
    store_pair(out, r, first + n, p.q, s.real, y, z);
  });
  keep_flag(a, p, strip, watch.fails(load(a.least + p.channel / a.share)));
}
extern "C" __global__ void __launch_bounds__(32 * WARPS, 8 / WARPS) conv_targets_kernel(const Arguments a) {
  const Place p = place_of(blockIdx.x / STRIPS);
  if (p.channel >= a.channels) return;
  const int strip = blockIdx.x % STRIPS, first = strip * COUNT;
  const Sequence s = sequence_of(a, p.channel, p.item, p.q);
  Number* grad_query = start_of(a.out, p.channel, p.item, p.q);
  Block* blocks = (Block*)a.targets + number_of(a, p) * H * BLOCKS * 4 + p.q;
  Watch watch;
  if (STRIPS == 1) find_units(a, p);
  sum_whole_map<Sources>(a, p);
  const float centre = s.real ? a.units[2 * number_of(a, p) + 1] : 0;
  weigh_rows<Sources>(a, p, first, [&](int r, int n, const float* total) {
    const int col = 8 * (first + n) + 2 * p.q;
    const Pair grad = load_pair(s.grad, r, first + n, p.q, s.real), query = GATE ? load_pair(s.query, r, first + n, p.q, s.real) : 0;
    float ga[2], gc[2], dq[2];
    target(ga[0], gc[0], dq[0], low(grad), low(query), total[0], total[2], centre, inside(r, col));
    target(ga[1], gc[1], dq[1], high(grad), high(query), total[1], total[3], centre, inside(r, col + 1));
    if (GATE) store_pair(grad_query, r, first + n, p.q, s.real, dq[0], dq[1]);
    if (inside(r, col)) watch.see(total[2], gc[0]);
    if (inside(r, col + 1)) watch.see(total[3], gc[1]);
    if (s.real && first + n < BLOCKS) blocks[((i64)r * BLOCKS + first + n) * 4] = block_of(ga[0], ga[1], gc[0], gc[1]);
  });
  keep_flag(a, p, strip, watch.fails(load(a.least + p.channel / a.share)));
}
extern "C" __global__ void __launch_bounds__(32 * WARPS, 8 / WARPS) conv_sources_kernel(const Arguments a) {
  const Place p = place_of(blockIdx.x / STRIPS);
  if (p.channel >= a.channels) return;
  const int strip = blockIdx.x % STRIPS, first = strip * COUNT;
  const Sequence s = sequence_of(a, p.channel, p.item, p.q);
  const Sources terms(a, p);
  Number* grad_value = start_of(a.grad_value, p.channel, p.item, p.q);
  KeyGrad* grad_key = start_of<KeyGrad>(a.grad_key, p.channel, p.item, p.q);
  Watch watch;
  sum_whole_map<Targets>(a, p);
  weigh_rows<Targets>(a, p, first, [&](int r, int n, const float* total) {
    const int col = 8 * (first + n) + 2 * p.q;
    Pair key, value;
    load_key_value(key, value, s, r, first + n);
    const float e = term(low(key), terms.unit), f = term(high(key), terms.unit);
    const float dv[] = {e * total[0], f * total[1]};
    const float dk[] = {e * ((low(value) - terms.centre) * total[0] + total[2]),
                        f * ((high(value) - terms.centre) * total[1] + total[3])};
    if (inside(r, col)) watch.see(dk[0]);
    if (inside(r, col + 1)) watch.see(dk[1]);
    store_pair(grad_value, r, first + n, p.q, s.real, dv[0], dv[1]);
    store_pair(grad_key, r, first + n, p.q, s.real, dk[0], dk[1]);
  });
  keep_flag(a, p, STRIPS + strip, watch.fails(0));
}

// parts[split, channel, i]: the sums of the diagonals of P^T X for some rows i of the kernel. A warp of
// its own for each split of the batch, channel and ROWS rows.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 8 / WARPS) conv_weight_kernel(const Arguments a) {
  __shared__ float all_sums[WARPS][KW * 4];
  Place p = place_of(0);
  if (p.channel >= a.channels) return;
  float* sums = all_sums[threadIdx.x / 32];
  const int split = blockIdx.x % a.splits, row = blockIdx.x / a.splits * ROWS, lane = threadIdx.x % 32;
  float G[ROWS][2 * NEAR + 2][4] = {};  // 16 targets x 8 sources, for each distance of blocks
  for (int group = split; group * 8 < a.batch && !(CAUSAL && row > RH); group += a.splits) {
    p.item = group * 8 + p.g;
    bool skip = p.item >= a.batch;
    for (int i = 0; i < a.flagged && p.item < a.batch; i++) skip |= load(a.flags + (i64)i * a.channels * a.batch + number_of(a, p)) != 0;
    const Sources terms(a, p);
    const Targets targets(a, p);
    for (int first = 0; first < BLOCKS; first += 2)
      for (int s = 0; s < H; s++) {
        Block x[2 * NEAR + 2];
        UNROLL for (int j = 0; j < 2 * NEAR + 2; j++) {
          x[j] = terms(s, first + j - NEAR);
          if (skip) x[j] = Block{};
          transpose_block(x[j]);
        }
        UNROLL for (int i = 0; i < ROWS; i++) {
          const int r = s - (row + i) + RH;
          if (row + i >= KH || (CAUSAL && row + i > RH) || r < 0 || r >= H) continue;
          Block one = targets(r, first), two = targets(r, first + 1);
          if (skip) one = two = Block{};
          transpose_block(one);
          transpose_block(two);
          UNROLL for (int j = 0; j < 2 * NEAR + 2; j++) outer_product(G[i][j], one, two, x[j]);
        }
      }
  }
  UNROLL for (int i = 0; i < ROWS; i++) {
    if (row + i >= KH) break;
    for (int o = lane; o < KW * 4; o += 32) sums[o] = 0;
    sync_warp();
    UNROLL for (int j = 0; j <= 2 * NEAR; j++)
      UNROLL for (int e = 0; e < 2; e++) {
        // The first of the 16 targets see the block j - NEAR, the others the block before it.
        float z = G[i][j][e] + G[i][j + 1][2 + e], other = shuffle_down(z, 9);
        if (p.g < 6 && p.q < 3) z += other;
        other = shuffle_down(z, 18);
        if (p.g < 4 && p.q < 2) z += other;
        const int o = 2 * p.q - p.g + 8 * (j - NEAR) + e + RW;
        if ((p.q == 0 || p.g < 2) && o >= 0 && o < KW) sums[4 * o + 2 * (j % 2) + e] += z;
      }
    sync_warp();
    float* parts = a.parts + (((i64)split * a.channels + p.channel) * KH + row + i) * KW;
    for (int o = lane; o < KW; o += 32)
      parts[o] = CAUSAL && row + i == RH && o > RW ? 0 : sums[4 * o] + sums[4 * o + 1] + sums[4 * o + 2] + sums[4 * o + 3];
    sync_warp();
  }
}
