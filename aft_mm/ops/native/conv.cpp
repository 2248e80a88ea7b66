// AFT-conv and its gradient: difference form, y = g(q) (conv(e^k v, e^w - 1) + sum e^k v) / (the
// same of 1), W = 1 outside of the kernel.
//
// A thread takes the channels of a vector through a whole sample: keys, terms and sums stay in its
// cache, and memory sees every tensor once. A head is spread over its channels, so that one loop
// serves any number of heads. The backward pass makes the terms anew instead of keeping them.

#include "tokens.h"

namespace {

struct Call {
    int64_t batch, tokens, channels, heads;
    int64_t rows, columns, kernel_rows, kernel_columns;
    int64_t gate, threads, samples;  // samples: those whose weight gradients are summed together
    Tensor query, key, value, mask, output;  // mask: bytes, and no channels
    // Of the backward pass, whose `output` is the gradient of the output. That of the key is float32
    // and has a number for every channel; that of the query may be missing.
    Tensor query_gradient, key_gradient, value_gradient;
    const float* weight;  // e^w - 1 [entries, channels]
    float* weight_gradient;  // of e^w - 1, [batch / samples, entries, channels], or missing
};

constexpr int ENTRIES = 4;  // of a kernel's row that are multiplied at once

// A map [rows, columns] of vectors with empty columns on both sides, as wide as a kernel looks.
struct Map {
    float* numbers;
    int64_t width;

    float* at(int64_t row, int64_t column) const { return numbers + (row * width + column) * LANES; }
};

struct Plan {
    const Call& call;
    int64_t width, beside, above, size, entries;

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

    int lanes(int64_t channel) const {
        return call.channels - channel < LANES ? call.channels - channel : LANES;
    }

    bool hidden(int64_t sample, int64_t token) const {
        return call.mask.data != nullptr && !*call.mask.at<uint8_t>(sample, token, 0);
    }

    // Rows of the kernel that meet the map, seen from a row of it.
    int64_t first_row(int64_t row) const { return row < above ? above - row : 0; }

