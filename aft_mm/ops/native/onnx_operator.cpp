// AFT-conv as an operator of ONNX Runtime, for the graphs of `aft_mm export --loops`.
//
// A library of its own, which uses the threads of the runtime and depends on nothing. It declares
// the few parts of the runtime's C interface that it needs: version 17, ONNX Runtime 1.17 and later.

#include <atomic>
#include <cstdio>

#include "conv_forward.h"

namespace {

using Failure = void;  // an error of the runtime; nullptr means success

constexpr uint32_t VERSION = 17;
enum Element : int { FLOAT = 1, INT64 = 7 };
enum Presence : int { REQUIRED, OPTIONAL };
enum Code : int { FAIL = 1, INVALID_ARGUMENT = 2 };

// The places of functions in the table of the interface, which never change.
enum Place {
    CREATE_STATUS = 0,
    CREATE_DOMAIN = 26,
    ADD_TO_DOMAIN = 27,
    ADD_DOMAIN = 28,
    GET_DATA = 51,
    COUNT_DIMENSIONS = 61,
    GET_DIMENSIONS = 62,
    GET_SHAPE = 65,
    GET_INPUT = 90,
    GET_OUTPUT = 91,
    RELEASE_SHAPE = 99,
    INFER_GET_SHAPE = 268,
    INFER_SET_SHAPE = 270,
    PARALLEL_FOR = 274,
    PLACES
};

struct Table {
    void* functions[PLACES];

    template <typename... Args>
    Failure* call(Place place, Args... args) const {
        return reinterpret_cast<Failure* (*)(Args...)>(functions[place])(args...);
    }

    Failure* error(Code code, const char* message) const {
        return call<int, const char*>(CREATE_STATUS, code, message);
    }
};

struct TableOfVersion {
    const Table* (*get)(uint32_t version);
};

// The callbacks of an operator in the order of the interface.
struct Operator {
    uint32_t version;
    void* create_kernel_v1;
    const char* (*name)(const Operator*);
    const char* (*provider)(const Operator*);
    int (*input_type)(const Operator*, size_t index);
    size_t (*inputs)(const Operator*);
    int (*output_type)(const Operator*, size_t index);
    size_t (*outputs)(const Operator*);
    void* compute_v1;
    void (*destroy_kernel)(void* kernel);
    int (*input_presence)(const Operator*, size_t index);
    int (*output_presence)(const Operator*, size_t index);
    int (*input_memory)(const Operator*, size_t index);
    int (*variadic[4])(const Operator*);
    Failure* (*create_kernel)(const Operator*, const Table*, const void* info, void** kernel);
    Failure* (*compute)(void* kernel, void* context);
    Failure* (*infer_shape)(const Operator*, void* context);
    int (*first_version)(const Operator*);
    int (*last_version)(const Operator*);
};

// Inputs: query [B, T, D], key [B, T, h], value [B, T, D], kernel [entries, h], which is e^w - 1 or
// e^w, and six int64: rows, columns, those of the kernel, whether W is 1 outside, and the gate.
enum Input { QUERY, KEY, VALUE, KERNEL, SIZES, INPUTS };
enum Size { ROWS, COLUMNS, KERNEL_ROWS, KERNEL_COLUMNS, GLOBAL_TERM, GATE, SIZE_COUNT };

const Table* table;

#define CHECK(call) \
    if (Failure* failed = (call)) return failed

struct Shape {
    size_t count = 0;
    int64_t sizes[3] = {};

