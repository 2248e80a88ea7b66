// The forward pass of AFT-conv in units of work, for OpenMP (conv_forward.cpp) and for the threads of
// ONNX Runtime (onnx_operator.cpp).

#pragma once

#include "conv_pairs.h"

namespace {

template <typename Number, bool PAIRS>
INLINE void write(const ConvArgs& args, int64_t sample, int64_t token, int64_t channel, int active,
                  Vector numerator, Vector denominator) {
    Vector query = Vector{};
    if (args.gate != NONE) query = load(args.query.at<Number>(sample, token, channel), active);
    denominator = larger(denominator, all(TINY));
    Vector mean = gated_mean<Number>(query, numerator, denominator, args.gate);
    Number* to = args.output.at<Number>(sample, token, channel);
    if constexpr (PAIRS) {
        Halves halves = narrowed(mean);
        if (active == LANES) memcpy(to, &halves, sizeof halves);
        else memcpy(to, &halves, active * sizeof *to);
    } else store(to, mean, active);
}

int64_t elements_by_channels(const ConvShape& shape) {
    int64_t maps = 2 * (shape.size + elements_of_pairs(shape));
    return maps + (shape.entries + 2 * shape.args.columns) * LANES;
}

// A block of channels that ends at `end`: numerator and denominator per channel. Returns false if the
// zeros next to pairs would spread a number that is not finite.
template <typename Number, bool PAIRS>
bool mix_channels(const ConvShape& shape, int64_t sample, int64_t channel, int64_t end,
                  float* kernel) {
    const ConvArgs& args = shape.args;
    int active = active_lanes(channel, end);
    float* sum_rows = kernel + shape.entries * LANES;
    float* sums[2] = {sum_rows, sum_rows + args.columns * LANES};
    float* first = sums[1] + (args.columns + shape.width) * LANES;
    float* second = first + shape.size + elements_of_pairs(shape);
    const Map maps[2] = {shape.map(first), shape.map(second)};
    Heads heads(channel, args.channels, args.heads);
    load_kernel(kernel, shape, heads, false);
    KahanSum totals[2];
    make_maps<Number>(maps, totals, shape, heads, sample, channel, active);
    if constexpr (PAIRS) {
        pair_kernel(kernel, args);
        for (int i = 0; i < 2; ++i) totals[i] = {pair_rows(maps[i], maps[i], shape)};
        if (args.form == INSIDE && !are_finite(totals[0].sum)) return false;
    }
    if (args.causal) totals[0] = totals[1] = KahanSum{};
    for (int64_t row = 0, token = 0; row < args.rows; ++row) {
        for (int i = 0; i < 2 && PAIRS; ++i) start_row(sums[i], maps[i], totals[i].sum, row, shape);
        correlate_row<2, PAIRS>(sums, maps, totals, kernel, row, shape, false);
        for (int64_t column = 0; column < args.columns; ++column, ++token)
            write<Number, PAIRS>(args, sample, token, channel, active, load(sums[0] + column * LANES),
                          load(sums[1] + column * LANES));
    }
    return true;
}

int64_t elements_by_heads(const ConvShape& shape) {
    const ConvArgs& args = shape.args;
    int64_t maps = 2 * shape.size + elements_of_pairs(shape);
    return maps + (2 * shape.entries + args.columns + args.tokens) * LANES;
}

// A block of heads: one denominator per head, and the numerators of all their channels. Returns what
// mix_channels does.
template <typename Number, bool PAIRS>
bool mix_heads(const ConvShape& shape, int64_t sample, int64_t head, float* head_kernel) {
    const ConvArgs& args = shape.args;
    int64_t group = args.channels / args.heads;
    int active = active_lanes(head, args.heads);
    float* kernel = head_kernel + shape.entries * LANES;
    float* sums[1] = {kernel + shape.entries * LANES};
    float* denominators = sums[0] + args.columns * LANES;
    float* first = denominators + (args.tokens + shape.width) * LANES;
    float* second = first + shape.size + elements_of_pairs(shape);
    const Map terms[1] = {shape.map(first)}, weights[1] = {shape.map(second - shape.width * LANES)};
    load_kernel(head_kernel, shape, Heads(head, args.heads, args.heads), false);
    KahanSum totals[1] = {make_weights(weights[0], shape, sample, [&](int64_t token) {
        __builtin_prefetch(args.key.at<Number>(sample, token + AHEAD, head));
        return load(args.key.at<Number>(sample, token, head), active);
    })};
    if constexpr (PAIRS) {
        pair_kernel(head_kernel, args);
        totals[0] = {pair_rows(terms[0], weights[0], shape)};
    }
    if (args.causal) totals[0] = KahanSum{};
    for (int64_t row = 0; row < args.rows; ++row) {
        float* to[1] = {denominators + row * args.columns * LANES};
        if (PAIRS) start_row(to[0], terms[0], totals[0].sum, row, shape);
        correlate_row<1, PAIRS>(to, PAIRS ? terms : weights, totals, head_kernel, row, shape, false);
    }
    int64_t entries = PAIRS ? (args.kernel_rows + 1) / 2 * args.kernel_columns : shape.entries;
    int64_t end = (head + active) * group;
    for (int64_t channel = head * group; channel < end; channel += LANES) {
        int here = active_lanes(channel, end);
        Integers of;
        for (int lane = 0; lane < LANES; ++lane)
            of[lane] = (channel + (lane < here ? lane : here - 1)) / group - head;
        for (int64_t entry = 0; entry < entries; ++entry)
            store(kernel + entry * LANES, pick(load(head_kernel + entry * LANES), of));
        totals[0] = make_terms<Number>(
            terms[0], shape, sample, channel, here, [&](int64_t row, int64_t column) {
                return pick(load(weights[0].at(row, shape.pad_x + column)), of);
            });
        if constexpr (PAIRS) {
            totals[0] = {pair_rows(terms[0], terms[0], shape)};
            if (args.form == INSIDE && !are_finite(totals[0].sum)) return false;
        }
        if (args.causal) totals[0] = KahanSum{};
        for (int64_t row = 0, token = 0; row < args.rows; ++row) {
            if (PAIRS) start_row(sums[0], terms[0], totals[0].sum, row, shape);
            correlate_row<1, PAIRS>(sums, terms, totals, kernel, row, shape, false);
            for (int64_t column = 0; column < args.columns; ++column, ++token)
                write<Number, PAIRS>(args, sample, token, channel, here, load(sums[0] + column * LANES),
                              pick(load(denominators + token * LANES), of));
        }
    }
    return true;
}

// The work of a call: a block of channels or of heads per sample and unit, in any order.
struct ForwardUnits {
    ConvShape shape;
    Tiles tiles;
    enum { CHANNELS, HEADS, TILES } by;
    int64_t blocks, heads, elements;  // heads: of a unit; elements: of its memory
    bool pairs;  // whether pairs of bfloat16 are multiplied

