// What AFT-conv and its gradient share: maps of vectors of channels, and their convolutions.
//
// y = g(q) s(e^k v) / s(e^k), where with W = 1 outside the kernel s(x) is conv(x, e^w - 1) + sum x,
// the difference form, or conv(x, e^w) plus the sum outside the kernel, the additive form, which is
// slower and does not cancel where w is low; with W = 0 it is conv(x, e^w). Causal sums are running
// sums, and causal kernels end in the middle. A thread takes the channels of one vector through a
// whole sample: keys, terms and sums stay in its cache, and every tensor is read from memory once.

#pragma once

#include "tensors.h"

constexpr int ENTRIES = 4;  // entries of a kernel row that are multiplied at once
constexpr int AHEAD = 12;   // tokens between the prefetch of a key and its use

enum Form { INSIDE, DIFFERENCE, ADDITIVE };

struct ConvArgs {
    int64_t batch, tokens, channels, heads;
    int64_t rows, columns, kernel_rows, kernel_columns;
    int64_t form, causal, gate, threads;
    int64_t samples;  // samples whose kernel gradients are summed together
    Tensor query, key, value, mask, output;  // mask: bytes without channels
    // Of the backward pass, where `output` is the gradient of the output. The gradient of the key
    // is float32 with one number per channel; that of the query may be missing.
    Tensor grad_query, grad_key, grad_value;
    const float* kernel;  // e^w - 1 in the difference form, else e^w, [entries, heads]
    float* grad_kernel;   // its gradient, [batch / samples, entries, channels], or missing
};

// A map [rows, columns] of vectors with zero columns on both sides, as many as the kernel reaches.
// The additive form has the sums over the rows above and below each row, and those of its columns.
struct Map {
    float* elements;
    int64_t width, rows;

    float* at(int64_t row, int64_t column) const {
        return elements + (row * width + column) * LANES;
    }

    float* above(int64_t row) const { return at(rows, row); }                 // the rows before it
    float* below(int64_t row) const { return at(rows, rows + 1 + row); }      // it and those after
    float* column_sum(int64_t column) const { return at(rows, 2 * rows + 2 + column); }
};

struct ConvShape {
    const ConvArgs& args;
    int64_t width, pad_x, pad_y, size, entries;  // size: of a map

    explicit ConvShape(const ConvArgs& args)
        : args(args),
          width(args.columns + args.kernel_columns - 1),
          pad_x(args.kernel_columns / 2),
          pad_y(args.kernel_rows / 2),
          size((args.rows * width +
                (args.form == ADDITIVE ? 2 * (args.rows + 1 + args.columns) : 0)) *
               LANES),
          entries(args.kernel_rows * args.kernel_columns) {}

    Map map(float* elements) const {
        for (int64_t row = 0; row < args.rows; ++row) {
            float* line = elements + row * width * LANES;
            memset(line, 0, pad_x * LANES * 4);
            memset(line + (pad_x + args.columns) * LANES, 0, pad_x * LANES * 4);
        }
        return {elements, width, args.rows};
    }

    int64_t blocks() const { return (args.channels + LANES - 1) / LANES; }

    bool hidden(int64_t sample, int64_t token) const {
        return args.mask.data != nullptr && !*args.mask.at<uint8_t>(sample, token, 0);
    }

    // The entries in use: all; if causal those up to the middle, or from there on if flipped.
    int64_t first_line(bool flipped) const { return args.causal && flipped ? pad_y : 0; }

    int64_t end_line(bool flipped) const {
        return args.causal && !flipped ? pad_y + 1 : args.kernel_rows;
    }

    int64_t first_entry(int64_t line, bool flipped) const {
        return args.causal && flipped && line == pad_y ? pad_x : 0;
    }

    int64_t end_entry(int64_t line, bool flipped) const {
        return args.causal && !flipped && line == pad_y ? pad_x + 1 : args.kernel_columns;
    }
};