    Failure* read(const void* value) {
        void* info = nullptr;
        CHECK((table->call<const void*, void**>(GET_SHAPE, value, &info)));
        Failure* failed = table->call<void*, size_t*>(COUNT_DIMENSIONS, info, &count);
        if (!failed && count <= 3)
            failed = table->call<void*, int64_t*, size_t>(GET_DIMENSIONS, info, sizes, count);
        reinterpret_cast<void (*)(void*)>(table->functions[RELEASE_SHAPE])(info);
        return failed;
    }
};

Tensor dense(void* data, const Shape& shape) {
    return {data, shape.sizes[1] * shape.sizes[2], shape.sizes[2]};
}

struct Run {
    const ForwardUnits& units;
    std::atomic<bool> out_of_memory;
};

void run_unit(void* data, size_t unit) {
    Run& run = *static_cast<Run*>(data);
    static thread_local Scratch scratch;
    if (!scratch.reserve(1, run.units.elements)) run.out_of_memory = true;
    else run.units.run<float>(unit, scratch.part());
}

Failure* compute(void*, void* context) {
    void* data[INPUTS] = {};
    Shape shapes[INPUTS];
    for (size_t index = 0; index < INPUTS; ++index) {
        void* value = nullptr;
        CHECK((table->call<void*, size_t, void**>(GET_INPUT, context, index, &value)));
        if (value == nullptr) continue;
        CHECK(shapes[index].read(value));
        CHECK((table->call<void*, void**>(GET_DATA, value, &data[index])));
    }
    const Shape &query = shapes[QUERY], &key = shapes[KEY], &value = shapes[VALUE];
    const Shape& kernel = shapes[KERNEL];
    if (shapes[SIZES].sizes[0] != SIZE_COUNT)
        return table->error(INVALID_ARGUMENT, "sizes of aft_mm.AFTConv must be 6 numbers");
    const int64_t* sizes = static_cast<const int64_t*>(data[SIZES]);
    int64_t batch = value.sizes[0], tokens = value.sizes[1], channels = value.sizes[2];
    int64_t heads = key.sizes[2];
    bool has_query = sizes[GATE] != NONE;
    bool sizes_fit = sizes[ROWS] > 0 && sizes[COLUMNS] > 0 && sizes[KERNEL_ROWS] > 0 &&
                     sizes[KERNEL_COLUMNS] > 0 && sizes[KERNEL_ROWS] % 2 &&
                     sizes[KERNEL_COLUMNS] % 2 && sizes[GATE] >= NONE && sizes[GATE] <= RELU;
    bool fits = sizes_fit && value.count == 3 && key.count == 3 && kernel.count == 2 && heads > 0 &&
                channels % heads == 0 && key.sizes[0] == batch && key.sizes[1] == tokens &&
                sizes[ROWS] * sizes[COLUMNS] == tokens && kernel.sizes[1] == heads &&
                kernel.sizes[0] == sizes[KERNEL_ROWS] * sizes[KERNEL_COLUMNS] &&
                has_query == (data[QUERY] != nullptr);
    for (int dim = 0; dim < 3 && has_query; ++dim) fits &= query.sizes[dim] == value.sizes[dim];
    if (!fits)
        return table->error(INVALID_ARGUMENT,
                            "the inputs of aft_mm.AFTConv do not fit together; the graph was "
                            "exported for another image size");
    void *output = nullptr, *result = nullptr;
    CHECK((table->call<void*, size_t, const int64_t*, size_t, void**>(
        GET_OUTPUT, context, 0, value.sizes, 3, &output)));
    CHECK((table->call<void*, void**>(GET_DATA, output, &result)));
    ConvArgs args = {};
    args.batch = batch, args.tokens = tokens, args.channels = channels, args.heads = heads;
    args.rows = sizes[ROWS], args.columns = sizes[COLUMNS];
    args.kernel_rows = sizes[KERNEL_ROWS], args.kernel_columns = sizes[KERNEL_COLUMNS];
    args.global_term = sizes[GLOBAL_TERM], args.gate = sizes[GATE], args.threads = 1;
    if (has_query) args.query = dense(data[QUERY], query);
    args.key = dense(data[KEY], key), args.value = dense(data[VALUE], value);
    args.output = dense(result, value);
    args.kernel = static_cast<const float*>(data[KERNEL]);
    ForwardUnits units(args);
    Run run = {units, {false}};
    if (batch * tokens * channels < SMALLEST_PARALLEL) {
        for (int64_t unit = 0; unit < units.count(); ++unit) run_unit(&run, unit);
    } else {
        CHECK((table->call<void*, void (*)(void*, size_t), size_t, size_t, void*>(
            PARALLEL_FOR, context, run_unit, units.count(), 0, &run)));
    }
    if (run.out_of_memory) return table->error(FAIL, "aft_mm.AFTConv could not allocate memory");
    return nullptr;
}

Failure* infer_shape(const Operator*, void* context) {
    void* shape = nullptr;
    CHECK((table->call<void*, size_t, void**>(INFER_GET_SHAPE, context, VALUE, &shape)));
    return table->call<void*, size_t, void*>(INFER_SET_SHAPE, context, 0, shape);
}

Failure* create_kernel(const Operator*, const Table*, const void*, void** kernel) {
    *kernel = nullptr;
    return nullptr;
}

Operator make_operator() {
    Operator op = {};
    op.version = VERSION;
    op.name = [](const Operator*) { return "AFTConv"; };
    op.provider = [](const Operator*) -> const char* { return nullptr; };  // the CPU
    op.input_type = [](const Operator*, size_t index) -> int {
        return index == SIZES ? INT64 : FLOAT;
    };
    op.inputs = [](const Operator*) -> size_t { return INPUTS; };
    op.output_type = [](const Operator*, size_t) -> int { return FLOAT; };
    op.outputs = [](const Operator*) -> size_t { return 1; };
    op.destroy_kernel = [](void*) {};
    op.input_presence = [](const Operator*, size_t index) -> int {
        return index == QUERY ? OPTIONAL : REQUIRED;
    };
    op.output_presence = [](const Operator*, size_t) -> int { return REQUIRED; };
    op.input_memory = [](const Operator*, size_t) { return 0; };
    for (auto& callback : op.variadic) callback = [](const Operator*) { return 1; };
    op.create_kernel = create_kernel;
    op.compute = compute;
    op.infer_shape = infer_shape;
    op.first_version = [](const Operator*) { return 1; };
    op.last_version = [](const Operator*) { return 1; };
    return op;
}

const char* missing_instructions() {
#if defined(__AVX512F__)
    if (!__builtin_cpu_supports("avx512f")) return "AVX-512";
#elif defined(__AVX2__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "AVX2";
#endif
    return nullptr;
}

}  // namespace

// Called by `SessionOptions.register_custom_ops_library`.
extern "C" __attribute__((visibility("default"))) void* RegisterCustomOps(
    void* options, const TableOfVersion* versions) {
    static const Operator op = make_operator();
    table = versions->get(VERSION);
    if (table == nullptr)
        return versions->get(1)->error(FAIL, "aft_mm needs ONNX Runtime 1.17 or later");
    if (const char* missing = missing_instructions()) {
        char message[160];
        snprintf(message, sizeof message,
                 "this library of aft_mm needs %s, which this processor lacks; export again on it",
                 missing);
        return table->error(FAIL, message);
    }
    void* domain = nullptr;
    CHECK((table->call<const char*, void**>(CREATE_DOMAIN, "aft_mm", &domain)));
    CHECK((table->call<void*, const Operator*>(ADD_TO_DOMAIN, domain, &op)));
    return table->call<void*, void*>(ADD_DOMAIN, options, domain);
}