    int64_t last_row(int64_t row) const {
        int64_t last = call.rows - row + above;
        return last < call.kernel_rows ? last : call.kernel_rows;
    }
};

// The kernel of a block of channels, [entries] vectors; `turned` for the gradient.
void take_kernel(float* kernel, const Plan& plan, int64_t channel, int lanes, bool turned) {
    for (int64_t entry = 0; entry < plan.entries; ++entry) {
        int64_t from = turned ? plan.entries - 1 - entry : entry;
        const float* weight = plan.call.weight + from * plan.call.channels + channel;
        store(kernel + entry * LANES, load(weight, lanes));
    }
}

// sums += kernel * (two maps), X columns next to each other, G entries of a row of the kernel.
template <int X, int G>
INLINE void multiply(Vector (&first)[X], Vector (&second)[X], const float* a, const float* b,
                     const float* kernel) {
    Vector weights[G];
    UNROLL for (int entry = 0; entry < G; ++entry) weights[entry] = load(kernel + entry * LANES);
    UNROLL for (int column = 0; column < X + G - 1; ++column) {
        Vector x = load(a + column * LANES), y = load(b + column * LANES);
        UNROLL for (int entry = 0; entry < G; ++entry) {
            int sum = column - entry;
            if (sum < 0 || sum >= X) continue;
            first[sum] += weights[entry] * x;
            second[sum] += weights[entry] * y;
        }
    }
}

template <int X>
INLINE void correlate(Vector (&first)[X], Vector (&second)[X], const Map& a, const Map& b,
                      const float* kernel, int64_t row, int64_t column, const Plan& plan) {
    int64_t columns = plan.call.kernel_columns;
    for (int64_t line = plan.first_row(row); line < plan.last_row(row); ++line) {
        const float* entries = kernel + line * columns * LANES;
        const float* x = a.at(row + line - plan.above, column);
        const float* y = b.at(row + line - plan.above, column);
        int64_t entry = 0;
        for (; entry + ENTRIES <= columns; entry += ENTRIES)
            multiply<X, ENTRIES>(first, second, x + entry * LANES, y + entry * LANES,
                                 entries + entry * LANES);
        x += entry * LANES, y += entry * LANES, entries += entry * LANES;
        if (columns - entry == 3) multiply<X, 3>(first, second, x, y, entries);
        else if (columns - entry == 2) multiply<X, 2>(first, second, x, y, entries);
        else if (columns - entry == 1) multiply<X, 1>(first, second, x, y, entries);
    }
}

// use(row, column, first, second) with the convolutions of two maps at every place, plus constants.
template <int X, typename Use>
void correlate_columns(const Map& a, const Map& b, Vector a_total, Vector b_total,
                       const float* kernel, int64_t row, int64_t column, const Plan& plan,
                       const Use& use) {
    Vector first[X], second[X];
    UNROLL for (int i = 0; i < X; ++i) first[i] = a_total, second[i] = b_total;
    correlate<X>(first, second, a, b, kernel, row, column, plan);
    UNROLL for (int i = 0; i < X; ++i) use(row, column + i, first[i], second[i]);
}

template <int X, typename Use>
void correlate_some(int64_t some, const Map& a, const Map& b, Vector a_total, Vector b_total,
                    const float* kernel, int64_t row, int64_t column, const Plan& plan,
                    const Use& use) {
    if (some == X) {
        correlate_columns<X>(a, b, a_total, b_total, kernel, row, column, plan, use);
    } else if constexpr (X > 1) {
        correlate_some<X - 1>(some, a, b, a_total, b_total, kernel, row, column, plan, use);
    }
}

template <typename Use>
void correlate_map(const Map& a, const Map& b, Vector a_total, Vector b_total, const float* kernel,
                   const Plan& plan, const Use& use) {
    int64_t columns = plan.call.columns, pieces = (columns + COLUMNS - 1) / COLUMNS;
    for (int64_t row = 0; row < plan.call.rows; ++row)
        for (int64_t piece = 0; piece < pieces; ++piece) {
            int64_t from = piece * columns / pieces, to = (piece + 1) * columns / pieces;
            correlate_some<COLUMNS>(to - from, a, b, a_total, b_total, kernel, row, from, plan, use);
        }
}

// The terms e^k v and e^k of a block of channels of a sample, and their sums over all tokens.
template <typename Number>
void make_terms(const Plan& plan, const Heads& heads, int64_t sample, int64_t channel, int lanes, const Map& terms,
                const Map& weights, Vector& term_total, Vector& weight_total) {
    const Call& call = plan.call;
    Vector shift = all(LOWEST);
    for (int64_t row = 0, token = 0; row < call.rows; ++row)
        for (int64_t column = 0; column < call.columns; ++column, ++token) {
            Vector key = plan.hidden(sample, token)
                             ? all(-__builtin_inff())
                             : heads.spread(call.key.at<Number>(sample, token, 0));
            shift = larger(key, shift);
            __builtin_prefetch(call.value.at<Number>(sample, token, channel));
            if (call.gate != NONE) __builtin_prefetch(call.query.at<Number>(sample, token, channel));
            store(weights.at(row, plan.beside + column), key);
        }
    term_total = weight_total = Vector{};
    for (int64_t row = 0, token = 0; row < call.rows; ++row)
        for (int64_t column = 0; column < call.columns; ++column, ++token) {
            float* at = weights.at(row, plan.beside + column);
            Vector weight = exponential(load(at) - shift), term = Vector{};
            if (!plan.hidden(sample, token))
                term = weight * load(call.value.at<Number>(sample, token, channel), lanes);
            store(at, weight);
            store(terms.at(row, plan.beside + column), term);
            term_total += term;
            weight_total += weight;
        }
}

template <typename Number>
void forward(const Call& call) {
    Plan plan(call);
#pragma omp parallel num_threads(call.threads)
    {
        static thread_local Scratch scratch;
        float* kernel = scratch.of(2 * plan.size + plan.entries * LANES);
        Map terms = plan.map(kernel + plan.entries * LANES);
        Map weights = plan.map(terms.numbers + plan.size);
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < plan.blocks() * call.batch; ++unit) {
            int64_t sample = unit / plan.blocks(), channel = unit % plan.blocks() * LANES;
            int lanes = plan.lanes(channel);
            Heads heads(channel, call.channels, call.heads);
            take_kernel(kernel, plan, channel, lanes, false);
            Vector term_total, weight_total;
            make_terms<Number>(plan, heads, sample, channel, lanes, terms, weights, term_total, weight_total);
            correlate_map(terms, weights, term_total, weight_total, kernel, plan,
                          [&](int64_t row, int64_t column, Vector numerator, Vector denominator) {
                int64_t token = row * call.columns + column;
                Vector query = Vector{};
                if (call.gate != NONE)
                    query = load(call.query.at<Number>(sample, token, channel), lanes);
                denominator = larger(denominator, all(TINY));
                store(call.output.at<Number>(sample, token, channel),
                      gated_mean(query, numerator, denominator, call.gate), lanes);
            });
        }
    }
}