    ForwardUnits(const ConvArgs& args, bool bfloat) : shape(args), tiles(args), heads(LANES) {
        int64_t head_blocks = (args.heads + LANES - 1) / LANES;
        // Smaller blocks are more units for the threads; the results are the same.
        bool idle = args.batch * head_blocks < args.threads;
        by = idle || args.heads == args.channels ? CHANNELS : HEADS;
        if (bfloat && tiles.are_faster(args)) by = TILES, heads = tiles.heads_of_unit(idle);
        blocks = by == CHANNELS ? shape.blocks() : (args.heads + heads - 1) / heads;
        elements = by == HEADS      ? elements_by_heads(shape)
                   : by == CHANNELS ? elements_by_channels(shape)
                                    : tiles.elements(shape);
        if (by == TILES && args.form == INSIDE && elements < elements_by_channels(shape))
            elements = elements_by_channels(shape);
        pairs = bfloat && by != TILES && pairs_are_faster(args);
    }

    int64_t count() const { return blocks * shape.args.batch; }

    template <typename Number>
    void run(int64_t unit, float* memory) const {
        const ConvArgs& args = shape.args;
        int64_t sample = unit / blocks, block = unit % blocks;
        if (by == HEADS) return mix<Number>(sample, block * LANES, 0, memory);
        int64_t channel = block * LANES, end = channel + LANES;
        if (by == TILES) {
            if (mix_tiles(tiles, shape, sample, block * heads, heads, memory)) return;
            channel = block * heads * tiles.group, end = channel + heads * tiles.group;
        }
        if (end > args.channels) end = args.channels;
        for (; channel < end; channel += LANES) mix<Number>(sample, channel, end, memory);
    }

private:
    template <typename Number>
    void mix(int64_t sample, int64_t first, int64_t end, float* memory) const {
        if constexpr (sizeof(Number) == sizeof(bfloat16) && LANES == 16)
            if (pairs && mix_block<Number, true>(sample, first, end, memory)) return;
        mix_block<Number, false>(sample, first, end, memory);
    }

    template <typename Number, bool PAIRS>
    bool mix_block(int64_t sample, int64_t first, int64_t end, float* memory) const {
        return by == HEADS ? mix_heads<Number, PAIRS>(shape, sample, first, memory)
                           : mix_channels<Number, PAIRS>(shape, sample, first, end, memory);
    }
};

}  // namespace
