// AFT-conv as an operator of OpenVINO, for the graphs of `aft_mm export OUT.xml --loops`.
//
// OpenVINO's C++ classes differ between its releases, so the export builds this library, with the
// headers of the release that is installed.

#include <tbb/parallel_for.h>

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

#include "conv_operator.h"

namespace aft_mm {

constexpr char OTHER_TYPE[] =
    "aft_mm.AFTConv must get tokens of float32 or bfloat16, a float32 kernel and int64 sizes";

Input read(const ov::Tensor& tensor) {
    const ov::Shape& shape = tensor.get_shape();
    Input input;
    input.data = const_cast<void*>(tensor.data()), input.count = shape.size();
    for (size_t dim = 0; dim < shape.size() && dim < 3; ++dim) input.shape[dim] = shape[dim];
    input.row = input.shape[2], input.number_bytes = tensor.get_element_type().size();
    return input;
}

// Its inputs are tokens [B, T, D + h + D], which are query, key and value, as one product makes them;
// kernel and sizes. The query may be missing. The attribute `channels` is D.
class AFTConv : public ov::op::Op {
public:
    OPENVINO_OP("AFTConv", "aft_mm");

    AFTConv() = default;

    AFTConv(const ov::OutputVector& inputs, int64_t channels) : Op(inputs), channels(channels) {
        constructor_validate_and_infer_types();
    }

    // Ranks are open where shapes are; evaluate() checks those of the tensors.
    void validate_and_infer_types() override {
        NODE_VALIDATION_CHECK(this, get_input_size() == 3, MISFIT);
        NODE_VALIDATION_CHECK(this, channels > 0 && channels <= LARGEST_SIZE, MISFIT);
        ov::PartialShape shape = get_input_partial_shape(0);
        NODE_VALIDATION_CHECK(this, shape.rank().compatible(3), MISFIT);
        if (shape.rank().is_dynamic()) shape = ov::PartialShape::dynamic(3);
        shape[2] = channels;
        ov::element::Type type = get_input_element_type(0);
        NODE_VALIDATION_CHECK(this, type.is_dynamic() || is_mixed(type), OTHER_TYPE);
        set_output_type(0, type, shape);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<AFTConv>(inputs, channels);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("channels", channels);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& tensors) const override {
        require(!missing_instructions(), OTHER_PROCESSOR, outputs[0]);
        ov::element::Type type = tensors[0].get_element_type(), of_sizes = tensors[2].get_element_type();
        // The plugin for CPUs makes int32 of int64.
        bool wide = of_sizes == ov::element::i64;
        require(is_mixed(type) && outputs[0].get_element_type() == type, OTHER_TYPE, outputs[0]);
        require(tensors[1].get_element_type() == ov::element::f32, OTHER_TYPE, outputs[0]);
        require(wide || of_sizes == ov::element::i32, OTHER_TYPE, outputs[0]);
        Input inputs[INPUTS], tokens = read(tensors[0]);
        inputs[KERNEL] = read(tensors[1]), inputs[SIZES] = read(tensors[2]);
        require(tokens.count == 3 && channels <= tokens.row, MISFIT, outputs[0]);
        int64_t heads = inputs[KERNEL].shape[1], key_at = tokens.row - channels - heads;
        require(key_at == 0 || key_at == channels, MISFIT, outputs[0]);
        if (key_at == channels) inputs[QUERY] = tokens.columns(0, channels);
        inputs[KEY] = tokens.columns(key_at, heads);
        inputs[VALUE] = tokens.columns(key_at + heads, channels);
        int64_t sizes[SIZE_COUNT];
        size_t count = std::min<size_t>(SIZE_COUNT, tensors[2].get_size());
        if (wide) std::copy_n(tensors[2].data<const int64_t>(), count, sizes);
        else std::copy_n(tensors[2].data<const int32_t>(), count, sizes);
        ConvArgs args;
        require(fill(args, inputs, sizes), MISFIT, outputs[0]);
        args.output.data = outputs[0].data();
        bool done = type == ov::element::bf16 ? mix<bfloat16>(args) : mix<float>(args);
        require(done, NO_MEMORY, outputs[0]);
        return true;
    }

private:
    static bool is_mixed(const ov::element::Type& type) {
        return type == ov::element::f32 || type == ov::element::bf16;
    }

    template <typename Number>
    static bool mix(const ConvArgs& args) {
        OperatorWork<Number> work(args);
        if (work.is_small()) work.run_all();
        else tbb::parallel_for(int64_t(0), work.units.count(), [&](int64_t unit) { work.run(unit); });
        return !work.out_of_memory;
    }

    // Throws if not `holds`. The output is NaN then, since OpenVINO 2026.4 ignores what is thrown where
    // it has one thread.
    static void require(bool holds, const char* message, ov::Tensor& output) {
        if (holds) return;
        memset(output.data(), 0xff, output.get_byte_size());  // NaN in every type of floats
        OPENVINO_THROW(message);
    }

    int64_t channels = 0;
};

}  // namespace aft_mm

OPENVINO_CREATE_EXTENSIONS(
    std::vector<ov::Extension::Ptr>{std::make_shared<ov::OpExtension<aft_mm::AFTConv>>()});
