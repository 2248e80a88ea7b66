// AFT-conv.

#include "conv.h"

namespace {

template <typename Number>
INLINE void write(const Call& call, int64_t sample, int64_t token, int64_t channel, int used,
                  Vector numerator, Vector denominator) {
    Vector query = Vector{};
    if (call.gate != NONE) query = load(call.query.at<Number>(sample, token, channel), used);
    denominator = larger(denominator, all(TINY));
    store(call.output.at<Number>(sample, token, channel),
          gated_mean(query, numerator, denominator, call.gate), used);
}

// A block of channels, whose heads are their own, or treated as if they were.
template <typename Number>
void mix_channels(const Plan& plan, int64_t sample, int64_t channel, Scratch& scratch) {
    const Call& call = plan.call;
    int used = lanes(channel, call.channels);
    float* kernel = scratch.of(2 * plan.size + (plan.entries + 2 * call.columns) * LANES);
    float* beyond = kernel + plan.entries * LANES;
    float* sums[2] = {beyond, beyond + call.columns * LANES};
    float* numbers = sums[1] + call.columns * LANES;
    const Map maps[2] = {plan.map(numbers), plan.map(numbers + plan.size)};
    Heads heads(channel, call.channels, call.heads);
    take_kernel(kernel, plan, heads, false);
    Total totals[2];
    make_maps<Number>(maps, totals, plan, heads, sample, channel, used);
    if (call.causal) totals[0] = totals[1] = Total{};
    for (int64_t row = 0, token = 0; row < call.rows; ++row) {
        correlate_row<2>(sums, maps, totals, kernel, row, plan, false);
        for (int64_t column = 0; column < call.columns; ++column, ++token)
            write<Number>(call, sample, token, channel, used, load(sums[0] + column * LANES),
                          load(sums[1] + column * LANES));
    }
}

// A block of heads, with the denominator once, and all channels of these heads.
template <typename Number>
void mix_heads(const Plan& plan, int64_t sample, int64_t head, Scratch& scratch) {
    const Call& call = plan.call;
    int64_t group = call.channels / call.heads;
    int used = lanes(head, call.heads);
    int64_t vectors = 2 * plan.entries + call.columns + call.tokens;
    float* head_kernel = scratch.of(2 * plan.size + vectors * LANES);
    float* kernel = head_kernel + plan.entries * LANES;
    float* sums[1] = {kernel + plan.entries * LANES};
    float* denominators = sums[0] + call.columns * LANES;
    float* numbers = denominators + call.tokens * LANES;
    const Map terms[1] = {plan.map(numbers)}, weights[1] = {plan.map(numbers + plan.size)};
    take_kernel(head_kernel, plan, Heads(head, call.heads, call.heads), false);
    Total totals[1] = {make_weights(weights[0], plan, sample, [&](int64_t token) {
        __builtin_prefetch(call.key.at<Number>(sample, token + AHEAD, head));
        return load(call.key.at<Number>(sample, token, head), used);
    })};
    if (call.causal) totals[0] = Total{};
    for (int64_t row = 0; row < call.rows; ++row) {
        float* to[1] = {denominators + row * call.columns * LANES};
        correlate_row<1>(to, weights, totals, head_kernel, row, plan, false);
    }
    int64_t end = (head + used) * group;
    for (int64_t channel = head * group; channel < end; channel += LANES) {
        int here = lanes(channel, end);
        Integers of;
        for (int lane = 0; lane < LANES; ++lane)
            of[lane] = (channel + (lane < here ? lane : here - 1)) / group - head;
        for (int64_t entry = 0; entry < plan.entries; ++entry)
            store(kernel + entry * LANES, pick(load(head_kernel + entry * LANES), of));
        totals[0] = make_terms<Number>(terms[0], plan, sample, channel, here,
                                       [&](int64_t row, int64_t column) {
            return pick(load(weights[0].at(row, plan.beside + column)), of);
        });
        if (call.causal) totals[0] = Total{};
        for (int64_t row = 0, token = 0; row < call.rows; ++row) {
            correlate_row<1>(sums, terms, totals, kernel, row, plan, false);
            for (int64_t column = 0; column < call.columns; ++column, ++token)
                write<Number>(call, sample, token, channel, here, load(sums[0] + column * LANES),
                              pick(load(denominators + token * LANES), of));
        }
    }
}

template <typename Number>
void forward(const Call& call) {
    Plan plan(call);
    int64_t head_blocks = (call.heads + LANES - 1) / LANES;
    // Channels are more to share out; the numbers are the same.
    bool by_channels = call.heads == call.channels || call.batch * head_blocks < call.threads;
    int64_t blocks = by_channels ? plan.blocks() : head_blocks;
    bool shared = call.batch * call.tokens * call.channels >= FEWEST_TO_SHARE;
#pragma omp parallel for num_threads(call.threads) schedule(static) if (shared)
    for (int64_t unit = 0; unit < blocks * call.batch; ++unit) {
        static thread_local Scratch scratch;
        int64_t sample = unit / blocks, first = unit % blocks * LANES;
        if (by_channels) mix_channels<Number>(plan, sample, first, scratch);
        else mix_heads<Number>(plan, sample, first, scratch);
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void aft_conv_forward(const Call* call,
                                                                        int64_t bfloat) {
    bfloat ? forward<bfloat16>(*call) : forward<float>(*call);
}
