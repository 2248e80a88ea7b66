// AFT-conv as an operator of exported graphs: its inputs and its work, for any runtime.

#pragma once

#include <atomic>
#include <type_traits>

#include "conv_forward.h"

namespace {

// query [B, T, D], key [B, T, h], value [B, T, D], kernel [entries, h], and six integers: rows,
// columns, those of the kernel, the form, and the gate.
enum InputIndex { QUERY, KEY, VALUE, KERNEL, SIZES, INPUTS };
enum Size { ROWS, COLUMNS, KERNEL_ROWS, KERNEL_COLUMNS, FORM, GATE, SIZE_COUNT };
constexpr int64_t LARGEST_SIZE = 1 << 24;  // so that no product of sizes overflows

constexpr char MISFIT[] =
    "the inputs of aft_mm.AFTConv do not fit together; the graph was exported for another image size";
constexpr char NO_MEMORY[] = "aft_mm.AFTConv could not allocate memory";
#if defined(__AVX512F__)
constexpr char OTHER_PROCESSOR[] =
    "this library of aft_mm needs AVX-512, which this processor lacks; export again on it";
#else
constexpr char OTHER_PROCESSOR[] =
    "this library of aft_mm needs AVX2, which this processor lacks; export again on it";
#endif

inline bool missing_instructions() {
#if defined(__AVX512F__)
    return !__builtin_cpu_supports("avx512f");
#elif defined(__AVX2__)
    return !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma");
#else
    return false;
#endif
}

struct Input {
    void* data = nullptr;  // nullptr: a missing query
    size_t count = 0;      // of dimensions; `shape` is that of up to three
    int64_t shape[3] = {};
    int64_t row = 0;  // numbers from a token to the next
    int64_t number_bytes = 4;

    Tensor strided() const { return {data, shape[1] * row, row}; }

    // Returns `channels` columns of [B, T, C] from `first` on.
    Input columns(int64_t first, int64_t channels) const {
        Input part = *this;
        part.data = static_cast<char*>(data) + first * number_bytes, part.shape[2] = channels;
        return part;
    }
};

// Fills the arguments, but for the data of the output; returns false if the inputs do not fit.
inline bool fill(ConvArgs& args, const Input (&inputs)[INPUTS], const int64_t* sizes) {
    const Input &query = inputs[QUERY], &key = inputs[KEY], &value = inputs[VALUE];
    const Input& kernel = inputs[KERNEL];
    if (value.count != 3 || key.count != 3 || kernel.count != 2) return false;
    if (inputs[SIZES].count != 1 || inputs[SIZES].shape[0] != SIZE_COUNT) return false;
    for (int index = ROWS; index <= KERNEL_COLUMNS; ++index)
        if (sizes[index] <= 0 || sizes[index] > LARGEST_SIZE) return false;
    if (sizes[GATE] < NONE || sizes[GATE] > RELU) return false;
    if (sizes[FORM] < INSIDE || sizes[FORM] > ADDITIVE) return false;
    args = {};
    args.batch = value.shape[0], args.tokens = value.shape[1], args.channels = value.shape[2];
    args.heads = key.shape[2];
    args.rows = sizes[ROWS], args.columns = sizes[COLUMNS];
    args.kernel_rows = sizes[KERNEL_ROWS], args.kernel_columns = sizes[KERNEL_COLUMNS];
    args.form = sizes[FORM], args.gate = sizes[GATE], args.threads = 1;
    args.key = key.strided(), args.value = value.strided();
    args.output = {nullptr, args.tokens * args.channels, args.channels};
    args.kernel = static_cast<const float*>(kernel.data);
    if (args.gate != NONE) {
        if (query.data == nullptr || query.count != 3) return false;
        for (int dim = 0; dim < 3; ++dim)
            if (query.shape[dim] != value.shape[dim]) return false;
        args.query = query.strided();
    }
    return args.heads > 0 && args.channels % args.heads == 0 && key.shape[0] == args.batch &&
           key.shape[1] == args.tokens && args.rows * args.columns == args.tokens &&
           args.kernel_rows % 2 && args.kernel_columns % 2 && kernel.shape[1] == args.heads &&
           kernel.shape[0] == args.kernel_rows * args.kernel_columns;
}

// The units of a call, which threads of the runtime run in any order.
template <typename Number>
struct OperatorWork {
    ForwardUnits units;
    std::atomic<bool> out_of_memory{false};

    explicit OperatorWork(const ConvArgs& args) : units(args, std::is_same_v<Number, bfloat16>) {}

    bool is_small() const {
        const ConvArgs& args = units.shape.args;
        return args.batch * args.tokens * args.channels < SMALLEST_PARALLEL;
    }

    void run(int64_t unit) {
        static thread_local Scratch scratch;
        if (!scratch.reserve(1, units.elements)) out_of_memory = true;
        else units.template run<Number>(unit, scratch.part());
    }

    void run_all() {
        for (int64_t unit = 0; unit < units.count(); ++unit) run(unit);
    }
};

}  // namespace
