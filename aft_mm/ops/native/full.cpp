// AFT-full with a w per sample, and its gradient: y_t = g(q_t) sum W e^k v / sum W e^k, W = e^w.
//
// A thread computes a head of a sample: the product of W [T, S] and (e^k v, e^k) [S, 2 C], with rows
// of W and columns of keys divided by their largest number. Panels of the terms stay in the cache,
// W is made for a chunk of rows. Where the two shifts may underflow, the call returns INEXACT.

#include <atomic>

#include "tensors.h"

namespace {

constexpr int PAIRS = LANES == 16 ? 2 : 1;  // vectors of numerators, next to as many denominators
constexpr int WIDE = 2 * PAIRS;             // vectors in a row of a panel
constexpr int PANEL = WIDE * LANES;
constexpr int ROWS = 6;              // rows of a product whose sums are in registers
constexpr int64_t CHUNK = 120;       // most rows of W in memory
constexpr float LARGEST_RANGE = 60;  // of keys or biases: FAST_BIAS_RANGE in online_softmax.py

struct FullArgs {
    int64_t batch, sources, channels, targets, heads, causal, gate, threads;
    Tensor query, key, value, mask, output;
    Tensor grad_query, grad_key, grad_value;  // then `output` is the output's gradient
    const float* bias;
    int64_t bias_batch, bias_head, bias_row;  // strides
    const uint8_t* pairs;                     // visible pairs, or missing
    int64_t pairs_batch, pairs_row;
    float* grad_bias;  // [batch, heads, targets, sources], or missing
    float* saved;      // mean and 1 / denominator [batch, targets, 2, channels], or missing

    bool rows_differ() const { return causal || pairs != nullptr; }

    float* saved_at(int64_t sample, int64_t target, int64_t channel) const {
        return saved + (sample * targets + target) * 2 * channels + channel;
    }
};

int64_t rounded_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

int active_lanes(int64_t first, int64_t end) {
    return end - first < LANES ? (end > first ? int(end - first) : 0) : LANES;
}

Integers lane_numbers() {
    Integers x;
    for (int lane = 0; lane < LANES; ++lane) x[lane] = lane;
    return x;
}

INLINE Integers load_bytes(const uint8_t* from, int active) {
    Integers x = {};
    for (int lane = 0; lane < active; ++lane) x[lane] = from[lane];
    return x;
}

// Adds left [ROWS, count] times right [count, N vectors].
template <int N>
INLINE void multiply(Vector (&sums)[ROWS][N], const float* left, int64_t row_stride, int64_t step,
                     const float* right, int64_t count) {
    for (int64_t i = 0; i < count; ++i, left += step, right += PANEL) {
        Vector columns[N];
        UNROLL for (int n = 0; n < N; ++n) columns[n] = load(right + n * LANES);
        UNROLL for (int row = 0; row < ROWS; ++row) {
            Vector x = all(left[row * row_stride]);
            UNROLL for (int n = 0; n < N; ++n) sums[row][n] += x * columns[n];
        }
    }
}

// Writes the transposed square of LANES rows.
INLINE void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    Vector rows[LANES];
    UNROLL for (int i = 0; i < LANES; ++i) rows[i] = load(from + i * from_stride);
    Integers lane = lane_numbers();
    UNROLL for (int half = LANES / 2; half > 0; half /= 2) {
        Integers second = (lane & half) != 0;
        Integers low = second ? lane - half + LANES : lane;
        Integers high = second ? lane + LANES : lane + half;
        UNROLL for (int i = 0; i < LANES; ++i) if (!(i & half)) {
            Vector a = rows[i], b = rows[i + half];
            rows[i] = pick(a, b, low), rows[i + half] = pick(a, b, high);
        }
    }
    UNROLL for (int i = 0; i < LANES; ++i) store(to + i * to_stride, rows[i]);
}

// One head of a sample, with its part of the scratch memory.
template <typename Number>
class Unit {
public:
    Unit(const FullArgs& args, float* memory, bool backward) : args(args), backward(backward) {
        channels = args.channels / args.heads;
        panels = rounded_up(channels, PAIRS * LANES) / (PAIRS * LANES);
        sources = rounded_up(args.sources, LANES);
        width = sources + LANES;  // the rows of a product may end behind the sources
        int64_t parts = (args.targets + CHUNK - 1) / CHUNK;
        chunk = rounded_up((args.targets + parts - 1) / parts, ROWS);
        terms = memory;
        weights = terms + panels * width * PANEL;
        hidden = weights + chunk * width;
        largest = hidden + width;
        smallest = largest + panels * PAIRS * LANES;
        grads = smallest + panels * PAIRS * LANES;
        sums = grads + panels * chunk * PANEL;
        turned = sums + panels * width * PANEL;
    }

