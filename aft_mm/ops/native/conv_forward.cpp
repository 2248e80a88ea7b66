// AFT-conv: its forward pass.

#include <type_traits>

#include "conv_forward.h"

namespace {

template <typename Number>
Status forward(const ConvArgs& args) {
    ForwardUnits units(args, std::is_same_v<Number, bfloat16>);
    bool parallel = args.batch * args.tokens * args.channels >= SMALLEST_PARALLEL;
    static thread_local Scratch own;  // inside the region the name is the memory of another thread
    Scratch& scratch = own;
    if (!scratch.reserve(parallel ? args.threads : 1, units.elements)) return OUT_OF_MEMORY;
#pragma omp parallel for num_threads(args.threads) schedule(static) if (parallel)
    for (int64_t unit = 0; unit < units.count(); ++unit) units.run<Number>(unit, scratch.part());
    return DONE;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int aft_conv_forward(const ConvArgs* args,
                                                                       int64_t bfloat) {
    return bfloat ? forward<bfloat16>(*args) : forward<float>(*args);
}
