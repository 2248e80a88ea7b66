// What AFT-conv and its gradient share: maps of vectors of channels, and their convolutions.
//
// Difference form, y = g(q) (conv(e^k v, e^w - 1) + sum e^k v) / (the same of 1), W = 1 outside of
// the kernel, or conv(e^k v, e^w) alone, W = 0. Causal sums are running ones, and end in the middle
// of the kernel. A thread takes the channels of a vector through a whole sample: keys, terms and sums
// stay in its cache, and memory sees every tensor once.

#pragma once

#include "tokens.h"

constexpr int ENTRIES = 4;  // of a kernel's row that are multiplied at once
constexpr int AHEAD = 12;   // tokens whose keys are asked for before they are needed

struct Call {
    int64_t batch, tokens, channels, heads;
    int64_t rows, columns, kernel_rows, kernel_columns;
    int64_t background, causal, gate, threads;  // background: whether W = 1 outside, or 0
    int64_t samples;  // whose weight gradients are summed together
    Tensor query, key, value, mask, output;  // mask: bytes, and no channels
    // Of the backward pass, whose `output` is the gradient of the output. That of the key is
    // float32 and has a number for every channel; that of the query may be missing.
    Tensor query_gradient, key_gradient, value_gradient;
    const float* weight;  // e^w - 1, or e^w, [entries, heads]
    float* weight_gradient;  // of that, [batch / samples, entries, channels], or missing
};

// A map [rows, columns] of vectors with empty columns on both sides, as wide as a kernel looks.
struct Map {
    float* numbers;
    int64_t width;

    float* at(int64_t row, int64_t column) const { return numbers + (row * width + column) * LANES; }
};

struct Plan {
    const Call& call;
    int64_t width, beside, above, size, entries;  // size: of a map

    explicit Plan(const Call& call)
        : call(call),
          width(call.columns + call.kernel_columns - 1),
          beside(call.kernel_columns / 2),
          above(call.kernel_rows / 2),
          size(call.rows * width * LANES),
          entries(call.kernel_rows * call.kernel_columns) {}

    Map map(float* numbers) const {
        for (int64_t row = 0; row < call.rows; ++row) {
            float* line = numbers + row * width * LANES;
            memset(line, 0, beside * LANES * 4);
            memset(line + (beside + call.columns) * LANES, 0, beside * LANES * 4);
        }
        return {numbers, width};
    }

    int64_t blocks() const { return (call.channels + LANES - 1) / LANES; }

    bool hidden(int64_t sample, int64_t token) const {
        return call.mask.data != nullptr && !*call.mask.at<uint8_t>(sample, token, 0);
    }

    // Entries of the kernel that count: all, or those up to the middle, or from there on if turned.
    int64_t first_line(bool turned) const { return call.causal && turned ? above : 0; }

    int64_t end_line(bool turned) const {
        return call.causal && !turned ? above + 1 : call.kernel_rows;
    }

    int64_t first_entry(int64_t line, bool turned) const {
        return call.causal && turned && line == above ? beside : 0;
    }

    int64_t end_entry(int64_t line, bool turned) const {
        return call.causal && !turned && line == above ? beside + 1 : call.kernel_columns;
    }
};

// Lanes in use of the vector that begins at `first`.
INLINE int lanes(int64_t first, int64_t end) { return end - first < LANES ? end - first : LANES; }

// The kernel of a block of channels, [entries] vectors; `turned` for the gradient.
inline void take_kernel(float* kernel, const Plan& plan, const Heads& heads, bool turned) {
    for (int64_t entry = 0; entry < plan.entries; ++entry) {
        int64_t from = turned ? plan.entries - 1 - entry : entry;
        store(kernel + entry * LANES, heads.spread(plan.call.weight + from * plan.call.heads));
    }
}

// sums += kernel * maps, X columns next to each other, G entries of a row of the kernel.
template <int S, int X, int G>
INLINE void multiply(Vector (&sums)[S][X], const float* const (&from)[S], const float* kernel) {
    Vector entries[G];
    UNROLL for (int entry = 0; entry < G; ++entry) entries[entry] = load(kernel + entry * LANES);
    UNROLL for (int column = 0; column < X + G - 1; ++column)
        UNROLL for (int map = 0; map < S; ++map) {
            Vector x = load(from[map] + column * LANES);
            UNROLL for (int entry = 0; entry < G; ++entry) {
                int sum = column - entry;
                if (sum >= 0 && sum < X) sums[map][sum] += entries[entry] * x;
            }
        }
}

template <int S, int X>
INLINE void correlate(Vector (&sums)[S][X], const Map (&maps)[S], const float* kernel, int64_t row,
                      int64_t column, const Plan& plan, bool turned) {
    for (int64_t line = plan.first_line(turned); line < plan.end_line(turned); ++line) {
        int64_t met = row + line - plan.above;
        if (met < 0 || met >= plan.call.rows) continue;
        int64_t first = plan.first_entry(line, turned);
        const float* entries = kernel + (line * plan.call.kernel_columns + first) * LANES;
        const float* from[S];
        for (int map = 0; map < S; ++map) from[map] = maps[map].at(met, column + first);
        int64_t left = plan.end_entry(line, turned) - first;
        for (; left >= ENTRIES; left -= ENTRIES, entries += ENTRIES * LANES) {
            multiply<S, X, ENTRIES>(sums, from, entries);
            for (int map = 0; map < S; ++map) from[map] += ENTRIES * LANES;
        }
        if (left == 3) multiply<S, X, 3>(sums, from, entries);
        else if (left == 2) multiply<S, X, 2>(sums, from, entries);
        else if (left == 1) multiply<S, X, 1>(sums, from, entries);
    }
}

