// Causal AFT-simple and its gradient: y_t = g(q_t) sum e^k v / sum e^k over the tokens up to t.
//
// A thread walks along the tokens with the sums of some channels in registers, scaled by the
// largest key so far: exact for any finite keys, and no row knows of a later one. The backward pass
// walks back. It starts from the sums that the forward pass has kept before every segment, and
// makes those inside of a segment anew: what is kept is a tenth of a tensor.

#include "tokens.h"

namespace {

constexpr int64_t SEGMENT = 32;  // tokens; aft_mm/ops/native/library.py knows it, too
constexpr int WIDE = 4;          // vectors next to each other, for whole lines of memory

struct Call {
    int64_t batch, tokens, channels, gate, threads;
    Tensor query, key, value, mask, output;
    Tensor query_gradient, key_gradient, value_gradient;  // then `output` is the output's gradient
    float* kept;  // [batch, segments, 3, channels], or missing

    int64_t segments() const { return (tokens + SEGMENT - 1) / SEGMENT; }

    float* kept_at(int64_t sample, int64_t segment, int64_t channel) const {
        return kept + (sample * segments() + segment) * 3 * channels + channel;
    }

    bool hidden(int64_t sample, int64_t token) const {
        return mask.data != nullptr && !*mask.at<uint8_t>(sample, token, 0);
    }
};

// Sums over the tokens so far, divided by e^shift.
struct Sums {
    Vector shift = all(LOWEST);
    Total numerator, denominator;

