// AFT-simple and AFT-decay over the tokens up to t, and their gradients:
// y_t = g(q_t) sum e^(k - decay (t - t')) v / sum e^(k - decay (t - t')).
//
// A thread walks along the tokens with the sums of some channels in registers, scaled by a large
// key: exact for any finite keys, and no row depends on a later one. The backward pass walks back.
// It starts from the sums that the forward pass saved before every segment and recomputes those
// inside a segment: a tenth of a tensor is saved, a quarter with a decay.
//
// Sums over the tokens on both sides are those up to t and, walking back, those after t. Their
// gradients are those of each side, of its share in the row.

#include "tensors.h"

namespace {

constexpr int64_t SEGMENT = 32;  // tokens; the same as in aft_mm/ops/native/bindings.py
constexpr int WIDE = 4;          // adjacent vectors, for whole cache lines
// By how much a key may exceed the shift of decaying sums, so that not every token changes it.
constexpr float ROOM = 8.0f;

// The tokens of row t. Those after t are passed in reverse order, for gradients only.
enum Side : int64_t { BEFORE, AFTER, BOTH };

struct SimpleArgs {
    int64_t batch, tokens, channels, gate, threads, side;
    Tensor query, key, value, mask, output;
    Tensor grad_query, grad_key, grad_value;  // then `output` is the output's gradient
    Tensor saved, saved_after;                // [batch, segments * FIELDS, channels], or missing
    // [batch, tokens, channels] or missing: the denominator of the tokens after a row over the one
    // of those up to it, and the mean of these minus the one of those after it.
    Tensor ratio, gap;
    float *decay, *grad_decay;  // [channels] and [batch, channels], or missing

    int64_t segments() const { return (tokens + SEGMENT - 1) / SEGMENT; }

    bool hidden(int64_t sample, int64_t token) const {
        return mask.data != nullptr && !*mask.at<uint8_t>(sample, token, 0);
    }
};

// a - b, and what its rounding lost.
struct Difference {
    Vector rounded, rest;
};

INLINE Difference subtract(Vector a, Vector b) {
    Vector rounded = a - b, back = rounded - a;
    Vector rest = (a - (rounded - back)) - (b + back);
    return {rounded, rest == rest ? rest : Vector{}};  // an infinite difference has none
}

// Sums over the tokens so far, divided by e^(shift - faded - rest).
template <bool DECAY>
struct RunningSum {
    Vector shift = all(LOWEST);
    KahanSum numerator, denominator;
    Vector faded = {}, rest = {};            // the decay since the token of the shift
    Vector age = {}, mean = {}, slope = {};  // the mean age, and the mean and its derivative

    INLINE void fade(Vector decay) {
        Difference next = subtract(faded, -decay);
        faded = next.rounded;
        rest += next.rest;
        age += 1.0f;
    }

    // Adds a token; returns its weight, and by what older sums were scaled.
    INLINE Vector append(Vector key, Vector value, Vector& scale, bool differentiates) {
        Vector exponent = key - shift;
        if constexpr (DECAY) {  // next to a key of 1e4 float32 would lose the decay
            Difference over = subtract(key, shift);
            exponent = (over.rounded + faded) + (over.rest + rest);
        }
        Integers grows = DECAY ? exponent > ROOM : key > shift;
        scale = all(1.0f);
        if (any(grows)) {
            scale = grows ? exponential(-exponent) : scale;
            shift = grows ? key : shift;
            if (DECAY) {
                exponent = grows ? key - key : exponent;
                faded = grows ? Vector{} : faded;
                rest = grows ? Vector{} : rest;
            }
            numerator.scale(scale);
            denominator.scale(scale);
        }
        if (!DECAY) exponent = key - shift;
        Vector weight = exponential(exponent), before = denominator.sum;
        numerator.add(weight * value);
        denominator.add(weight);
        if (DECAY && differentiates) {  // from values minus their mean, for large offsets
            Vector inverse = reciprocal();
            before *= inverse;
            age *= before;
            slope = slope * before + weight * inverse * age * (value - mean);
            mean = numerator.sum * inverse;
        }
        return weight;
    }

    INLINE Vector reciprocal() const {
        return denominator.sum < TINY ? Vector{} : 1.0f / denominator.sum;
    }

