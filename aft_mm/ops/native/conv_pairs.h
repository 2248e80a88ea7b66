// The forward pass of AFT-conv in bfloat16 by products of pairs (AVX512_BF16), on processors without
// tiles (conv_tiles.h).
//
// An element of a map of pairs holds a row and the row below, and the kernel is cut in pairs of rows as
// well, so that an instruction multiplies and adds two entries. Terms, weights and e^w are rounded to
// bfloat16; sums are float32. The sum outside of the kernel is that of all tokens less that of the
// tokens inside, both of rounded terms: no rounded numbers cancel.

#pragma once

#include "conv_tiles.h"

namespace {

// Returns whether pairs are faster, as on AMD's processors; Intel's multiply them at the speed of
// float32 and have tiles instead.
inline bool pairs_are_faster(const ConvArgs& args) {
#if defined(WITH_BFLOAT16)
    static const bool are_fast = __builtin_cpu_supports("avx512bf16") && !has_tiles();
#else
    constexpr bool are_fast = false;
#endif
    return are_fast && !args.causal && args.form != ADDITIVE && args.kernel_rows > 1;
}

// Joins two vectors of rounded numbers; the first of a pair is in the lower half.
INLINE Vector pair(Vector low, Vector high) { return (Vector)((Words)low >> 16 | (Words)high); }

// The sum of a column over the rows before this one, written behind the rows of pairs.
INLINE float* column_above(const Map& pairs, int64_t row, int64_t column) {
    return pairs.at(pairs.rows + row, column);
}

// What pairs add to the memory of a map: the row above the first and the sums of columns.
inline int64_t elements_of_pairs(const ConvShape& shape) {
    return (shape.args.rows + 2) * shape.width * LANES;
}

// Writes the rounded rows of a map as pairs with the row below, from one row above the first on, and
// the sums of columns; returns the sum of all. Both may be the same map, after memory for that row.
inline Vector pair_rows(const Map& pairs, const Map& map, const ConvShape& shape) {
    memset(pairs.at(-1, 0), 0, map.width * LANES * 4);
    int64_t first = shape.pad_x, end = shape.pad_x + shape.args.columns;
    for (int64_t column = first; column < end; ++column) {
        Vector high = rounded(load(map.at(0, column)));
        store(pairs.at(-1, column), pair(Vector{}, high));
        store(column_above(pairs, 0, column), Vector{});
        store(column_above(pairs, 1, column), high);
    }
    for (int64_t row = 0; row < map.rows; ++row)
        for (int64_t column = first; column < end; ++column) {
            Vector low = (Vector)((Words)load(pairs.at(row - 1, column)) & 0xffff0000), high = {};
            if (row + 1 < map.rows) {
                high = rounded(load(map.at(row + 1, column)));
                store(column_above(pairs, row + 2, column),
                      load(column_above(pairs, row + 1, column)) + high);
            }
            store(pairs.at(row, column), pair(low, high));
        }
    Vector total = Vector{};
    for (int64_t column = first; column < end; ++column)
        total += load(column_above(pairs, map.rows, column));
    return total;
}

// Joins each second row of a kernel e^w or e^w - 1 with the row below, as e^w, in place.
inline void pair_kernel(float* kernel, const ConvArgs& args) {
    Vector one = all(args.form == DIFFERENCE);
    for (int64_t row = 0; row < args.kernel_rows; row += 2)
        for (int64_t column = 0; column < args.kernel_columns; ++column) {
            const float* low = kernel + (row * args.kernel_columns + column) * LANES;
            Vector high = Vector{};
            if (row + 1 < args.kernel_rows) high = load(low + args.kernel_columns * LANES) + one;
            store(kernel + (row / 2 * args.kernel_columns + column) * LANES,
                  pair(rounded(load(low) + one), rounded(high)));
        }
}

// Writes the sums that a row begins with: those outside of the kernel, for a map of this total, or 0.
inline void start_row(float* to, const Map& pairs, Vector total, int64_t row,
                      const ConvShape& shape) {
    if (shape.args.form == INSIDE) {
        memset(to, 0, shape.args.columns * LANES * 4);
        return;
    }
    int64_t first = row - shape.pad_y, end = row + shape.pad_y + 1;
    first = first < 0 ? 0 : first, end = end < pairs.rows ? end : pairs.rows;
    auto column_sum = [&](int64_t column) {
        return load(column_above(pairs, end, column)) - load(column_above(pairs, first, column));
    };
    int64_t columns = shape.args.columns, pad_x = shape.pad_x;
    Vector inside = Vector{};
    for (int64_t column = 0; column < pad_x && column < columns; ++column)
        inside += column_sum(pad_x + column);
    for (int64_t column = 0; column < columns; ++column) {
        if (column + pad_x < columns) inside += column_sum(2 * pad_x + column);
        store(to + column * LANES, total - inside);
        if (column >= pad_x) inside -= column_sum(column);
    }
}

}  // namespace
