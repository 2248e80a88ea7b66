// The forward pass of AFT-conv in bfloat16 by products of tiles (AMX, of processors with AVX-512).
//
// A tile of the kernel holds the weights of 32 sources for 16 tokens of a row: one row of sources
// with a margin, or two whole rows of up to 16. Its product with the terms e^k v and the weights e^k
// of these sources adds to numerators and denominators. Terms and kernel are rounded to bfloat16;
// sums are float32. The sum over all tokens takes the rounded terms too, so that only the rounding
// of e^w - 1 remains where it cancels; there the kernel is a sum of two tiles.

#pragma once

#include "conv.h"

#if defined(WITH_BFLOAT16)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define WITH_TILES __attribute__((target("amx-tile,amx-bf16,avx512bf16")))
#endif

namespace {

constexpr int SIDE = 16;                // tokens and channels of a tile of sums
constexpr int TILE = SIDE * SIDE;       // of 4 bytes
constexpr int AT_ONCE = 4;              // rows of tokens whose sums are in tiles
constexpr float CANCELS = -0.5f;        // entries below this need two tiles
constexpr int64_t LEAST_PRODUCTS = 36;  // of a row of the kernel, for tiles to be faster

// Returns whether the processor has tiles, and asks the kernel once to save them with its registers.
inline bool has_tiles() {
#if defined(WITH_TILES)
    static const bool has = [] {
        constexpr long REQUEST = 0x1023, TILE_DATA = 18;
        unsigned a, b, c, d;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
        if (!(d >> 22 & 1) || !(d >> 24 & 1)) return false;  // AMX-BF16, AMX-TILE
        if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;  // AVX512_BF16
        return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    }();
    return has;
#else
    return false;
#endif
}

INLINE bool are_finite(Vector x) {
    bool finite = true;
    for (int lane = 0; lane < LANES; ++lane) finite &= x[lane] - x[lane] == 0.0f;
    return finite;
}

// How channels are cut into pieces, and rows into tiles.
struct Tiles {
    int64_t group, heads, channels;  // of a head; of a piece
    int64_t step;                    // rows of sources in a tile
    int64_t slots;                   // tiles of a kernel
    int64_t across;                  // tiles of a row of tokens
    int64_t pitch;                   // pairs of sources in a row

    explicit Tiles(const ConvArgs& args) : group(args.channels / args.heads) {
        heads = group < SIDE / 2 ? SIDE / (group + 1) : 1;
        int64_t pieces = (group + SIDE - 2) / (SIDE - 1);
        channels = heads > 1 ? heads * group : (group + pieces - 1) / pieces;
        step = args.columns <= SIDE ? 2 : 1;
        slots = (args.kernel_rows + step - 1) / step;
        across = (args.columns + SIDE - 1) / SIDE;
        pitch = step == 2 ? SIDE / 2 : across * (SIDE / 2) + SIDE / 2;
    }

    bool are_faster(const ConvArgs& args) const {
        if (args.causal || args.form == ADDITIVE) return false;
        if (args.kernel_columns > (step == 1 ? SIDE + 1 : 2 * SIDE - 1)) return false;
        // Of a row of the kernel with the terms and weights of a head, where tiles have tokens.
        int64_t products = args.kernel_columns * ((group < channels ? group : channels) + 1);
        int64_t places = across * SIDE * ((args.rows + AT_ONCE - 1) / AT_ONCE) * AT_ONCE;
        return products * args.tokens >= LEAST_PRODUCTS * places && has_tiles();
    }

    int64_t heads_of_unit(bool idle) const { return idle ? heads : LANES / heads * heads; }

    int64_t lines(const ConvArgs& args) const { return args.rows + 2 * (step - 1); }