// weights[entry] += gradients * terms of both maps, X columns next to each other, G entries.
template <int X, int G>
INLINE void weigh(Vector (&sums)[G], const float* a, const float* by_a, const float* b,
                  const float* by_b) {
    Vector first[X], second[X];
    UNROLL for (int i = 0; i < X; ++i)
        first[i] = load(by_a + i * LANES), second[i] = load(by_b + i * LANES);
    UNROLL for (int column = 0; column < X + G - 1; ++column) {
        Vector x = load(a + column * LANES), y = load(b + column * LANES);
        UNROLL for (int i = 0; i < X; ++i) {
            int entry = column - i;
            if (entry < 0 || entry >= G) continue;
            sums[entry] += first[i] * x + second[i] * y;
        }
    }
}

// The gradients of G entries of a row of the kernel, added to `gradient`.
template <int G>
void weigh_entries(float* gradient, int64_t line, int64_t entry, const Map& a, const Map& by_a,
                   const Map& b, const Map& by_b, const Plan& plan) {
    constexpr int X = 4;
    int64_t down = line - plan.above, rows = plan.call.rows, columns = plan.call.columns;
    Vector sums[G] = {};
    for (int64_t row = down < 0 ? -down : 0; row < rows && row + down < rows; ++row) {
        const float *x = a.at(row + down, entry), *y = b.at(row + down, entry);
        const float *by_x = by_a.at(row, plan.beside), *by_y = by_b.at(row, plan.beside);
        int64_t column = 0;
        for (; column + X <= columns; column += X)
            weigh<X, G>(sums, x + column * LANES, by_x + column * LANES, y + column * LANES,
                        by_y + column * LANES);
        for (; column < columns; ++column)
            weigh<1, G>(sums, x + column * LANES, by_x + column * LANES, y + column * LANES,
                        by_y + column * LANES);
    }
    float* to = gradient + (line * plan.call.kernel_columns + entry) * LANES;
    UNROLL for (int i = 0; i < G; ++i) store(to + i * LANES, load(to + i * LANES) + sums[i]);
}

void weigh_kernel(float* gradient, const Map& a, const Map& by_a, const Map& b, const Map& by_b,
                  const Plan& plan) {
    int64_t columns = plan.call.kernel_columns;
    for (int64_t line = 0; line < plan.call.kernel_rows; ++line) {
        int64_t entry = 0;
        for (; entry + ENTRIES <= columns; entry += ENTRIES)
            weigh_entries<ENTRIES>(gradient, line, entry, a, by_a, b, by_b, plan);
        if (columns - entry == 3) weigh_entries<3>(gradient, line, entry, a, by_a, b, by_b, plan);
        else if (columns - entry == 2) weigh_entries<2>(gradient, line, entry, a, by_a, b, by_b, plan);
        else if (columns - entry == 1) weigh_entries<1>(gradient, line, entry, a, by_a, b, by_b, plan);
    }
}

// Where the gradients of a thread lie.
struct Work {
    float *kernel, *turned, *gradient;
    Map terms, weights, by_terms, by_weights;