// The lanes in use of the vector that begins at `first`.
INLINE int active_lanes(int64_t first, int64_t end) {
    return end - first < LANES ? end - first : LANES;
}

// Loads the kernel of a block of channels as [entries] vectors; `flipped` for the gradient.
inline void load_kernel(float* kernel, const ConvShape& shape, const Heads& heads, bool flipped) {
    for (int64_t entry = 0; entry < shape.entries; ++entry) {
        int64_t from = flipped ? shape.entries - 1 - entry : entry;
        store(kernel + entry * LANES, heads.spread(shape.args.kernel + from * shape.args.heads));
    }
}

// sum += entry * x, for pairs of bfloat16 (conv_pairs.h) both products.
template <bool PAIRS>
INLINE void accumulate(Vector& sum, Vector entry, Vector x) {
#if defined(WITH_BFLOAT16)
    if constexpr (PAIRS) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(entry), "v"(x));
        return;
    }
#endif
    sum += entry * x;
}

// sums += kernel * maps, for X adjacent columns and G entries of a kernel row.
template <int S, int X, int G, bool PAIRS>
INLINE void multiply(Vector (&sums)[S][X], const float* const (&from)[S], const float* kernel) {
    Vector entries[G];
    UNROLL for (int entry = 0; entry < G; ++entry) entries[entry] = load(kernel + entry * LANES);
    UNROLL for (int column = 0; column < X + G - 1; ++column)
        UNROLL for (int map = 0; map < S; ++map) {
            Vector x = load(from[map] + column * LANES);
            UNROLL for (int entry = 0; entry < G; ++entry) {
                int sum = column - entry;
                if (sum >= 0 && sum < X) accumulate<PAIRS>(sums[map][sum], entries[entry], x);
            }
        }
}

template <int S, int X, bool PAIRS>
INLINE void correlate(Vector (&sums)[S][X], const Map (&maps)[S], const float* kernel, int64_t row,
                      int64_t column, const ConvShape& shape, bool flipped) {
    constexpr int STEP = PAIRS ? 2 : 1;
    for (int64_t line = shape.first_line(flipped); line < shape.end_line(flipped); line += STEP) {
        int64_t source_row = row + line - shape.pad_y;
        if (source_row <= -STEP || source_row >= shape.args.rows) continue;
        int64_t first = shape.first_entry(line, flipped);
        const float* entries = kernel + (line / STEP * shape.args.kernel_columns + first) * LANES;
        const float* from[S];
        for (int map = 0; map < S; ++map) from[map] = maps[map].at(source_row, column + first);
        int64_t left = shape.end_entry(line, flipped) - first;
        for (; left >= ENTRIES; left -= ENTRIES, entries += ENTRIES * LANES) {
            multiply<S, X, ENTRIES, PAIRS>(sums, from, entries);
            for (int map = 0; map < S; ++map) from[map] += ENTRIES * LANES;
        }
        if (left == 3) multiply<S, X, 3, PAIRS>(sums, from, entries);
        else if (left == 2) multiply<S, X, 2, PAIRS>(sums, from, entries);
        else if (left == 1) multiply<S, X, 1, PAIRS>(sums, from, entries);
    }
}

// Computes correlate_row for `count` of X columns. In the additive form, and with pairs, `to` has the
// other sums.
template <int S, int X, bool PAIRS>
void correlate_columns(int64_t count, float* const (&to)[S], const Map (&maps)[S],
                       const Vector (&totals)[S], const float* kernel, int64_t row, int64_t column,
                       const ConvShape& shape, bool flipped) {
    if constexpr (X > 1)
        if (count < X)
            return correlate_columns<S, X - 1, PAIRS>(count, to, maps, totals, kernel, row, column,
                                                      shape, flipped);
    Vector sums[S][X];
    UNROLL for (int map = 0; map < S; ++map)
        UNROLL for (int i = 0; i < X; ++i)
            sums[map][i] = PAIRS || shape.args.form == ADDITIVE
                               ? load(to[map] + (column + i) * LANES)
                               : totals[map];
    correlate<S, X, PAIRS>(sums, maps, kernel, row, column, shape, flipped);
    UNROLL for (int map = 0; map < S; ++map)
        UNROLL for (int i = 0; i < X; ++i) store(to[map] + (column + i) * LANES, sums[map][i]);
}

