// The gradient of AFT-conv. The terms are made anew instead of being kept.

#include "conv.h"

namespace {

// sums[entry] += gradients * both maps, X columns next to each other, G entries.
template <int X, int G>
INLINE void weigh(Vector (&sums)[G], const float* const (&from)[2], const float* const (&by)[2]) {
    UNROLL for (int map = 0; map < 2; ++map) {
        Vector gradients[X];
        UNROLL for (int i = 0; i < X; ++i) gradients[i] = load(by[map] + i * LANES);
        UNROLL for (int column = 0; column < X + G - 1; ++column) {
            Vector x = load(from[map] + column * LANES);
            UNROLL for (int i = 0; i < X; ++i) {
                int entry = column - i;
                if (entry >= 0 && entry < G) sums[entry] += gradients[i] * x;
            }
        }
    }
}

// The gradients of G entries of a row of the kernel, added to `gradient`.
template <int G>
void weigh_entries(float* gradient, int64_t line, int64_t entry, const Map (&maps)[2],
                   const Map (&by_maps)[2], const Plan& plan) {
    constexpr int X = 4;
    int64_t down = line - plan.above, rows = plan.call.rows, columns = plan.call.columns;
    Vector sums[G] = {};
    for (int64_t row = down < 0 ? -down : 0; row < rows && row + down < rows; ++row) {
        int64_t column = 0;
        const float *from[2], *by[2];
        auto place = [&] {
            for (int map = 0; map < 2; ++map) {
                from[map] = maps[map].at(row + down, entry + column);
                by[map] = by_maps[map].at(row, plan.beside + column);
            }
        };
        for (; column + X <= columns; column += X) place(), weigh<X, G>(sums, from, by);
        for (; column < columns; ++column) place(), weigh<1, G>(sums, from, by);
    }
    float* to = gradient + (line * plan.call.kernel_columns + entry) * LANES;
    UNROLL for (int i = 0; i < G; ++i) store(to + i * LANES, load(to + i * LANES) + sums[i]);
}

void weigh_kernel(float* gradient, const Map (&maps)[2], const Map (&by_maps)[2],
                  const Plan& plan) {
    for (int64_t line = 0; line < plan.end_line(false); ++line) {
        int64_t entry = 0, columns = plan.end_entry(line, false);
        for (; entry + ENTRIES <= columns; entry += ENTRIES)
            weigh_entries<ENTRIES>(gradient, line, entry, maps, by_maps, plan);
        int64_t left = columns - entry;
        if (left == 3) weigh_entries<3>(gradient, line, entry, maps, by_maps, plan);
        else if (left == 2) weigh_entries<2>(gradient, line, entry, maps, by_maps, plan);
        else if (left == 1) weigh_entries<1>(gradient, line, entry, maps, by_maps, plan);
    }
}

// Where the gradients of a thread lie.
struct Work {
    float *kernel, *turned, *gradient, *sums[2];
    Map maps[2], by_maps[2];  // of terms and weights, and their gradients

