// The gradient of AFT-conv. The terms are recomputed instead of being saved.

#include "conv.h"

namespace {

// sums[entry] += gradients * both maps, X columns next to each other, G entries.
template <int X, int G>
INLINE void accumulate_columns_grad(Vector (&sums)[G], const float* const (&from)[2],
                                    const float* const (&grads)[2]) {
    UNROLL for (int map = 0; map < 2; ++map) {
        Vector gradients[X];
        UNROLL for (int i = 0; i < X; ++i) gradients[i] = load(grads[map] + i * LANES);
        UNROLL for (int column = 0; column < X + G - 1; ++column) {
            Vector x = load(from[map] + column * LANES);
            UNROLL for (int i = 0; i < X; ++i) {
                int entry = column - i;
                if (entry >= 0 && entry < G) sums[entry] += gradients[i] * x;
            }
        }
    }
}

// The gradients of G entries of a row of the kernel, added to `grad_kernel`.
template <int G>
void accumulate_entries_grad(float* grad_kernel, int64_t line, int64_t entry, const Map (&maps)[2],
                             const Map (&grad_maps)[2], const ConvShape& shape) {
    constexpr int X = 4;
    int64_t down = line - shape.pad_y, rows = shape.args.rows, columns = shape.args.columns;
    Vector sums[G] = {};
    for (int64_t row = down < 0 ? -down : 0; row < rows && row + down < rows; ++row) {
        int64_t column = 0;
        const float *from[2], *grads[2];
        auto place = [&] {
            for (int map = 0; map < 2; ++map) {
                from[map] = maps[map].at(row + down, entry + column);
                grads[map] = grad_maps[map].at(row, shape.pad_x + column);
            }
        };
        for (; column + X <= columns; column += X)
            place(), accumulate_columns_grad<X, G>(sums, from, grads);
        for (; column < columns; ++column)
            place(), accumulate_columns_grad<1, G>(sums, from, grads);
    }
    float* to = grad_kernel + (line * shape.args.kernel_columns + entry) * LANES;
    UNROLL for (int i = 0; i < G; ++i) store(to + i * LANES, load(to + i * LANES) + sums[i]);
}

void accumulate_kernel_grad(float* grad_kernel, const Map (&maps)[2], const Map (&grad_maps)[2],
                            const ConvShape& shape) {
    for (int64_t line = 0; line < shape.end_line(false); ++line) {
        int64_t entry = 0, columns = shape.end_entry(line, false);
        for (; entry + ENTRIES <= columns; entry += ENTRIES)
            accumulate_entries_grad<ENTRIES>(grad_kernel, line, entry, maps, grad_maps, shape);
        int64_t left = columns - entry;
        if (left == 3) accumulate_entries_grad<3>(grad_kernel, line, entry, maps, grad_maps, shape);
        else if (left == 2)
            accumulate_entries_grad<2>(grad_kernel, line, entry, maps, grad_maps, shape);
        else if (left == 1)
            accumulate_entries_grad<1>(grad_kernel, line, entry, maps, grad_maps, shape);
    }
}

// The memory of a thread.
struct Workspace {
    float *kernel, *flipped, *grad_kernel, *sums[2];
    Map maps[2], grad_maps[2];  // terms and weights, and their gradients

    static int64_t elements(const ConvShape& shape) {
        return 4 * shape.size + (3 * shape.entries + 2 * shape.args.columns) * LANES;
    }

