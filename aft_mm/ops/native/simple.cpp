// Causal AFT-simple and its gradient: y_t = g(q_t) sum e^k v / sum e^k over the tokens up to t.
//
// A thread walks along the tokens with the sums of some channels in registers, scaled by the
// largest key so far: exact for any finite keys, and no row depends on a later one. The backward
// pass walks back. It starts from the sums that the forward pass saved before every segment and
// recomputes those inside a segment: a tenth of a tensor is saved.

#include "tensors.h"

namespace {

constexpr int64_t SEGMENT = 32;  // tokens; the same as in aft_mm/ops/native/bindings.py
constexpr int WIDE = 4;          // adjacent vectors, for whole cache lines

struct SimpleArgs {
    int64_t batch, tokens, channels, gate, threads;
    Tensor query, key, value, mask, output;
    Tensor grad_query, grad_key, grad_value;  // then `output` is the output's gradient
    float* saved;  // [batch, segments, 3, channels], or missing

    int64_t segments() const { return (tokens + SEGMENT - 1) / SEGMENT; }

    float* saved_at(int64_t sample, int64_t segment, int64_t channel) const {
        return saved + (sample * segments() + segment) * 3 * channels + channel;
    }

    bool hidden(int64_t sample, int64_t token) const {
        return mask.data != nullptr && !*mask.at<uint8_t>(sample, token, 0);
    }
};

// Sums over the tokens so far, divided by e^shift.
struct ShiftedSum {
    Vector shift = all(LOWEST);
    KahanSum numerator, denominator;

    // Adds a token and returns its weight e^(k - shift).
    INLINE Vector append(Vector key, Vector value) {
        Integers grows = key > shift;
        if (any(grows)) {
            Vector scale = grows ? exponential(shift - key) : all(1.0f);
            shift = grows ? key : shift;
            numerator.scale(scale);
            denominator.scale(scale);
        }
        Vector weight = exponential(key - shift);
        numerator.add(weight * value);
        denominator.add(weight);
        return weight;
    }

    void save(float* to, int64_t stride, int active_lanes) const {
        store(to, shift, active_lanes);
        store(to + stride, numerator.sum, active_lanes);
        store(to + 2 * stride, denominator.sum, active_lanes);
    }