// As correlate_row, at `some` of X columns.
template <int S, int X>
void correlate_columns(int64_t some, float* const (&to)[S], const Map (&maps)[S],
                       const Vector (&totals)[S], const float* kernel, int64_t row, int64_t column,
                       const Plan& plan, bool turned) {
    if constexpr (X > 1)
        if (some < X)
            return correlate_columns<S, X - 1>(some, to, maps, totals, kernel, row, column, plan,
                                               turned);
    Vector sums[S][X];
    UNROLL for (int map = 0; map < S; ++map)
        UNROLL for (int i = 0; i < X; ++i) sums[map][i] = totals[map];
    correlate<S, X>(sums, maps, kernel, row, column, plan, turned);
    UNROLL for (int map = 0; map < S; ++map)
        UNROLL for (int i = 0; i < X; ++i) store(to[map] + (column + i) * LANES, sums[map][i]);
}

// Adds the running sums of S maps to the places of a row: over the tokens up to each, or if `turned`
// from it on; `totals` are those over the rows before, or behind.
template <int S>
void add_running(float* const (&to)[S], const Map (&maps)[S], Total (&totals)[S], int64_t row,
                 const Plan& plan, bool turned) {
    for (int64_t i = 0; i < plan.call.columns; ++i) {
        int64_t column = turned ? plan.call.columns - 1 - i : i;
        for (int map = 0; map < S; ++map) {
            float* at = to[map] + column * LANES;
            totals[map].add(load(maps[map].at(row, plan.beside + column)));
            store(at, load(at) + totals[map].sum);
        }
    }
}

// The sums of S maps at the places of a row: the convolution and what lies outside of the kernel.
// `totals` begin as the sums over all tokens, or, causal, as 0, and rows come in turn then, from the
// last to the first if `turned`.
template <int S>
void correlate_row(float* const (&to)[S], const Map (&maps)[S], Total (&totals)[S],
                   const float* kernel, int64_t row, const Plan& plan, bool turned) {
    bool everything = plan.call.background && !plan.call.causal;
    Vector starts[S] = {};
    for (int map = 0; map < S && everything; ++map) starts[map] = totals[map].sum;
    constexpr int MOST = SUMS / S;
    int64_t columns = plan.call.columns, pieces = (columns + MOST - 1) / MOST;
    for (int64_t piece = 0; piece < pieces; ++piece) {
        int64_t from = piece * columns / pieces, end = (piece + 1) * columns / pieces;
        correlate_columns<S, MOST>(end - from, to, maps, starts, kernel, row, from, plan, turned);
    }
    if (plan.call.background && plan.call.causal)
        add_running<S>(to, maps, totals, row, plan, turned);
}

// Keys of all tokens, by load_key(token), into the map as e^(k - their maximum); the sum of these.
template <typename LoadKey>
INLINE Total make_weights(const Map& weights, const Plan& plan, int64_t sample,
                           const LoadKey& load_key) {
    const Call& call = plan.call;
    Vector shift = all(LOWEST);
    Total total;
    for (int64_t row = 0, token = 0; row < call.rows; ++row)
        for (int64_t column = 0; column < call.columns; ++column, ++token) {
            Vector key = plan.hidden(sample, token) ? all(-__builtin_inff()) : load_key(token);
            shift = larger(key, shift);
            store(weights.at(row, plan.beside + column), key);
        }
    for (int64_t row = 0; row < call.rows; ++row)
        for (int64_t column = 0; column < call.columns; ++column) {
            float* at = weights.at(row, plan.beside + column);
            Vector weight = exponential(load(at) - shift);
            store(at, weight);
            total.add(weight);
        }
    return total;
}

// The terms e^k v of a block of channels, of weights that get_weight(map of them, ...) gives.
template <typename Number, typename GetWeight>
INLINE Total make_terms(const Map& terms, const Plan& plan, int64_t sample, int64_t channel,
                         int used, const GetWeight& get_weight) {
    const Call& call = plan.call;
    Total total;
    for (int64_t row = 0, token = 0; row < call.rows; ++row)
        for (int64_t column = 0; column < call.columns; ++column, ++token) {
            Vector term = Vector{};
            __builtin_prefetch(call.value.at<Number>(sample, token + AHEAD, channel));
            if (call.gate != NONE)
                __builtin_prefetch(call.query.at<Number>(sample, token, channel));
            __builtin_prefetch(call.output.at<Number>(sample, token, channel), 1);
            if (!plan.hidden(sample, token))
                term = get_weight(row, column) *
                       load(call.value.at<Number>(sample, token, channel), used);
            store(terms.at(row, plan.beside + column), term);
            total.add(term);
        }
    return total;
}

// Both for a block of channels: terms, weights and their sums.
template <typename Number>
INLINE void make_maps(const Map (&maps)[2], Total (&totals)[2], const Plan& plan,
                      const Heads& heads, int64_t sample, int64_t channel, int used) {
    const Call& call = plan.call;
    totals[1] = make_weights(maps[1], plan, sample, [&](int64_t token) {
        __builtin_prefetch(call.key.at<Number>(sample, token + AHEAD, heads.first));
        __builtin_prefetch(call.value.at<Number>(sample, token, channel));
        if (call.gate != NONE) __builtin_prefetch(call.query.at<Number>(sample, token, channel));
        return heads.spread(call.key.at<Number>(sample, token, 0));
    });
    totals[0] = make_terms<Number>(maps[0], plan, sample, channel, used,
                                   [&](int64_t row, int64_t column) {
        return load(maps[1].at(row, plan.beside + column));
    });
}