    Workspace(float* memory, const ConvShape& shape) {
        kernel = memory;
        flipped = kernel + shape.entries * LANES;
        grad_kernel = flipped + shape.entries * LANES;
        sums[0] = grad_kernel + shape.entries * LANES;
        sums[1] = sums[0] + shape.args.columns * LANES;
        float* places = sums[1] + shape.args.columns * LANES;
        for (int i = 0; i < 2; ++i) {
            maps[i] = shape.map(places + i * shape.size);
            grad_maps[i] = shape.map(places + (2 + i) * shape.size);
        }
    }
};

template <typename Number>
void differentiate(const ConvShape& shape, const Heads& heads, int64_t sample, int64_t channel,
                   int active, const Workspace& workspace) {
    const ConvArgs& args = shape.args;
    KahanSum totals[2], grad_totals[2];
    make_maps<Number>(workspace.maps, totals, shape, heads, sample, channel, active);
    if (args.causal) totals[0] = totals[1] = KahanSum{};
    for (int64_t row = 0, token = 0; row < args.rows; ++row) {
        correlate_row<2>(workspace.sums, workspace.maps, totals, workspace.kernel, row, shape,
                         false);
        for (int64_t column = 0; column < args.columns; ++column, ++token) {
            Vector numerator = load(workspace.sums[0] + column * LANES);
            Vector denominator = load(workspace.sums[1] + column * LANES);
            Vector grad_output = load(args.output.at<Number>(sample, token, channel), active);
            Vector query = Vector{}, slope;
            if (args.gate != NONE)
                query = load(args.query.at<Number>(sample, token, channel), active);
            Vector gate_value = gate_with_slope(query, args.gate, slope);
            Vector reciprocal = denominator < TINY ? Vector{} : 1.0f / denominator;
            Vector mean = numerator * reciprocal;
            if (args.grad_query.data != nullptr)
                store(args.grad_query.at<Number>(sample, token, channel),
                      grad_output * mean * slope, active);
            Vector grad_term = grad_output * gate_value * reciprocal,
                   grad_weight = -grad_term * mean;
            store(workspace.grad_maps[0].at(row, shape.pad_x + column), grad_term);
            store(workspace.grad_maps[1].at(row, shape.pad_x + column), grad_weight);
            grad_totals[0].add(grad_term);
            grad_totals[1].add(grad_weight);
        }
    }
    for (const Map& map : workspace.grad_maps) sum_rows(map, shape);
    if (args.causal) grad_totals[0] = grad_totals[1] = KahanSum{};
    for (int64_t row = args.rows - 1; row >= 0; --row) {
        correlate_row<2>(workspace.sums, workspace.grad_maps, grad_totals, workspace.flipped, row,
                         shape, true);
        for (int64_t column = 0; column < args.columns; ++column) {
            int64_t token = row * args.columns + column;
            Vector grad_term = load(workspace.sums[0] + column * LANES);
            Vector grad_weight = load(workspace.sums[1] + column * LANES);
            Vector term = load(workspace.maps[0].at(row, shape.pad_x + column));
            Vector weight = load(workspace.maps[1].at(row, shape.pad_x + column));
            Vector grad_key = term * grad_term + weight * grad_weight,
                   grad_value = weight * grad_term;
            if (shape.hidden(sample, token)) grad_key = grad_value = Vector{};
            store(args.grad_value.at<Number>(sample, token, channel), grad_value, active);
            store(args.grad_key.at<float>(sample, token, channel), grad_key, active);
        }
    }
}

template <typename Number>
Status backward(const ConvArgs& args) {
    ConvShape shape(args);
    int64_t parts = (args.batch + args.samples - 1) / args.samples;
    bool parallel = args.batch * args.tokens * args.channels >= SMALLEST_PARALLEL;
    static thread_local Scratch own;  // inside the region the name is the memory of another thread
    Scratch& scratch = own;
    if (!scratch.reserve(parallel ? args.threads : 1, Workspace::elements(shape)))
        return OUT_OF_MEMORY;
#pragma omp parallel num_threads(args.threads) if (parallel)
    {
        Workspace workspace(scratch.part(), shape);
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < shape.blocks() * parts; ++unit) {
            int64_t part = unit / shape.blocks(), channel = unit % shape.blocks() * LANES;
            int64_t last = (part + 1) * args.samples, end = last < args.batch ? last : args.batch;
            int active = active_lanes(channel, args.channels);
            Heads heads(channel, args.channels, args.heads);
            load_kernel(workspace.kernel, shape, heads, false);
            load_kernel(workspace.flipped, shape, heads, true);
            memset(workspace.grad_kernel, 0, shape.entries * LANES * 4);
            for (int64_t sample = part * args.samples; sample < end; ++sample) {
                differentiate<Number>(shape, heads, sample, channel, active, workspace);
                if (args.grad_kernel != nullptr)
                    accumulate_kernel_grad(workspace.grad_kernel, workspace.maps,
                                           workspace.grad_maps, shape);
            }
            if (args.grad_kernel == nullptr) continue;
            float* to = args.grad_kernel + part * shape.entries * args.channels + channel;
            for (int64_t entry = 0; entry < shape.entries; ++entry)
                store(to + entry * args.channels, load(workspace.grad_kernel + entry * LANES),
                      active);
        }
    }
    return DONE;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int aft_conv_backward(const ConvArgs* args,
                                                                        int64_t bfloat) {
    return bfloat ? backward<bfloat16>(*args) : backward<float>(*args);
}