    // The memory of a unit: kernels, sums, terms and weights.
    int64_t elements(const ConvShape& shape) const {
        return heads * 2 * (slots + AT_ONCE) * TILE + lines(shape.args) * pitch * SIDE + shape.size;
    }
};

#if defined(WITH_TILES)

// Sets the tiles up, and back at the end: oneDNN does not set them up again for its next product.
class TileSetup {
public:
    WITH_TILES TileSetup() {
        alignas(64) uint8_t own[64] = {1};  // the only palette
        for (int tile = 0; tile < 8; ++tile) own[16 + 2 * tile] = 4 * SIDE, own[48 + tile] = SIDE;
        _tile_storeconfig(before);
        _tile_loadconfig(own);
    }

    WITH_TILES ~TileSetup() { _tile_loadconfig(before); }

    TileSetup(const TileSetup&) = delete;

private:
    alignas(64) uint8_t before[64];
};

WITH_TILES INLINE Vector load_part(const bfloat16* from, __mmask16 mask) {
    return widened((Halves)_mm256_maskz_loadu_epi16(mask, from));
}

// Writes the tiles of the kernel of a head and returns how many parts they have: [slots, parts].
WITH_TILES int make_kernel(uint32_t* tiles, const Tiles& plan, const ConvArgs& args, int64_t head) {
    const float* kernel = args.kernel + head;
    int64_t rows = args.kernel_rows, columns = args.kernel_columns;
    int parts = 1;
    for (int64_t entry = 0; entry < rows * columns && args.form == DIFFERENCE; ++entry)
        if (kernel[entry * args.heads] < CANCELS) parts = 2;
    // Lines of the kernel between zeros, as floats and rounded.
    alignas(64) float exact[4 * SIDE];
    alignas(64) uint16_t lines[2][2][4 * SIDE];  // [row of the tile, part]
    for (int64_t slot = 0; slot < plan.slots; ++slot) {
        for (int64_t i = 0; i < plan.step; ++i) {
            int64_t row = slot * plan.step + i;
            memset(exact, 0, sizeof exact);
            for (int64_t column = 0; column < columns && row < rows; ++column)
                exact[SIDE + column] = kernel[(row * columns + column) * args.heads];
            for (int64_t at = 0; at < 4 * SIDE; at += SIDE) {
                Vector x = load(exact + at);
                for (int part = 0; part < parts; ++part) {
                    Halves half = narrowed(x);
                    memcpy(lines[i][part] + at, &half, sizeof half);
                    x -= widened(half);
                }
            }
        }
        for (int part = 0; part < parts; ++part, tiles += TILE)
            for (int64_t token = 0; token < SIDE; ++token) {
                const uint16_t *first = lines[0][part] + SIDE - token, *second = first + SIDE;
                if (plan.step == 2) {
                    first += columns / 2;
                    second = lines[1][part] + SIDE - token + columns / 2;
                }
                memcpy(tiles + token * SIDE, first, 2 * SIDE);
                memcpy(tiles + token * SIDE + SIDE / 2, second, 2 * SIDE);
            }
    }
    return parts;
}

// A piece of the channels: those of whole heads, or some of one head. Lanes hold the terms of its
// channels, then the weights of its heads.
struct Piece {
    int64_t head, heads, channel, channels;
    Integers of;            // the head of a lane, from that of the unit on
    Integers within;        // from the first of the piece on
    Integers denominator;   // the lane of the weights of the same head
    __mmask16 mask;         // of channels