// Adds the running sums of S maps to the sums of a row: over the tokens up to each, or if `flipped`
// from each on. `totals` are the sums over the previous rows.
template <int S>
void add_running(float* const (&to)[S], const Map (&maps)[S], KahanSum (&totals)[S], int64_t row,
                 const ConvShape& shape, bool flipped) {
    for (int64_t i = 0; i < shape.args.columns; ++i) {
        int64_t column = flipped ? shape.args.columns - 1 - i : i;
        for (int map = 0; map < S; ++map) {
            float* at = to[map] + column * LANES;
            totals[map].add(load(maps[map].at(row, shape.pad_x + column)));
            store(at, load(at) + totals[map].sum);
        }
    }
}

// Writes the sums over the rows above and below each row, for the additive form.
inline void sum_rows(const Map& map, const ConvShape& shape) {
    if (shape.args.form != ADDITIVE) return;
    KahanSum above, below;
    store(map.above(0), above.sum);
    store(map.below(map.rows), below.sum);
    for (int64_t row = 0; row < map.rows; ++row) {
        int64_t last = map.rows - 1 - row;
        for (int64_t column = shape.pad_x; column < shape.pad_x + shape.args.columns; ++column) {
            above.add(load(map.at(row, column)));
            below.add(load(map.at(last, column)));
        }
        store(map.above(row + 1), above.sum);
        store(map.below(last), below.sum);
    }
}

// Writes the sums over the tokens that no entry of the kernel reaches from the tokens of a row.
inline void sum_outside(float* to, const Map& map, int64_t row, const ConvShape& shape,
                        bool flipped) {
    const ConvArgs& args = shape.args;
    int64_t columns = args.columns, pad_x = shape.pad_x;
    int64_t first = row + shape.first_line(flipped) - shape.pad_y;
    int64_t end = row + shape.end_line(flipped) - shape.pad_y;
    first = first < 0 ? 0 : first, end = end < args.rows ? end : args.rows;
    Vector start = Vector{};
    if (!args.causal || !flipped) start += load(map.above(first));
    if (!args.causal || flipped) start += load(map.below(end));
    // Columns on the left of the kernel and on the right of it; if causal, the row itself counts
    // on one side only.
    float *left = map.column_sum(0), *right = map.column_sum(columns);
    for (int64_t column = 0; column < columns; ++column) {
        Vector sum = Vector{}, own = Vector{};
        for (int64_t source = first; source < end; ++source) {
            Vector x = load(map.at(source, pad_x + column));
            if (args.causal && source == row) own = x;
            else sum += x;
        }
        store(left + column * LANES, flipped ? sum : sum + own);
        store(right + column * LANES, flipped ? sum + own : sum);
    }
    KahanSum before, after;
    before.add(start);
    for (int64_t column = 0; column < columns; ++column) {
        if (column > pad_x) before.add(load(left + (column - pad_x - 1) * LANES));
        store(to + column * LANES, before.sum);
    }
    for (int64_t column = columns - 1; column >= 0; --column) {
        if (column + pad_x + 1 < columns)
            after.add(load(right + (column + pad_x + 1) * LANES));
        store(to + column * LANES, load(to + column * LANES) + after.sum);
    }
}

