// An emulation of aft_mm/ops/cuda/warp.h on a CPU: each thread of a block is a fiber, which yields at a
// collective instruction until all lanes of its warp have come. It shows no races.
#define AFT_MM_WARP_H
#include <cmath>
#include <cstring>
#include <ucontext.h>
#include <vector>
#define DEVICE inline
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __ffs __builtin_ffs
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 17);
  bool done;
};
struct Index {
  int x, y;
};
static Index threadIdx, blockIdx, gridDim;
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static void (*job)(const void*);
static const void* argument;
static int arrived[32], round_of[32], parity[1024];
static u32 exchanged[2][1024][6];

static void wait_for_warp() {
  const int me = threadIdx.x, warp = me / 32, round = round_of[warp];
  if (++arrived[warp] == 32) {
    arrived[warp] = 0;
    round_of[warp]++;
    return;
  }
  while (round_of[warp] == round) {
    swapcontext(&fibers[me].context, &scheduler);
    threadIdx.x = me;
  }
}
template <int N> u32 (*exchange(const u32 (&x)[N]))[6] {  // all lanes see what each lane gives
  const int me = threadIdx.x, p = parity[me] ^= 1;
  for (int i = 0; i < N; i++) exchanged[p][me][i] = x[i];
  wait_for_warp();
  return exchanged[p] + me / 32 * 32;
}
inline float FLOAT(u32 x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline u32 BITS(float x) {
  u32 y;
  memcpy(&y, &x, 4);
  return y;
}
inline float bf16_of(u32 x, int high) { return FLOAT(high ? x & 0xffff0000u : x << 16); }
inline u32 bf16(float x) {
  const u32 b = BITS(x);
  return x != x ? 0x7fff : (b + 0x7fff + ((b >> 16) & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return bf16(low) | bf16(high) << 16; }
inline u32 half_bits(float x) {
  const _Float16 y = (_Float16)x;
  u16 z;
  memcpy(&z, &y, 2);
  return z;
}
inline u32 pack_half(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
inline float from_half(u16 x) {
  _Float16 y;
  memcpy(&y, &x, 2);
  return (float)y;
}
inline u32 to_tf32(float x) { return x != x ? 0x7fffffffu : std::isinf(x) ? BITS(x) : (BITS(x) + 0x1000) & 0xffffe000u; }

inline void mma_k16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto all = exchange({a0, a1, a2, a3, b0, b1});
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * q + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; k++)
      sum += bf16_of(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) * bf16_of(all[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    c[i] += sum;
  }
}
inline void mma_k8(float* c, u32 a0, u32 a1, u32 b) { mma_k16(c, a0, a1, 0, 0, b, 0); }
inline void mma_tf32(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto all = exchange({a0, a1, a2, a3, b0, b1});
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * q + i % 2;
    float sum = 0;
    for (int k = 0; k < 8; k++)
      sum += FLOAT(all[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]) * FLOAT(all[column * 4 + k % 4][4 + k / 4]);
    c[i] += sum;
  }
}
inline u32 transpose(u32 x) {
  auto all = exchange({x});
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  u32 y = 0;
  for (int e = 0; e < 2; e++) {
    const u32 pair = all[(2 * q + e) * 4 + g / 2][0];
    y |= (g % 2 ? pair >> 16 : pair & 0xffff) << 16 * e;
  }
  return y;
}
inline float shuffle_xor(float x, int mask) { return FLOAT(exchange({BITS(x)})[threadIdx.x % 32 ^ mask][0]); }
inline float shuffle_down(float x, int lanes) {
  const int lane = threadIdx.x % 32;
  return FLOAT(exchange({BITS(x)})[lane + lanes < 32 ? lane + lanes : lane][0]);
}
inline u32 ballot(bool x) {
  auto all = exchange({(u32)x});
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= all[i][0] << i;
  return bits;
}
inline void sync_warp() { wait_for_warp(); }
inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? 0 : x; }
inline float ex2(float x) { return flushed(std::exp2(x)); }
inline float lg2(float x) { return std::log2(x); }
inline float rcp(float x) { return flushed(1 / flushed(x)); }
template <class T> T* keep(T* x) { return x; }
template <class T> void store(T* x, T y) { *x = y; }
template <class T> T load(const T* x) { return *x; }

static void enter() {
  const int me = threadIdx.x;
  job(argument);
  threadIdx.x = me;
  fibers[me].done = true;
}
// Runs all blocks of a launch, one after the other.
static void run_grid(void (*kernel)(const void*), const void* given, int x, int y, int threads) {
  job = kernel;
  argument = given;
  gridDim = {x, y};
  if ((int)fibers.size() < threads) fibers = std::vector<Fiber>(threads);
  for (int block = 0; block < x * y; block++) {
    blockIdx = {block % x, block / x};
    for (int i = 0; i < threads; i++) {
      Fiber& fiber = fibers[i];
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, enter, 0);
    }
    for (int left = threads; left;)
      for (int i = 0; i < threads; i++)
        if (!fibers[i].done) {
          threadIdx.x = i;
          swapcontext(&scheduler, &fibers[i].context);
          left -= fibers[i].done;
        }
  }
}
#define EXPORT(kernel) \
  extern "C" void run_##kernel(const Arguments* a, int x, int y, int threads) { \
    run_grid([](const void* given) { kernel(*(const Arguments*)given); }, a, x, y, threads); \
  }