    Piece(const Tiles& plan, int64_t head, int64_t heads, int64_t channel, int64_t channels,
          int64_t first)
        : head(head), heads(heads), channel(channel), channels(channels),
          mask((1u << channels) - 1) {
        for (int64_t lane = 0; lane < SIDE; ++lane) {
            int64_t own = lane < channels ? (channel + lane) / plan.group - head : lane - channels;
            own = own < heads ? own : heads - 1;
            within[lane] = own;
            of[lane] = head - first + own;
            denominator[lane] = channels + own;
        }
    }
};

// Writes the terms and weights of a piece in pairs of sources and returns their sum.
WITH_TILES INLINE Vector make_pairs(uint32_t* pairs, const Map& weights, const Tiles& plan,
                                    const Piece& piece, const ConvShape& shape, int64_t sample) {
    const ConvArgs& args = shape.args;
    int64_t line = plan.pitch * SIDE, margin = plan.step == 1 ? shape.pad_x : 0;
    memset(pairs, 0, (plan.step - 1) * line * 4);
    memset(pairs + (args.rows + plan.step - 1) * line, 0, (plan.step - 1) * line * 4);
    pairs += (plan.step - 1) * line;
    // Interleaves two vectors: the first of a pair is in the lower half.
    __m512i order;
    for (int lane = 0; lane < SIDE; ++lane) {
        reinterpret_cast<uint16_t*>(&order)[2 * lane] = lane;
        reinterpret_cast<uint16_t*>(&order)[2 * lane + 1] = SIDE + lane;
    }
    __mmask16 ones = ((1u << piece.heads) - 1) << piece.channels;
    KahanSum total;
    for (int64_t row = 0; row < args.rows; ++row) {
        Vector sums[2] = {};
        for (int64_t pair = 0; pair < plan.pitch; ++pair, pairs += SIDE) {
            Vector terms[2] = {};
            for (int i = 0; i < 2; ++i) {
                int64_t column = 2 * pair + i - margin, token = row * args.columns + column;
                if (column < 0 || column >= args.columns || shape.hidden(sample, token)) continue;
                Vector value =
                    load_part(args.value.at<bfloat16>(sample, token, piece.channel), piece.mask);
                value = (Vector)_mm512_mask_mov_ps((__m512)value, ones, (__m512)all(1.0f));
                terms[i] = value * pick(load(weights.at(row, shape.pad_x + column)), piece.of);
            }
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)terms[1], (__m512)terms[0]);
            both = _mm512_permutexvar_epi16(order, both);
            _mm512_storeu_si512(pairs, both);
            sums[0] += (Vector)_mm512_slli_epi32(both, 16);
            sums[1] += (Vector)_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000));
        }
        total.add(sums[0] + sums[1]);
    }
    return total.sum;
}

// Adds the products of a kernel to the sums of AT_ONCE rows from `row` on, [AT_ONCE, token, lane].
WITH_TILES void multiply(float* sums, const uint32_t* kernel, int parts, const uint32_t* pairs,
                         const Tiles& plan, const ConvShape& shape, int64_t row) {
    int64_t line = plan.pitch * SIDE, rows = shape.args.rows;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t slot = 0; slot < plan.slots; ++slot) {
        int64_t source = row + slot * plan.step - shape.pad_y;
        const uint32_t* from = pairs + (source + plan.step - 1) * line;
        bool inside[AT_ONCE];
        for (int i = 0; i < AT_ONCE; ++i)
            inside[i] = row + i < rows && source + i > -plan.step && source + i < rows;
        for (int part = 0; part < parts; ++part, kernel += TILE) {
            _tile_loadd(4, kernel, 64);
            if (inside[0]) { _tile_loadd(5, from, 64); _tile_dpbf16ps(0, 4, 5); }
            if (inside[1]) { _tile_loadd(6, from + line, 64); _tile_dpbf16ps(1, 4, 6); }
            if (inside[2]) { _tile_loadd(5, from + 2 * line, 64); _tile_dpbf16ps(2, 4, 5); }
            if (inside[3]) { _tile_loadd(6, from + 3 * line, 64); _tile_dpbf16ps(3, 4, 6); }
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE, 64);
    _tile_stored(2, sums + 2 * TILE, 64);
    _tile_stored(3, sums + 3 * TILE, 64);
}

WITH_TILES INLINE void write_part(const ConvArgs& args, int64_t sample, int64_t token,
                                  const Piece& piece, Vector sums) {
    Vector query = Vector{};
    if (args.gate != NONE)
        query = load_part(args.query.at<bfloat16>(sample, token, piece.channel), piece.mask);
    Vector denominator = larger(pick(sums, piece.denominator), all(TINY));
    Vector mean = gated_mean<bfloat16>(query, sums, denominator, args.gate);
    _mm256_mask_storeu_epi16(args.output.at<bfloat16>(sample, token, piece.channel), piece.mask,
                             (__m256i)narrowed(mean));
}