    Work(Scratch& scratch, const Plan& plan) {
        int64_t vectors = 3 * plan.entries + 2 * plan.call.columns;
        kernel = scratch.of(4 * plan.size + vectors * LANES);
        turned = kernel + plan.entries * LANES;
        gradient = turned + plan.entries * LANES;
        sums[0] = gradient + plan.entries * LANES;
        sums[1] = sums[0] + plan.call.columns * LANES;
        float* numbers = sums[1] + plan.call.columns * LANES;
        for (int i = 0; i < 2; ++i) {
            maps[i] = plan.map(numbers + i * plan.size);
            by_maps[i] = plan.map(numbers + (2 + i) * plan.size);
        }
    }
};

template <typename Number>
void differentiate(const Plan& plan, const Heads& heads, int64_t sample, int64_t channel, int used,
                   const Work& work) {
    const Call& call = plan.call;
    Total totals[2], by_totals[2];
    make_maps<Number>(work.maps, totals, plan, heads, sample, channel, used);
    if (call.causal) totals[0] = totals[1] = Total{};
    for (int64_t row = 0, token = 0; row < call.rows; ++row) {
        correlate_row<2>(work.sums, work.maps, totals, work.kernel, row, plan, false);
        for (int64_t column = 0; column < call.columns; ++column, ++token) {
            Vector numerator = load(work.sums[0] + column * LANES);
            Vector denominator = load(work.sums[1] + column * LANES);
            Vector by_output = load(call.output.at<Number>(sample, token, channel), used);
            Vector query = Vector{}, slope;
            if (call.gate != NONE)
                query = load(call.query.at<Number>(sample, token, channel), used);
            Vector gating = gate_with_slope(query, call.gate, slope);
            Vector share = denominator < TINY ? Vector{} : 1.0f / denominator;
            Vector mean = numerator * share;
            if (call.query_gradient.data != nullptr)
                store(call.query_gradient.at<Number>(sample, token, channel),
                      by_output * mean * slope, used);
            Vector by_term = by_output * gating * share, by_weight = -by_term * mean;
            store(work.by_maps[0].at(row, plan.beside + column), by_term);
            store(work.by_maps[1].at(row, plan.beside + column), by_weight);
            by_totals[0].add(by_term);
            by_totals[1].add(by_weight);
        }
    }
    if (call.causal) by_totals[0] = by_totals[1] = Total{};
    for (int64_t row = call.rows - 1; row >= 0; --row) {
        correlate_row<2>(work.sums, work.by_maps, by_totals, work.turned, row, plan, true);
        for (int64_t column = 0; column < call.columns; ++column) {
            int64_t token = row * call.columns + column;
            Vector by_term = load(work.sums[0] + column * LANES);
            Vector by_weight = load(work.sums[1] + column * LANES);
            Vector term = load(work.maps[0].at(row, plan.beside + column));
            Vector weight = load(work.maps[1].at(row, plan.beside + column));
            Vector by_key = term * by_term + weight * by_weight, by_value = weight * by_term;
            if (plan.hidden(sample, token)) by_key = by_value = Vector{};  // whatever comes in
            store(call.value_gradient.at<Number>(sample, token, channel), by_value, used);
            store(call.key_gradient.at<float>(sample, token, channel), by_key, used);
        }
    }
}

template <typename Number>
void backward(const Call& call) {
    Plan plan(call);
    int64_t parts = (call.batch + call.samples - 1) / call.samples;
    bool shared = call.batch * call.tokens * call.channels >= FEWEST_TO_SHARE;
#pragma omp parallel num_threads(call.threads) if (shared)
    {
        static thread_local Scratch scratch;
        Work work(scratch, plan);
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < plan.blocks() * parts; ++unit) {
            int64_t part = unit / plan.blocks(), channel = unit % plan.blocks() * LANES;
            int64_t last = (part + 1) * call.samples, end = last < call.batch ? last : call.batch;
            int used = lanes(channel, call.channels);
            Heads heads(channel, call.channels, call.heads);
            take_kernel(work.kernel, plan, heads, false);
            take_kernel(work.turned, plan, heads, true);
            memset(work.gradient, 0, plan.entries * LANES * 4);
            for (int64_t sample = part * call.samples; sample < end; ++sample) {
                differentiate<Number>(plan, heads, sample, channel, used, work);
                if (call.weight_gradient != nullptr)
                    weigh_kernel(work.gradient, work.maps, work.by_maps, plan);
            }
            if (call.weight_gradient == nullptr) continue;
            float* to = call.weight_gradient + part * plan.entries * call.channels + channel;
            for (int64_t entry = 0; entry < plan.entries; ++entry)
                store(to + entry * call.channels, load(work.gradient + entry * LANES), used);
        }
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void aft_conv_backward(const Call* call,
                                                                         int64_t bfloat) {
    bfloat ? backward<bfloat16>(*call) : backward<float>(*call);
}
