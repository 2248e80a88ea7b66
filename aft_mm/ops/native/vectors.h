// Vectors of channels, as wide as the instruction set of this build: loads and stores of float32
// and bfloat16, and the exponential.
//
// The compiler's vector types allow one source for every instruction set. setup.py builds it for
// each; availability.py loads the one that torch uses on this machine.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#if defined(__clang__) || __GNUC__ >= 11
#define WITH_BFLOAT16  // the compiler knows the instructions for bfloat16
#endif

constexpr int LANES = 16;
constexpr int SUMS = 16;  // sums that fit into the registers, next to what is added to them
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int SUMS = 8;
#else
constexpr int LANES = 4;
constexpr int SUMS = 8;
#endif

#define UNROLL _Pragma("GCC unroll 32")
#define INLINE inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bfloat16 {
    uint16_t bits;
};

constexpr float LOWEST = -3.402823466e38f;  // the shift of an empty sum
constexpr float TINY = 1.175494351e-38f;

INLINE Vector all(float x) { return x - Vector{}; }

INLINE Vector larger(Vector a, Vector b) { return a > b ? a : b; }

INLINE bool any(Integers condition) {
    int32_t found = 0;
    for (int lane = 0; lane < LANES; ++lane) found |= condition[lane];
    return found != 0;
}

INLINE Vector load(const float* from) {
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float* to, Vector x) { memcpy(to, &x, sizeof x); }

INLINE Vector widened(Halves x) {
#if defined(__AVX512F__)  // GCC takes four instructions for the conversion of vectors
    return (Vector)((Words)_mm512_cvtepu16_epi32((__m256i)x) << 16);
#else
    return (Vector)(__builtin_convertvector(x, Words) << 16);
#endif
}

INLINE Vector load(const bfloat16* from) {
    Halves x;
    memcpy(&x, from, sizeof x);
    return widened(x);
}

// Rounds to nearest, ties to even; NaN stays NaN.
INLINE Halves rounded_halves(Vector x) {
    Words bits = (Words)x;
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(x == x ? rounded : Words{} + 0x7fc0, Halves);
}

INLINE void store(bfloat16* to, Vector x) {
    Halves halves = rounded_halves(x);
    memcpy(to, &halves, sizeof halves);
}

// The same by one instruction, of processors with AVX512_BF16.
INLINE Halves narrowed(Vector x) {
#if defined(WITH_BFLOAT16)
    Halves halves;
    asm("vcvtneps2bf16 %1, %0" : "=v"(halves) : "v"(x));
    return halves;
#else
    return rounded_halves(x);
#endif
}

INLINE Vector rounded(Vector x) { return widened(narrowed(x)); }

// Loads the first `active_lanes` of a vector, where the channels end; the rest is 0.
template <typename Number>
INLINE Vector load(const Number* from, int active_lanes) {
    if (active_lanes == LANES) return load(from);
    Number part[LANES] = {};
    memcpy(part, from, active_lanes * sizeof(Number));
    return load(part);
}

template <typename Number>
INLINE void store(Number* to, Vector x, int active_lanes) {
    if (active_lanes == LANES) return store(to, x);
    Number part[LANES];
    store(part, x);
    memcpy(to, part, active_lanes * sizeof(Number));
}

// e^x to 2 units in the last place: 0 below -87, e^88 above 88, NaN for NaN.
INLINE Vector exponential(Vector x) {
    Vector bounded = x > 88.0f ? all(88.0f) : x;
    bounded = bounded < -87.0f ? all(-87.0f) : bounded;
    // Adding 1.5 * 2^23 rounds to an integer: the fraction does not fit into the mantissa.
    Vector whole = bounded * 1.442695041f + 12582912.0f - 12582912.0f;
    Vector rest = bounded - whole * 0.693359375f - whole * -2.12194440e-4f;
    Vector sum = all(1.9875691500e-4f);
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * (rest * rest) + rest + 1.0f;
    Integers power = (__builtin_convertvector(whole, Integers) + 127) << 23;
    Vector result = sum * (Vector)power;
    return x < -87.0f ? Vector{} : result;
}

// A compensated sum (Kahan): small terms are not lost next to a large sum.
struct KahanSum {
    Vector sum = {}, lost = {};