    static constexpr int FIELDS = DECAY ? 7 : 3;

    INLINE void save(const Tensor& to, int64_t sample, int64_t segment, int64_t channel,
                     int active_lanes) const {
        Vector fields[] = {shift, numerator.sum, denominator.sum, faded, rest, age, slope};
        UNROLL for (int field = 0; field < FIELDS; ++field)
            store(to.at<float>(sample, segment * FIELDS + field, channel), fields[field],
                  active_lanes);
    }

    INLINE void restore(const Tensor& from, int64_t sample, int64_t segment, int64_t channel,
                        int active_lanes) {
        Vector fields[7] = {};
        UNROLL for (int field = 0; field < FIELDS; ++field)
            fields[field] = load(from.at<float>(sample, segment * FIELDS + field, channel),
                                 active_lanes);
        shift = fields[0], numerator = {fields[1]}, denominator = {fields[2]};
        faded = fields[3], rest = fields[4], age = fields[5], slope = fields[6];
        mean = numerator.sum * reciprocal();
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

template <bool DECAY, int W>
INLINE void load_decay(Vector (&decay)[W], const SimpleArgs& args, int64_t channel,
                       int active_lanes) {
    if constexpr (DECAY)
        for (int i = 0; i < W; ++i) decay[i] = load(args.decay + channel + i * LANES, active_lanes);
}

template <typename Number, bool DECAY, int W>
void forward_channels(const SimpleArgs& args, int64_t sample, int64_t channel, int active_lanes) {
    RunningSum<DECAY> sums[W];
    Vector decay[W], scale;
    load_decay<DECAY>(decay, args, channel, active_lanes);
    bool saves = args.saved.data != nullptr, has_rows = !DECAY || args.side != BOTH;
    for (int64_t token = 0; token < args.tokens; ++token)
        UNROLL for (int i = 0; i < W; ++i) {
            int64_t at = channel + i * LANES;
            if (saves && token % SEGMENT == 0)
                sums[i].save(args.saved, sample, token / SEGMENT, at, active_lanes);
            Vector key, value, query = Vector{};
            if (args.gate != NONE && has_rows)
                query = load(args.query.at<Number>(sample, token, at), active_lanes);
            load_token<Number>(key, value, args, sample, token, at, active_lanes);
            if (DECAY) sums[i].fade(decay[i]);
            sums[i].append(key, value, scale, saves);
            if (!has_rows) continue;
            Vector denominator = larger(sums[i].denominator.sum, all(TINY));
            store(args.output.at<Number>(sample, token, at),
                  gated_mean<Number>(query, sums[i].numerator.sum, denominator, args.gate),
                  active_lanes);
        }
}

// Walks along the tokens of a segment and calls body(token, i, sums of row, value, weight, scale).
template <typename Number, bool DECAY, int W, typename Body>
INLINE void walk_segment(const SimpleArgs& args, int64_t sample, int64_t segment, int64_t channel,
                         int active_lanes, const Body& body) {
    RunningSum<DECAY> sums[W];
    Vector decay[W];
    load_decay<DECAY>(decay, args, channel, active_lanes);
    for (int i = 0; i < W; ++i)
        sums[i].restore(args.saved, sample, segment, channel + i * LANES, active_lanes);
    int64_t first = segment * SEGMENT;
    int64_t last = first + SEGMENT < args.tokens ? first + SEGMENT : args.tokens;
    for (int64_t token = first; token < last; ++token)
        UNROLL for (int i = 0; i < W; ++i) {
            Vector key, value, scale;
            load_token<Number>(key, value, args, sample, token, channel + i * LANES, active_lanes);
            if (DECAY) sums[i].fade(decay[i]);
            RunningSum<DECAY> row = sums[i];
            Vector weight = sums[i].append(key, value, scale, true);
            if (!DECAY || args.side != AFTER) row = sums[i];
            body(token, i, row, value, weight, scale);
        }
}

// Adds the tokens after each row to the sums up to it.
template <int W>
void add_tokens_after(const SimpleArgs& args, int64_t sample, int64_t channel, int active_lanes) {
    RunningSum<true> rows[SEGMENT][W], after[W];
    Vector decay[W], scale;
    load_decay<true>(decay, args, channel, active_lanes);
    bool saves = args.saved_after.data != nullptr;
    int64_t token = args.tokens - 1;
    for (int64_t segment = args.segments() - 1; segment >= 0; --segment) {
        auto keep = [&](int64_t at, int i, const RunningSum<true>& row, Vector, Vector, Vector) {
            rows[at % SEGMENT][i] = row;
        };
        walk_segment<float, true, W>(args, sample, segment, channel, active_lanes, keep);
        for (; token >= segment * SEGMENT; --token)
            UNROLL for (int i = 0; i < W; ++i) {
                int64_t at = channel + i * LANES, walked = args.tokens - 1 - token;
                if (saves && walked % SEGMENT == 0)
                    after[i].save(args.saved_after, sample, walked / SEGMENT, at, active_lanes);
                after[i].fade(decay[i]);
                const RunningSum<true>& before = rows[token % SEGMENT][i];
                // The shift of the tokens after the row minus the one of those up to it.
                Difference shift = subtract(after[i].shift, before.shift);
                Difference faded = subtract(before.faded, after[i].faded);
                Vector lead = (shift.rounded + faded.rounded) +
                              (shift.rest + faded.rest + before.rest - after[i].rest);
                lead = lead > -LOWEST ? all(-LOWEST) : lead;  // keys of 3e38 and -3e38
                Vector most = larger(lead, Vector{});
                Vector before_scale = exponential(-most), after_scale = exponential(lead - most);
                Vector part = before.denominator.sum * before_scale;
                Vector other = after[i].denominator.sum * after_scale;
                Vector numerator = before.numerator.sum * before_scale +
                                   after[i].numerator.sum * after_scale;
                Vector query = Vector{}, denominator = larger(part + other, all(TINY));
                if (args.gate != NONE)
                    query = load(args.query.at<float>(sample, token, at), active_lanes);
                store(args.output.at<float>(sample, token, at),
                      gated_mean<float>(query, numerator, denominator, args.gate), active_lanes);
                if (saves) {
                    Vector gap = before.numerator.sum * before.reciprocal() -
                                 after[i].numerator.sum * after[i].reciprocal();
                    Vector ratio = part + other > 0.0f ? other / part : Vector{};
                    store(args.gap.at<float>(sample, token, at), gap, active_lanes);
                    store(args.ratio.at<float>(sample, token, at), ratio, active_lanes);
                }
                Vector key, value;
                load_token<float>(key, value, args, sample, token, at, active_lanes);
                after[i].append(key, value, scale, saves);
            }
    }
}

// What the backward pass needs of each token of a segment, and the sums over later rows.
struct TokenState {
    Vector value, weight, scale, reciprocal, mean, slope;
};

struct LaterSums {
    KahanSum grad_term, grad_decay;
    // Of gradients times the mean of their row, minus the one of the last row: values with a large
    // offset would leave a small difference of large sums.
    KahanSum grad_weight;
    Vector mean = {};

    INLINE void move_to(Vector next) {
        grad_weight.add(grad_term.sum * (mean - next));
        mean = next;
    }
};

template <typename Number, bool DECAY, int W>
void backward_channels(const SimpleArgs& args, int64_t sample, int64_t channel, int active_lanes) {
    TokenState steps[SEGMENT][W];
    LaterSums later[W];
    bool after = DECAY && args.side == AFTER;
    int64_t token = args.tokens - 1;
    for (int64_t segment = args.segments() - 1; segment >= 0; --segment) {
        auto keep = [&](int64_t at, int i, const RunningSum<DECAY>& row, Vector value,
                        Vector weight, Vector scale) {
            TokenState& step = steps[at % SEGMENT][i];
            step = {value, weight, scale, row.reciprocal(), Vector{}, row.slope};
            step.mean = row.numerator.sum * step.reciprocal;
            if (!DECAY || args.ratio.data == nullptr) return;
            int64_t place = channel + i * LANES;
            Vector ratio = load(args.ratio.at<float>(sample, at, place), active_lanes);
            Vector gap = load(args.gap.at<float>(sample, at, place), active_lanes);
            Vector share = 1.0f / (1.0f + ratio), other = 1.0f / (1.0f + 1.0f / ratio);
            gap *= after ? -share : other;  // the mean of this side minus the one of both
            share = after ? other : share;
            step.mean -= gap;
            step.reciprocal *= share;
            step.slope = share * (step.slope - row.age * gap);  // a share follows the mean age
        };
        walk_segment<Number, DECAY, W>(args, sample, segment, channel, active_lanes, keep);
        for (; token >= segment * SEGMENT; --token)
            UNROLL for (int i = 0; i < W; ++i) {
                const TokenState& step = steps[token % SEGMENT][i];
                int64_t at = channel + i * LANES;
                Vector grad_output = load(args.output.at<Number>(sample, token, at), active_lanes);
                Vector query = Vector{}, slope;
                if (args.gate != NONE)
                    query = load(args.query.at<Number>(sample, token, at), active_lanes);
                Vector gate_value = gate_with_slope(query, args.gate, slope);
                if (args.grad_query.data != nullptr)
                    store(args.grad_query.at<Number>(sample, token, at),
                          grad_output * step.mean * slope, active_lanes);
                grad_output *= gate_value;
                if (DECAY) later[i].grad_decay.add(grad_output * step.slope);
                auto add_row = [&] {
                    later[i].move_to(step.mean);
                    later[i].grad_term.add(grad_output * step.reciprocal);
                };
                if (!after) add_row();
                Vector grad_value = step.weight * later[i].grad_term.sum;
                Vector grad_key = grad_value * (step.value - later[i].mean) -
                                  step.weight * later[i].grad_weight.sum;
                if (args.hidden(sample, token)) grad_value = Vector{}, grad_key = Vector{};
                Number* value_at = args.grad_value.at<Number>(sample, token, at);
                Number* key_at = args.grad_key.at<Number>(sample, token, at);
                if (after) {  // next to those of the other side
                    grad_value += load(value_at, active_lanes);
                    grad_key += load(key_at, active_lanes);
                }
                store(value_at, grad_value, active_lanes);
                store(key_at, grad_key, active_lanes);
                if (any(step.scale != 1.0f)) {
                    later[i].grad_term.scale(step.scale);
                    later[i].grad_weight.scale(step.scale);
                }
                if (after) add_row();
            }
    }
    if (args.grad_decay != nullptr)
        for (int i = 0; i < W; ++i)
            store(args.grad_decay + sample * args.channels + channel + i * LANES,
                  later[i].grad_decay.sum, active_lanes);
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

template <typename Number, bool DECAY>
void forward(const SimpleArgs& args) {
    for_all_channels(args, [&](int64_t sample, int64_t channel, int active_lanes, bool wide) {
        wide ? forward_channels<Number, DECAY, WIDE>(args, sample, channel, active_lanes)
             : forward_channels<Number, DECAY, 1>(args, sample, channel, active_lanes);
        if (DECAY && args.side == BOTH)
            wide ? add_tokens_after<WIDE>(args, sample, channel, active_lanes)
                 : add_tokens_after<1>(args, sample, channel, active_lanes);
    });
}

template <typename Number, bool DECAY>
void backward(const SimpleArgs& args) {
    for_all_channels(args, [&](int64_t sample, int64_t channel, int active_lanes, bool wide) {
        wide ? backward_channels<Number, DECAY, WIDE>(args, sample, channel, active_lanes)
             : backward_channels<Number, DECAY, 1>(args, sample, channel, active_lanes);
    });
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int aft_simple_forward(const SimpleArgs* args,
                                                                         int64_t bfloat) {
    if (args->decay != nullptr)
        bfloat ? forward<bfloat16, true>(*args) : forward<float, true>(*args);
    else
        bfloat ? forward<bfloat16, false>(*args) : forward<float, false>(*args);
    return DONE;
}

extern "C" __attribute__((visibility("default"))) int aft_simple_backward(const SimpleArgs* args,
                                                                          int64_t bfloat) {
    if (args->decay != nullptr)
        bfloat ? backward<bfloat16, true>(*args) : backward<float, true>(*args);
    else
        bfloat ? backward<bfloat16, false>(*args) : backward<float, false>(*args);
    return DONE;
}