    int64_t elements() const {
        int64_t forward = panels * PANEL * (width + 1) + (chunk + 1) * width;
        int64_t turned_width = rounded_up(args.sources, PANEL);
        return forward + backward * panels * PANEL * (chunk + width + turned_width);
    }

    // Returns whether the shifts were exact.
    bool forward(int64_t unit) {
        begin(unit);
        for (int64_t first = 0; first < args.targets; first += chunk) {
            if (!keys_in_range && args.rows_differ()) return false;
            fill_weights(first);
            for (int64_t panel = 0; panel < panels; ++panel)
                for (int64_t row = 0; row < end(first) - first; row += ROWS) {
                    Vector result[ROWS][WIDE] = {};
                    multiply<WIDE>(result, weights + row * width, width, 1,
                                   terms + panel * width * PANEL, args.sources);
                    for (int i = 0; i < ROWS && first + row + i < args.targets; ++i)
                        UNROLL for (int n = 0; n < PAIRS; ++n)
                            store_mean(first + row + i, (panel * PAIRS + n) * LANES, result[i][n],
                                       result[i][PAIRS + n]);
                }
        }
        return keys_in_range || biases_in_range;
    }

    void differentiate(int64_t unit) {
        begin(unit);
        if (args.grad_bias != nullptr)
            for (int64_t row = 0; row < sources; row += LANES)
                for (int64_t panel = 0; panel < panels; ++panel)
                    for (int64_t column = 0; column < PANEL; column += LANES)
                        transpose(terms + (panel * width + row) * PANEL + column, PANEL,
                                  turned + row / PANEL * panels * PANEL * PANEL +
                                      (panel * PANEL + column) * PANEL + row % PANEL,
                                  PANEL);
        memset(sums, 0, panels * width * PANEL * sizeof(float));
        for (int64_t first = 0; first < args.targets; first += chunk) {
            fill_weights(first);
            fill_grads(first);
            if (args.grad_bias != nullptr)
                for (int64_t source = 0; source < sources; source += PANEL)
                    differentiate_bias<WIDE>(first, source);
            for (int64_t panel = 0; panel < panels; ++panel)
                for (int64_t row = 0; row < args.sources; row += ROWS) {
                    float* to = sums + (panel * width + row) * PANEL;
                    Vector result[ROWS][WIDE];
                    UNROLL for (int i = 0; i < ROWS; ++i)
                        UNROLL for (int n = 0; n < WIDE; ++n)
                            result[i][n] = load(to + i * PANEL + n * LANES);
                    multiply<WIDE>(result, weights + row, 1, width, grads + panel * chunk * PANEL,
                                   end(first) - first);
                    UNROLL for (int i = 0; i < ROWS; ++i)
                        UNROLL for (int n = 0; n < WIDE; ++n)
                            store(to + i * PANEL + n * LANES, result[i][n]);
                }
        }
        for (int64_t source = 0; source < args.sources; ++source)
            for_all_vectors([&](int64_t channel, int active, int64_t at, int64_t lane) {
                at += source * PANEL;
                Vector grad_term = load(sums + at), grad_weight = load(sums + at + PAIRS * LANES);
                Vector term = load(terms + at), weight = load(terms + at + PAIRS * LANES);
                Vector grad_key = term * grad_term + weight * grad_weight;
                Vector grad_value = weight * grad_term;
                if (hidden[source] != 0) grad_key = grad_value = Vector{};
                store(args.grad_key.at<Number>(sample, source, channel), grad_key, active);
                store(args.grad_value.at<Number>(sample, source, channel), grad_value, active);
            });
    }

private:
    int64_t end(int64_t first) const {
        return first + chunk < args.targets ? first + chunk : args.targets;
    }

    // Calls body(channel, active lanes, place of the numerator in the panels, lane of the head).
    template <typename Body>
    INLINE void for_all_vectors(const Body& body) const {
        for (int64_t vector = 0; vector < panels * PAIRS; ++vector)
            body(head * channels + vector * LANES, active_lanes(vector * LANES, channels),
                 vector / PAIRS * width * PANEL + vector % PAIRS * LANES, vector * LANES);
    }

