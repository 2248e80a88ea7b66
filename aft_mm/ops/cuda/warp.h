// Instructions of a warp. On a CPU, tests include an emulation in place of this file.
//
// Lane (g, q) = (lane / 4, lane % 4) holds of a product c[16, 8] += a[16, k] b[k, 8] in
// mma.sync: c[0], c[1]: row g, columns 2q and 2q + 1; c[2], c[3]: row g + 8.
#ifndef AFT_MM_WARP_H
#define AFT_MM_WARP_H
#define DEVICE __device__ __forceinline__
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define BITS(x) __float_as_uint(x)
#define FLOAT(x) __uint_as_float(x)

DEVICE void mma_k16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void mma_k8(float* c, u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}
// Rows g, g + 8, g, g + 8 and columns q, q, q + 4, q + 4 of a; rows q, q + 4 of b.
DEVICE void mma_tf32(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE u32 transpose(u32 x) {  // of an 8 x 8 tile of 16 bits
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
DEVICE u32 pack_bf16(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE u32 pack_half(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE float from_half(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
DEVICE u32 to_tf32(float x) {
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE float shuffle_down(float x, int lanes) { return __shfl_down_sync(~0u, x, lanes); }
DEVICE u32 ballot(bool x) { return __ballot_sync(~0u, x); }
DEVICE void sync_warp() { __syncwarp(); }
// Keeps the compiler from computing an address again for each load.
template <class T> DEVICE T* keep(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}
DEVICE void store(u32* x, u32 y) { asm volatile("st.global.u32 [%0], %1;" ::"l"(x), "r"(y)); }
DEVICE void store(unsigned long long* x, unsigned long long y) { asm volatile("st.global.u64 [%0], %1;" ::"l"(x), "l"(y)); }
DEVICE void store(u16* x, u16 y) { asm volatile("st.global.u16 [%0], %1;" ::"l"(x), "h"(y)); }
DEVICE void store(float* x, float y) { asm volatile("st.global.f32 [%0], %1;" ::"l"(x), "f"(y)); }
// What no thread of the launch writes.
template <class T> DEVICE T load(const T* x) { return __ldg(x); }
#endif