// Writes the tokens of a block: AT_ONCE rows and the columns of a tile.
WITH_TILES INLINE void write_block(const float* sums, Vector total, const Tiles& plan,
                                   const Piece& piece, const ConvShape& shape, int64_t sample,
                                   int64_t block) {
    const ConvArgs& args = shape.args;
    int64_t row = block / plan.across * AT_ONCE, column = block % plan.across * SIDE;
    int64_t rows = args.rows - row < AT_ONCE ? args.rows - row : AT_ONCE;
    int64_t columns = args.columns - column < SIDE ? args.columns - column : SIDE;
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
            const float* at = sums + i * TILE + j * SIDE;
            Vector sum = load(at);
            for (int64_t own = 1; own < piece.heads; ++own)
                sum = piece.within == static_cast<int>(own) ? load(at + own * AT_ONCE * TILE) : sum;
            write_part(args, sample, (row + i) * args.columns + column + j, piece, sum + total);
        }
}

// The pieces of the heads from `head` on, as many as a vector holds. Returns false, before the end,
// if a number that is not finite would reach tokens that it must not reach: a tile multiplies it by
// the zeros outside of the kernel too.
WITH_TILES bool mix_tiles(const Tiles& plan, const ConvShape& shape, int64_t sample, int64_t head,
                          int64_t heads, float* memory) {
    const ConvArgs& args = shape.args;
    int64_t end = head + heads < args.heads ? head + heads : args.heads;
    TileSetup setup;
    float* sums = memory;
    uint32_t* kernels = reinterpret_cast<uint32_t*>(sums + plan.heads * 2 * AT_ONCE * TILE);
    uint32_t* pairs = kernels + plan.heads * 2 * plan.slots * TILE;
    const Map weights =
        shape.map(reinterpret_cast<float*>(pairs + plan.lines(args) * plan.pitch * SIDE));
    int active = static_cast<int>(end - head);
    make_weights(weights, shape, sample, [&](int64_t token) {
        __builtin_prefetch(args.key.at<bfloat16>(sample, token + AHEAD, head));
        return load(args.key.at<bfloat16>(sample, token, head), active);
    });
    for (int64_t channel = head * plan.group; channel < end * plan.group;) {
        int64_t first = channel / plan.group, last = (first + 1) * plan.group;
        if (plan.heads > 1) last = (first + plan.heads < end ? first + plan.heads : end) * plan.group;
        int64_t count = last - channel < plan.channels ? last - channel : plan.channels;
        Piece piece(plan, first, plan.heads > 1 ? count / plan.group : 1, channel, count, head);
        channel += count;
        int parts[SIDE];
        for (int64_t i = 0; i < piece.heads; ++i)
            parts[i] = make_kernel(kernels + i * 2 * plan.slots * TILE, plan, args, first + i);
        Vector total = make_pairs(pairs, weights, plan, piece, shape, sample);
        if (args.form == INSIDE) {
            if (!are_finite(total)) return false;
            total = Vector{};
        }
        // The products of a block are under way while the block before is written.
        int64_t blocks = (args.rows + AT_ONCE - 1) / AT_ONCE * plan.across;
        for (int64_t block = 0; block <= blocks; ++block) {
            for (int64_t i = 0; i < piece.heads && block < blocks; ++i)
                multiply(sums + (block % 2 * plan.heads + i) * AT_ONCE * TILE,
                         kernels + i * 2 * plan.slots * TILE, parts[i],
                         pairs + block % plan.across * TILE / 2, plan, shape,
                         block / plan.across * AT_ONCE);
            if (block > 0)
                write_block(sums + (block - 1) % 2 * plan.heads * AT_ONCE * TILE, total, plan, piece,
                            shape, sample, block - 1);
        }
    }
    return true;
}

#else

inline bool mix_tiles(const Tiles&, const ConvShape&, int64_t, int64_t, int64_t, float*) {
    return false;
}

#endif

}  // namespace