// Computes the sums of S maps for the tokens of a row: the convolution plus the global term.
// `totals` begin as the sums over all tokens; if causal as 0, and rows then come in order, from the
// last to the first if `flipped`.
template <int S, bool PAIRS = false>
void correlate_row(float* const (&to)[S], const Map (&maps)[S], KahanSum (&totals)[S],
                   const float* kernel, int64_t row, const ConvShape& shape, bool flipped) {
    bool difference = shape.args.form == DIFFERENCE, global_sum = difference && !shape.args.causal;
    Vector starts[S] = {};
    for (int map = 0; map < S && shape.args.form == ADDITIVE; ++map)
        sum_outside(to[map], maps[map], row, shape, flipped);
    for (int map = 0; map < S && global_sum; ++map) starts[map] = totals[map].sum;
    constexpr int MOST = SUMS / S;
    int64_t columns = shape.args.columns, pieces = (columns + MOST - 1) / MOST;
    for (int64_t piece = 0; piece < pieces; ++piece) {
        int64_t from = piece * columns / pieces, end = (piece + 1) * columns / pieces;
        correlate_columns<S, MOST, PAIRS>(end - from, to, maps, starts, kernel, row, from, shape,
                                          flipped);
    }
    if (difference && shape.args.causal)
        add_running<S>(to, maps, totals, row, shape, flipped);
}

// Writes e^(k - max) of all tokens into the map, with k = load_key(token), and returns their sum.
template <typename LoadKey>
INLINE KahanSum make_weights(const Map& weights, const ConvShape& shape, int64_t sample,
                             const LoadKey& load_key) {
    const ConvArgs& args = shape.args;
    Vector shift = all(LOWEST);
    KahanSum total;
    for (int64_t row = 0, token = 0; row < args.rows; ++row)
        for (int64_t column = 0; column < args.columns; ++column, ++token) {
            Vector key = shape.hidden(sample, token) ? all(-__builtin_inff()) : load_key(token);
            shift = larger(key, shift);
            store(weights.at(row, shape.pad_x + column), key);
        }
    for (int64_t row = 0; row < args.rows; ++row)
        for (int64_t column = 0; column < args.columns; ++column) {
            float* at = weights.at(row, shape.pad_x + column);
            Vector weight = exponential(load(at) - shift);
            store(at, weight);
            total.add(weight);
        }
    sum_rows(weights, shape);
    return total;
}

// Writes the terms e^k v of a block of channels into the map, with e^k = get_weight(row, column).
template <typename Number, typename GetWeight>
INLINE KahanSum make_terms(const Map& terms, const ConvShape& shape, int64_t sample,
                           int64_t channel, int active, const GetWeight& get_weight) {
    const ConvArgs& args = shape.args;
    KahanSum total;
    for (int64_t row = 0, token = 0; row < args.rows; ++row)
        for (int64_t column = 0; column < args.columns; ++column, ++token) {
            Vector term = Vector{};
            __builtin_prefetch(args.value.at<Number>(sample, token + AHEAD, channel));
            if (args.gate != NONE)
                __builtin_prefetch(args.query.at<Number>(sample, token, channel));
            __builtin_prefetch(args.output.at<Number>(sample, token, channel), 1);
            if (!shape.hidden(sample, token))
                term = get_weight(row, column) *
                       load(args.value.at<Number>(sample, token, channel), active);
            store(terms.at(row, shape.pad_x + column), term);
            total.add(term);
        }
    sum_rows(terms, shape);
    return total;
}

// Makes both maps of a block of channels, terms and weights, and their sums.
template <typename Number>
INLINE void make_maps(const Map (&maps)[2], KahanSum (&totals)[2], const ConvShape& shape,
                      const Heads& heads, int64_t sample, int64_t channel, int active) {
    const ConvArgs& args = shape.args;
    totals[1] = make_weights(maps[1], shape, sample, [&](int64_t token) {
        __builtin_prefetch(args.key.at<Number>(sample, token + AHEAD, heads.first));
        __builtin_prefetch(args.value.at<Number>(sample, token, channel));
        if (args.gate != NONE) __builtin_prefetch(args.query.at<Number>(sample, token, channel));
        return heads.spread(args.key.at<Number>(sample, token, 0));
    });
    totals[0] = make_terms<Number>(
        maps[0], shape, sample, channel, active,
        [&](int64_t row, int64_t column) { return load(maps[1].at(row, shape.pad_x + column)); });
}