    Work(Scratch& scratch, const Plan& plan) {
        kernel = scratch.of(4 * plan.size + 3 * plan.entries * LANES);
        turned = kernel + plan.entries * LANES;
        gradient = turned + plan.entries * LANES;
        terms = plan.map(gradient + plan.entries * LANES);
        weights = plan.map(terms.numbers + plan.size);
        by_terms = plan.map(weights.numbers + plan.size);
        by_weights = plan.map(by_terms.numbers + plan.size);
    }
};

template <typename Number>
void differentiate(const Plan& plan, const Heads& heads, int64_t sample, int64_t channel, int lanes,
                   const Work& work) {
    const Call& call = plan.call;
    Vector term_total, weight_total, by_term_total = Vector{}, by_weight_total = Vector{};
    make_terms<Number>(plan, heads, sample, channel, lanes, work.terms, work.weights, term_total,
                       weight_total);
    correlate_map(work.terms, work.weights, term_total, weight_total, work.kernel, plan,
                  [&](int64_t row, int64_t column, Vector numerator, Vector denominator) {
        int64_t token = row * call.columns + column;
        Vector by_output = load(call.output.at<Number>(sample, token, channel), lanes);
        Vector query = Vector{}, slope;
        if (call.gate != NONE) query = load(call.query.at<Number>(sample, token, channel), lanes);
        Vector gating = gate_with_slope(query, call.gate, slope);
        Vector share = denominator < TINY ? Vector{} : 1.0f / denominator;
        Vector mean = numerator * share;
        if (call.query_gradient.data != nullptr)
            store(call.query_gradient.at<Number>(sample, token, channel), by_output * mean * slope,
                  lanes);
        Vector by_term = by_output * gating * share, by_weight = -by_term * mean;
        store(work.by_terms.at(row, plan.beside + column), by_term);
        store(work.by_weights.at(row, plan.beside + column), by_weight);
        by_term_total += by_term;
        by_weight_total += by_weight;
    });
    correlate_map(work.by_terms, work.by_weights, by_term_total, by_weight_total, work.turned, plan,
                  [&](int64_t row, int64_t column, Vector by_term, Vector by_weight) {
        int64_t token = row * call.columns + column;
        Vector weight = load(work.weights.at(row, plan.beside + column));
        Vector term = load(work.terms.at(row, plan.beside + column));
        store(call.value_gradient.at<Number>(sample, token, channel), weight * by_term, lanes);
        store(call.key_gradient.at<float>(sample, token, channel),
              term * by_term + weight * by_weight, lanes);
    });
}

template <typename Number>
void backward(const Call& call) {
    Plan plan(call);
    int64_t parts = (call.batch + call.samples - 1) / call.samples;
#pragma omp parallel num_threads(call.threads)
    {
        static thread_local Scratch scratch;
        Work work(scratch, plan);
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < plan.blocks() * parts; ++unit) {
            int64_t part = unit / plan.blocks(), channel = unit % plan.blocks() * LANES;
            int64_t end = (part + 1) * call.samples < call.batch ? (part + 1) * call.samples : call.batch;
            int lanes = plan.lanes(channel);
            Heads heads(channel, call.channels, call.heads);
            take_kernel(work.kernel, plan, channel, lanes, false);
            take_kernel(work.turned, plan, channel, lanes, true);
            memset(work.gradient, 0, plan.entries * LANES * 4);
            for (int64_t sample = part * call.samples; sample < end; ++sample) {
                differentiate<Number>(plan, heads, sample, channel, lanes, work);
                if (call.weight_gradient != nullptr)
                    weigh_kernel(work.gradient, work.terms, work.by_terms, work.weights,
                                 work.by_weights, plan);
            }
            if (call.weight_gradient == nullptr) continue;
            float* to = call.weight_gradient + part * plan.entries * call.channels + channel;
            for (int64_t entry = 0; entry < plan.entries; ++entry)
                store(to + entry * call.channels, load(work.gradient + entry * LANES), lanes);
        }
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void aft_conv_forward(const Call* call, int64_t bfloat) {
    bfloat ? forward<bfloat16>(*call) : forward<float>(*call);
}

extern "C" __attribute__((visibility("default"))) void aft_conv_backward(const Call* call, int64_t bfloat) {
    bfloat ? backward<bfloat16>(*call) : backward<float>(*call);
}