    INLINE void add(Vector x) {
        x -= lost;
        Vector next = sum + x;
        lost = (next - sum) - x;
        sum = next;
    }

    INLINE void scale(Vector factor) { sum *= factor, lost *= factor; }
};

// Returns x[index] for every lane.
INLINE Vector pick(Vector x, Integers index) {
#if defined(__clang__)
    Vector result;
    for (int lane = 0; lane < LANES; ++lane) result[lane] = x[index[lane]];
    return result;
#else
    return __builtin_shuffle(x, index);
#endif
}

// Returns lanes of a and, from LANES on, of b.
INLINE Vector pick(Vector a, Vector b, Integers index) {
#if defined(__clang__)
    Vector result;
    for (int lane = 0; lane < LANES; ++lane)
        result[lane] = index[lane] < LANES ? a[index[lane]] : b[index[lane] - LANES];
    return result;
#else
    return __builtin_shuffle(a, b, index);
#endif
}

enum Gate : int64_t { NONE, SIGMOID, RELU };

// x / d and e^-x, for results in bfloat16 with a relative error of 1e-4, a sixteenth of its rounding,
// where that is faster.
template <typename Number>
INLINE Vector divide(Vector x, Vector d) {
#if defined(__AVX512F__)
    if constexpr (sizeof(Number) == 2) return x * (Vector)_mm512_rcp14_ps((__m512)d);
#endif
    return x / d;
}

template <typename Number>
INLINE Vector negative_exponential(Vector x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(Number) == 2) {
        __m512 power = (__m512)(x * -1.442695041f);
        __m512 whole = _mm512_roundscale_ps(power, 0);
        Vector rest = (Vector)(power - whole);
        Vector sum = all(0.05517108f);
        sum = sum * rest + 0.2426102f;
        sum = sum * rest + 0.69326099f;
        sum = sum * rest + 0.99992813f;
        return (Vector)_mm512_scalef_ps((__m512)sum, whole);
    }
#endif
    return exponential(-x);
}

// g(q) n / d. The two denominators are no product, which would overflow.
template <typename Number>
INLINE Vector gated_mean(Vector query, Vector numerator, Vector denominator, int64_t gate) {
    Vector mean = divide<Number>(numerator, denominator);
    if (gate == SIGMOID) return divide<Number>(mean, 1.0f + negative_exponential<Number>(query));
    if (gate == RELU) return mean * (query > 0.0f ? query : (query == query ? Vector{} : query));
    return mean;
}

// g(q) and its derivative.
INLINE Vector gate_with_slope(Vector query, int64_t gate, Vector& slope) {
    slope = Vector{};
    if (gate == NONE) return all(1.0f);
    if (gate == SIGMOID) {
        Vector gate_value = 1.0f / (1.0f + exponential(-query));
        slope = gate_value * (1.0f - gate_value);
        return gate_value;
    }
    slope = query > 0.0f ? all(1.0f) : Vector{};
    return query > 0.0f ? query : Vector{};
}

constexpr int64_t SMALLEST_PARALLEL = 1 << 15;  // elements from which on threads are used

// What the functions of the library return.
enum Status : int { DONE, OUT_OF_MEMORY, INEXACT };

#if defined(_OPENMP)
extern "C" int omp_get_thread_num();  // its header is missing in some installations of clang
#else  // every thread has a Scratch of its own
inline int omp_get_thread_num() { return 0; }
#endif

// The memory of one call, reused by later calls of the same thread: fresh pages cost more than the
// work on them. It is allocated before a parallel region, since no exception may leave one.
class Scratch {
public:
    ~Scratch() { free(memory); }

    // Allocates `elements` for each thread and returns whether there was memory for them.
    bool reserve(int64_t threads, int64_t elements) {
        stride = (elements + 15) / 16 * 16;  // whole cache lines
        size_t needed = threads * stride;
        if (needed <= size) return true;
        free(memory);
        size = 0;
        memory = static_cast<float*>(aligned_alloc(64, 4 * needed));
        if (memory == nullptr) return false;
        size = needed;
        return true;
    }

    // Returns the part of the thread that calls it.
    float* part() const { return memory + omp_get_thread_num() * stride; }

private:
    float* memory = nullptr;
    size_t size = 0;
    int64_t stride = 0;
};