    void begin(int64_t unit) {
        sample = unit / args.heads, head = unit % args.heads;
        biases_in_range = true;
        for (int64_t source = 0; source < width; ++source) {
            bool visible = source < args.sources && (args.mask.data == nullptr ||
                                                     *args.mask.at<uint8_t>(sample, source, 0));
            hidden[source] = visible ? 0 : -__builtin_inff();
        }
        Vector broken = {};
        int64_t vectors = panels * PAIRS;
        for (int64_t vector = 0; vector < vectors; ++vector) {
            store(largest + vector * LANES, all(-__builtin_inff()));
            store(smallest + vector * LANES, all(__builtin_inff()));
        }
        for (int64_t source = 0; source < args.sources; ++source) {
            if (hidden[source] != 0) continue;
            for_all_vectors([&](int64_t channel, int active, int64_t at, int64_t lane) {
                Vector key = load(args.key.at<Number>(sample, source, channel), active);
                Vector high = load(largest + lane), low = load(smallest + lane);
                store(largest + lane, larger(key, high));
                store(smallest + lane, key < low ? key : low);
                // 0 times a NaN that a row does not see is NaN.
                if (args.rows_differ())
                    broken += 0 * key +
                              0 * load(args.value.at<Number>(sample, source, channel), active);
            });
        }
        keys_in_range = !any(broken != 0);
        for (int64_t lane = 0; lane < vectors * LANES; lane += LANES) {
            Vector high = load(largest + lane);
            keys_in_range &= !any(high - load(smallest + lane) > LARGEST_RANGE);
            store(largest + lane, larger(high, all(LOWEST)));
        }
        for (int64_t source = 0; source < width; ++source)
            for_all_vectors([&](int64_t channel, int active, int64_t at, int64_t lane) {
                Vector weight = {}, term = {};
                if (hidden[source] == 0 && active > 0) {
                    Vector key = load(args.key.at<Number>(sample, source, channel), active);
                    weight = exponential(key - load(largest + lane));
                    term = weight * load(args.value.at<Number>(sample, source, channel), active);
                }
                float* to = terms + at + source * PANEL;
                store(to, term), store(to + PAIRS * LANES, weight);
            });
    }

    // Makes the rows of W from `first` on, 0 for hidden pairs.
    void fill_weights(int64_t first) {
        Integers lane = lane_numbers();
        Vector infinity = all(__builtin_inff());
        memset(weights + (end(first) - first) * width, 0,
               (chunk - end(first) + first) * width * sizeof(float));
        for (int64_t target = first; target < end(first); ++target) {
            const float* from = args.bias + sample * args.bias_batch + head * args.bias_head +
                                target * args.bias_row;
            const uint8_t* pairs = args.pairs + sample * args.pairs_batch + target * args.pairs_row;
            float* to = weights + (target - first) * width;
            Vector largest = -infinity, smallest = infinity;
            for (int64_t source = 0; source < sources; source += LANES) {
                int active = active_lanes(source, args.sources);
                Integers visible = load(hidden + source) == 0;
                Vector bias = load(from + source, active);
                smallest = visible & (bias < smallest) ? bias : smallest;
                if (args.causal) visible &= lane <= int32_t(target - source);
                if (args.pairs != nullptr) visible &= load_bytes(pairs + source, active) != 0;
                bias = visible ? bias : -infinity;
                largest = larger(bias, largest);
                store(to + source, bias);
            }
            UNROLL for (int half = LANES / 2; half > 0; half /= 2) {
                Vector high = pick(largest, lane ^ half), low = pick(smallest, lane ^ half);
                largest = larger(high, largest), smallest = low < smallest ? low : smallest;
            }
            largest = larger(largest, all(LOWEST));
            biases_in_range &= !args.rows_differ() && largest[0] - smallest[0] <= LARGEST_RANGE;
            for (int64_t source = 0; source < sources; source += LANES)
                store(to + source, exponential(load(to + source) - largest));
            store(to + sources, Vector{});
        }
    }

    INLINE void store_mean(int64_t target, int64_t channel, Vector numerator, Vector denominator) {
        int active = active_lanes(channel, channels);
        if (active == 0) return;
        channel += head * channels;
        Vector reciprocal = denominator < TINY ? Vector{} : 1.0f / denominator;
        if (args.saved != nullptr) {
            float* saved = args.saved_at(sample, target, channel);
            store(saved, numerator * reciprocal, active);
            store(saved + args.channels, reciprocal, active);
        }
        Vector query = {};
        if (args.gate != NONE)
            query = load(args.query.at<Number>(sample, target, channel), active);
        Vector gated = gated_mean<Number>(query, numerator * reciprocal, all(1), args.gate);
        store(args.output.at<Number>(sample, target, channel), gated, active);
    }