    // One more token; its weight e^(k - shift).
    INLINE Vector join(Vector key, Vector value) {
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

    void save(float* to, int64_t stride, int lanes) const {
        store(to, shift, lanes);
        store(to + stride, numerator.sum, lanes);
        store(to + 2 * stride, denominator.sum, lanes);
    }

    void restore(const float* from, int64_t stride, int lanes) {
        shift = load(from, lanes);
        numerator = {load(from + stride, lanes)};
        denominator = {load(from + 2 * stride, lanes)};
    }
};

template <typename Number>
INLINE void take(Vector& key, Vector& value, const Call& call, int64_t sample, int64_t token,
                 int64_t channel, int lanes) {
    key = all(-__builtin_inff()), value = Vector{};
    if (call.hidden(sample, token)) return;
    key = load(call.key.at<Number>(sample, token, channel), lanes);
    value = load(call.value.at<Number>(sample, token, channel), lanes);
}

template <typename Number, int W>
void walk(const Call& call, int64_t sample, int64_t channel, int lanes) {
    Sums sums[W];
    for (int64_t token = 0; token < call.tokens; ++token)
        UNROLL for (int i = 0; i < W; ++i) {
            int64_t at = channel + i * LANES;
            if (call.kept != nullptr && token % SEGMENT == 0)
                sums[i].save(call.kept_at(sample, token / SEGMENT, at), call.channels, lanes);
            Vector key, value, query = Vector{};
            take<Number>(key, value, call, sample, token, at, lanes);
            if (call.gate != NONE) query = load(call.query.at<Number>(sample, token, at), lanes);
            sums[i].join(key, value);
            Vector denominator = larger(sums[i].denominator.sum, all(TINY));
            store(call.output.at<Number>(sample, token, at),
                  gated_mean(query, sums[i].numerator.sum, denominator, call.gate), lanes);
        }
}

// What a segment needs on the way back, and the sums over the tokens behind it.
struct Step {
    Vector value, weight, shift, share, mean;
};

struct Behind {
    Vector shift = all(LOWEST);
    Total by_term, by_weight;
};

template <typename Number, int W>
void walk_back(const Call& call, int64_t sample, int64_t channel, int lanes) {
    Step steps[SEGMENT][W];
    Behind behind[W];
    for (int64_t segment = call.segments() - 1; segment >= 0; --segment) {
        int64_t first = segment * SEGMENT;
        int64_t last = first + SEGMENT < call.tokens ? first + SEGMENT : call.tokens;
        Sums sums[W];
        for (int i = 0; i < W; ++i)
            sums[i].restore(call.kept_at(sample, segment, channel + i * LANES), call.channels,
                            lanes);
        for (int64_t token = first; token < last; ++token)
            UNROLL for (int i = 0; i < W; ++i) {
                Step& step = steps[token - first][i];
                Vector key;
                take<Number>(key, step.value, call, sample, token, channel + i * LANES, lanes);
                step.weight = sums[i].join(key, step.value);
                step.shift = sums[i].shift;
                Vector denominator = sums[i].denominator.sum;
                step.share = denominator < TINY ? Vector{} : 1.0f / denominator;
                step.mean = sums[i].numerator.sum * step.share;
            }
        for (int64_t token = last - 1; token >= first; --token)
            UNROLL for (int i = 0; i < W; ++i) {
                const Step& step = steps[token - first][i];
                int64_t at = channel + i * LANES;
                Vector by_output = load(call.output.at<Number>(sample, token, at), lanes);
                Vector query = Vector{}, slope;
                if (call.gate != NONE)
                    query = load(call.query.at<Number>(sample, token, at), lanes);
                Vector gating = gate_with_slope(query, call.gate, slope);
                if (call.query_gradient.data != nullptr)
                    store(call.query_gradient.at<Number>(sample, token, at),
                          by_output * step.mean * slope, lanes);
                Vector by_term = by_output * gating * step.share;
                if (any(behind[i].shift != step.shift)) {
                    Vector scale = exponential(step.shift - behind[i].shift);
                    behind[i].by_term.scale(scale);
                    behind[i].by_weight.scale(scale);
                    behind[i].shift = step.shift;
                }
                behind[i].by_term.add(by_term);
                behind[i].by_weight.add(by_term * step.mean);
                Vector by_value = step.weight * behind[i].by_term.sum;
                Vector by_key = by_value * step.value - step.weight * behind[i].by_weight.sum;
                bool hidden = call.hidden(sample, token);  // 0, whatever came from above
                store(call.value_gradient.at<Number>(sample, token, at),
                      hidden ? Vector{} : by_value, lanes);
                store(call.key_gradient.at<Number>(sample, token, at), hidden ? Vector{} : by_key,
                      lanes);
            }
    }
}

// walk(sample, channel, lanes, wide) over all channels, WIDE vectors at once or one.
template <typename Walk>
void everywhere(const Call& call, const Walk& walk) {
    constexpr int64_t CHANNELS = WIDE * LANES;
    int64_t pieces = (call.channels + CHANNELS - 1) / CHANNELS;
    bool shared = call.batch * call.tokens * call.channels >= FEWEST_TO_SHARE;
#pragma omp parallel for num_threads(call.threads) schedule(static) if (shared)
    for (int64_t unit = 0; unit < pieces * call.batch; ++unit) {
        int64_t sample = unit / pieces, first = unit % pieces * CHANNELS;
        if (first + CHANNELS <= call.channels) {
            walk(sample, first, LANES, true);
            continue;
        }
        for (int64_t channel = first; channel < call.channels; channel += LANES) {
            int64_t left = call.channels - channel;
            walk(sample, channel, left < LANES ? left : LANES, false);
        }
    }
}

template <typename Number>
void forward(const Call& call) {
    everywhere(call, [&](int64_t sample, int64_t channel, int lanes, bool wide) {
        wide ? walk<Number, WIDE>(call, sample, channel, lanes)
             : walk<Number, 1>(call, sample, channel, lanes);
    });
}

template <typename Number>
void backward(const Call& call) {
    everywhere(call, [&](int64_t sample, int64_t channel, int lanes, bool wide) {
        wide ? walk_back<Number, WIDE>(call, sample, channel, lanes)
             : walk_back<Number, 1>(call, sample, channel, lanes);
    });
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void aft_simple_forward(const Call* call,
                                                                          int64_t bfloat) {
    bfloat ? forward<bfloat16>(*call) : forward<float>(*call);
}

extern "C" __attribute__((visibility("default"))) void aft_simple_backward(const Call* call,
                                                                           int64_t bfloat) {
    bfloat ? backward<bfloat16>(*call) : backward<float>(*call);
}