    void restore(const float* from, int64_t stride, int active_lanes) {
        shift = load(from, active_lanes);
        numerator = {load(from + stride, active_lanes)};
        denominator = {load(from + 2 * stride, active_lanes)};
    }
};

template <typename Number>
INLINE void load_token(Vector& key, Vector& value, const SimpleArgs& args, int64_t sample,
                       int64_t token, int64_t channel, int active_lanes) {
    key = all(-__builtin_inff()), value = Vector{};
    if (args.hidden(sample, token)) return;
    key = load(args.key.at<Number>(sample, token, channel), active_lanes);
    value = load(args.value.at<Number>(sample, token, channel), active_lanes);
}

template <typename Number, int W>
void forward_channels(const SimpleArgs& args, int64_t sample, int64_t channel, int active_lanes) {
    ShiftedSum sums[W];
    for (int64_t token = 0; token < args.tokens; ++token)
        UNROLL for (int i = 0; i < W; ++i) {
            int64_t at = channel + i * LANES;
            if (args.saved != nullptr && token % SEGMENT == 0)
                sums[i].save(args.saved_at(sample, token / SEGMENT, at), args.channels,
                             active_lanes);
            Vector key, value, query = Vector{};
            load_token<Number>(key, value, args, sample, token, at, active_lanes);
            if (args.gate != NONE)
                query = load(args.query.at<Number>(sample, token, at), active_lanes);
            sums[i].append(key, value);
            Vector denominator = larger(sums[i].denominator.sum, all(TINY));
            store(args.output.at<Number>(sample, token, at),
                  gated_mean<Number>(query, sums[i].numerator.sum, denominator, args.gate),
                  active_lanes);
        }
}

// What the backward pass needs of each token of a segment, and the sums over later tokens.
struct TokenState {
    Vector value, weight, shift, reciprocal, mean;
};

struct LaterSums {
    Vector shift = all(LOWEST);
    KahanSum grad_term, grad_weight;
};

template <typename Number, int W>
void backward_channels(const SimpleArgs& args, int64_t sample, int64_t channel, int active_lanes) {
    TokenState steps[SEGMENT][W];
    LaterSums later[W];
    for (int64_t segment = args.segments() - 1; segment >= 0; --segment) {
        int64_t first = segment * SEGMENT;
        int64_t last = first + SEGMENT < args.tokens ? first + SEGMENT : args.tokens;
        ShiftedSum sums[W];
        for (int i = 0; i < W; ++i)
            sums[i].restore(args.saved_at(sample, segment, channel + i * LANES), args.channels,
                            active_lanes);
        for (int64_t token = first; token < last; ++token)
            UNROLL for (int i = 0; i < W; ++i) {
                TokenState& step = steps[token - first][i];
                Vector key;
                load_token<Number>(key, step.value, args, sample, token, channel + i * LANES,
                                   active_lanes);
                step.weight = sums[i].append(key, step.value);
                step.shift = sums[i].shift;
                Vector denominator = sums[i].denominator.sum;
                step.reciprocal = denominator < TINY ? Vector{} : 1.0f / denominator;
                step.mean = sums[i].numerator.sum * step.reciprocal;
            }
        for (int64_t token = last - 1; token >= first; --token)
            UNROLL for (int i = 0; i < W; ++i) {
                const TokenState& step = steps[token - first][i];
                int64_t at = channel + i * LANES;
                Vector grad_output = load(args.output.at<Number>(sample, token, at), active_lanes);
                Vector query = Vector{}, slope;
                if (args.gate != NONE)
                    query = load(args.query.at<Number>(sample, token, at), active_lanes);
                Vector gate_value = gate_with_slope(query, args.gate, slope);
                if (args.grad_query.data != nullptr)
                    store(args.grad_query.at<Number>(sample, token, at),
                          grad_output * step.mean * slope, active_lanes);
                Vector grad_term = grad_output * gate_value * step.reciprocal;
                if (any(later[i].shift != step.shift)) {
                    Vector scale = exponential(step.shift - later[i].shift);
                    later[i].grad_term.scale(scale);
                    later[i].grad_weight.scale(scale);
                    later[i].shift = step.shift;
                }
                later[i].grad_term.add(grad_term);
                later[i].grad_weight.add(grad_term * step.mean);
                Vector grad_value = step.weight * later[i].grad_term.sum;
                Vector grad_key = grad_value * step.value - step.weight * later[i].grad_weight.sum;
                bool hidden = args.hidden(sample, token);
                store(args.grad_value.at<Number>(sample, token, at), hidden ? Vector{} : grad_value,
                      active_lanes);
                store(args.grad_key.at<Number>(sample, token, at), hidden ? Vector{} : grad_key,
                      active_lanes);
            }
    }
}

// Runs body(sample, channel, active_lanes, wide) over all channels, WIDE vectors at once or one.
template <typename Body>
void for_all_channels(const SimpleArgs& args, const Body& body) {
    constexpr int64_t CHANNELS = WIDE * LANES;
    int64_t pieces = (args.channels + CHANNELS - 1) / CHANNELS;
    bool parallel = args.batch * args.tokens * args.channels >= SMALLEST_PARALLEL;
#pragma omp parallel for num_threads(args.threads) schedule(static) if (parallel)
    for (int64_t unit = 0; unit < pieces * args.batch; ++unit) {
        int64_t sample = unit / pieces, first = unit % pieces * CHANNELS;
        if (first + CHANNELS <= args.channels) {
            body(sample, first, LANES, true);
            continue;
        }
        for (int64_t channel = first; channel < args.channels; channel += LANES) {
            int64_t left = args.channels - channel;
            body(sample, channel, left < LANES ? left : LANES, false);
        }
    }
}

template <typename Number>
void forward(const SimpleArgs& args) {
    for_all_channels(args, [&](int64_t sample, int64_t channel, int active_lanes, bool wide) {
        wide ? forward_channels<Number, WIDE>(args, sample, channel, active_lanes)
             : forward_channels<Number, 1>(args, sample, channel, active_lanes);
    });
}

template <typename Number>
void backward(const SimpleArgs& args) {
    for_all_channels(args, [&](int64_t sample, int64_t channel, int active_lanes, bool wide) {
        wide ? backward_channels<Number, WIDE>(args, sample, channel, active_lanes)
             : backward_channels<Number, 1>(args, sample, channel, active_lanes);
    });
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int aft_simple_forward(const SimpleArgs* args,
                                                                         int64_t bfloat) {
    bfloat ? forward<bfloat16>(*args) : forward<float>(*args);
    return DONE;
}

extern "C" __attribute__((visibility("default"))) int aft_simple_backward(const SimpleArgs* args,
                                                                          int64_t bfloat) {
    bfloat ? backward<bfloat16>(*args) : backward<float>(*args);
    return DONE;
}