    // Makes the gradients of numerators and denominators, and stores those of queries.
    void fill_grads(int64_t first) {
        for (int64_t target = first; target < first + chunk; ++target)
            for (int64_t vector = 0; vector < panels * PAIRS; ++vector) {
                int64_t channel = head * channels + vector * LANES;
                int active = active_lanes(vector * LANES, channels);
                Vector grad_term = {}, mean = {};
                if (active > 0 && target < args.targets) {
                    Vector grad = load(args.output.at<Number>(sample, target, channel), active);
                    Vector query = {}, slope;
                    if (args.gate != NONE)
                        query = load(args.query.at<Number>(sample, target, channel), active);
                    Vector gate = gate_with_slope(query, args.gate, slope);
                    const float* saved = args.saved_at(sample, target, channel);
                    mean = load(saved, active);
                    grad_term = grad * gate * load(saved + args.channels, active);
                    if (args.grad_query.data != nullptr)
                        store(args.grad_query.at<Number>(sample, target, channel),
                              grad * mean * slope, active);
                }
                float* to = grads + (vector / PAIRS * chunk + target - first) * PANEL +
                            vector % PAIRS * LANES;
                store(to, grad_term), store(to + PAIRS * LANES, -grad_term * mean);
            }
    }

    // Stores the gradient of w of up to N vectors of sources.
    template <int N>
    void differentiate_bias(int64_t first, int64_t source) {
        if constexpr (N > 1)
            if (source + (N - 1) * LANES >= sources)
                return differentiate_bias<N - 1>(first, source);
        const float* columns = turned + source / PANEL * panels * PANEL * PANEL;
        for (int64_t row = 0; row < end(first) - first; row += ROWS) {
            Vector result[ROWS][N] = {};
            for (int64_t panel = 0; panel < panels; ++panel)
                multiply<N>(result, grads + (panel * chunk + row) * PANEL, PANEL, 1,
                            columns + panel * PANEL * PANEL, PANEL);
            for (int i = 0; i < ROWS && first + row + i < args.targets; ++i) {
                float* to = args.grad_bias + source +
                            ((sample * args.heads + head) * args.targets + first + row + i) *
                                args.sources;
                const float* weight = weights + (row + i) * width + source;
                UNROLL for (int n = 0; n < N; ++n)
                    store(to + n * LANES, result[i][n] * load(weight + n * LANES),
                          active_lanes(source + n * LANES, args.sources));
            }
        }
    }

    const FullArgs& args;
    bool backward, keys_in_range, biases_in_range;
    int64_t channels, panels, sources, width, chunk;  // sizes of a head, padded
    int64_t sample, head;
    float* terms;    // e^k v and e^k [panels, width, PANEL]
    float* weights;  // W [chunk, width]
    float* hidden;   // 0, or -inf for a hidden key [width]
    float* largest;  // and smallest key of each channel of the head
    float* smallest;
    float* grads;    // of numerators and denominators [panels, chunk, PANEL]
    float* sums;     // their products with W [panels, width, PANEL]
    float* turned;   // `terms`, transposed: [sources / PANEL, panels * PANEL, PANEL]
};

template <typename Number>
int run(const FullArgs& args, bool backward) {
    int64_t units = args.batch * args.heads;
    bool parallel = units * args.targets * args.sources >= SMALLEST_PARALLEL;
    static thread_local Scratch own;  // inside the region the name is the memory of another thread
    Scratch& scratch = own;
    int64_t elements = Unit<Number>(args, nullptr, backward).elements();
    if (!scratch.reserve(parallel ? args.threads : 1, elements)) return OUT_OF_MEMORY;
    std::atomic<bool> exact{true};
#pragma omp parallel num_threads(args.threads) if (parallel)
    {
        Unit<Number> worker(args, scratch.part(), backward);
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < units; ++unit) {
            if (!exact) continue;
            if (backward)
                worker.differentiate(unit);
            else if (!worker.forward(unit))
                exact = false;
        }
    }
    return exact ? DONE : INEXACT;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int aft_full_batched_forward(const FullArgs* args,
                                                                               int64_t bfloat) {
    return bfloat ? run<bfloat16>(*args, false) : run<float>(*args, false);
}

extern "C" __attribute__((visibility("default"))) int aft_full_batched_backward(
    const FullArgs* args, int64_t bfloat) {
    return bfloat ? run<bfloat16>(*args, true) : run<float>(*args, true);
}
