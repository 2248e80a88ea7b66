// AFT-conv as an operator of ONNX Runtime, for the graphs of `aft_mm export --loops`.
//
// A library of its own, which uses the threads of the runtime and depends on nothing. It declares
// the few parts of the runtime's C interface that it needs: version 17, ONNX Runtime 1.17 and later.

#include "conv_operator.h"

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

const Table* table;

#define CHECK(call) \
    if (Failure* failed = (call)) return failed

Failure* read(Input& input, const void* value) {
    void* info = nullptr;
    CHECK((table->call<const void*, void**>(GET_SHAPE, value, &info)));
    Failure* failed = table->call<void*, size_t*>(COUNT_DIMENSIONS, info, &input.count);
    if (!failed && input.count <= 3)
        failed = table->call<void*, int64_t*, size_t>(GET_DIMENSIONS, info, input.shape,
                                                      input.count);
    input.row = input.shape[2];
    reinterpret_cast<void (*)(void*)>(table->functions[RELEASE_SHAPE])(info);
    return failed;
}

void run_unit(void* work, size_t unit) { static_cast<OperatorWork<float>*>(work)->run(unit); }

Failure* compute(void*, void* context) {
    Input inputs[INPUTS];
    for (size_t index = 0; index < INPUTS; ++index) {
        void* value = nullptr;
        CHECK((table->call<void*, size_t, void**>(GET_INPUT, context, index, &value)));
        if (value == nullptr) continue;
        CHECK(read(inputs[index], value));
        CHECK((table->call<void*, void**>(GET_DATA, value, &inputs[index].data)));
    }
    ConvArgs args;
    if (!fill(args, inputs, static_cast<const int64_t*>(inputs[SIZES].data)))
        return table->error(INVALID_ARGUMENT, MISFIT);
    void* output = nullptr;
    CHECK((table->call<void*, size_t, const int64_t*, size_t, void**>(
        GET_OUTPUT, context, 0, inputs[VALUE].shape, 3, &output)));
    CHECK((table->call<void*, void**>(GET_DATA, output, &args.output.data)));
    OperatorWork<float> work(args);
    if (work.is_small()) {
        work.run_all();
    } else {
        CHECK((table->call<void*, void (*)(void*, size_t), size_t, size_t, void*>(
            PARALLEL_FOR, context, run_unit, work.units.count(), 0, &work)));
    }
    if (work.out_of_memory) return table->error(FAIL, NO_MEMORY);
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

}  // namespace

// Called by `SessionOptions.register_custom_ops_library`.
extern "C" __attribute__((visibility("default"))) void* RegisterCustomOps(
    void* options, const TableOfVersion* versions) {
    static const Operator op = make_operator();
    table = versions->get(VERSION);
    if (table == nullptr)
        return versions->get(1)->error(FAIL, "aft_mm needs ONNX Runtime 1.17 or later");
    if (missing_instructions()) return table->error(FAIL, OTHER_PROCESSOR);
    void* domain = nullptr;
    CHECK((table->call<const char*, void**>(CREATE_DOMAIN, "aft_mm", &domain)));
    CHECK((table->call<void*, const Operator*>(ADD_TO_DOMAIN, domain, &op)));
    return table->call<void*, void*>(ADD_DOMAIN, options, domain);
}
