// The steps of plans: one struct for each kernel call, with static sizes and the numbers of its operands. Activations are
// batch-last or in panels, as their sizes say. The kernels are those of layers.h, rows.h, channels.h and images.h.
#pragma once

#include <optional>

#include "channels.h"
#include "engine.h"
#include "group_norm.h"
#include "images.h"
#include "layers.h"
#include "pointwise.h"

namespace rewire::engine {

// A batch norm with the moments it uses: of its input if training, else running ones. Without weight and bias: 1 and 0.
struct NormOperands {
    Id weight = kAbsent, bias = kAbsent, mean = kAbsent, variance = kAbsent;
    bool training = false, relu = false;  // relu: a ReLU follows
    double eps = 1e-5;
};

// Where the gradients of a batch norm's parameters go. With factors the gradient of its input is deferred: it is
// g * factors[0] + input * factors[1] + factors[2] channel by channel, where g is what the step writes.
struct NormGradientOperands {
    Id weight = kAbsent, bias = kAbsent, factors = kAbsent;
};

// What is left to do to a gradient that was deferred: see NormGradientOperands. y is the batch norm's input.
struct DeferredGradient {
    Id y = kAbsent, factors = kAbsent;
};

// A batch norm before a layer: the layer reads its output, computed from x. Or, with an input, the layer reads x, the sum
// of its output and a residual, and this is the batch norm's input. `more` is another gradient of what the layer reads.
struct InputNorm {
    NormOperands norm;
    Id input = kAbsent, more = kAbsent;
};

// How the channels of a tensor lie in memory: each has `length` elements, in `panel_rows` runs (1: batch-last).
struct Channels {
    int64_t channels = 0, length = 0, panel_rows = 1;
};

#define REWIRE_STEP(S)                       \
    static constexpr const char* kName = #S; \
    void needs(Needs&) const override;       \
    template <class T>                       \
    void execute(const Run<T>&) const;

// ---- Sparse layers: steps_layers.cpp

// y = convolution of x, or of its batch norm, plus bias; its ReLU if asked; mean and variance of y by channel.
struct ConvForward : StepOf<ConvForward> {
    Geometry geometry{};
    TopologyOperands topology;
    Id values = kAbsent, bias = kAbsent, x = kAbsent, y = kAbsent;
    std::optional<NormOperands> norm;
    bool relu = false;
    Id mean = kAbsent, variance = kAbsent;
    REWIRE_STEP(ConvForward)
};

// All gradients in one pass over dy. gate: the output of a ReLU that dy has yet to pass. With relu_sums x is the output of a
// ReLU, dx the gradient of its input and relu_sums the sums of dx by channel.
struct ConvBackward : StepOf<ConvBackward> {
    Geometry geometry{};
    TopologyOperands topology;
    Id values = kAbsent, x = kAbsent, dy = kAbsent;
    std::optional<InputNorm> before;
    Id gate = kAbsent;
    std::optional<DeferredGradient> deferred;
    Id dx = kAbsent, dvalues = kAbsent, dbias = kAbsent;
    std::optional<NormGradientOperands> dnorm;
    Id relu_sums = kAbsent;
    REWIRE_STEP(ConvBackward)
};

// The gradients of values and bias alone: of a first layer.
struct WeightGradient : StepOf<WeightGradient> {
    Geometry geometry{};
    TopologyOperands topology;
    Id x = kAbsent, dy = kAbsent, gate = kAbsent;
    std::optional<DeferredGradient> deferred;
    Id dvalues = kAbsent, dbias = kAbsent;
    REWIRE_STEP(WeightGradient)
};

// The gradient of the input alone: of a layer whose values are frozen.
struct InputGradient : StepOf<InputGradient> {
    Geometry geometry{};
    TopologyOperands topology;
    Id values = kAbsent, dy = kAbsent, dx = kAbsent;
    REWIRE_STEP(InputGradient)
};

// Linear layers on contiguous activations (N, C).
struct LinearRows : StepOf<LinearRows> {
    Geometry geometry{};
    TopologyOperands topology;
    Id values = kAbsent, bias = kAbsent, x = kAbsent, y = kAbsent;
    bool relu = false;
    REWIRE_STEP(LinearRows)
};
struct LinearRowsBackward : StepOf<LinearRowsBackward> {
    Geometry geometry{};
    TopologyOperands topology;
    Id values = kAbsent, x = kAbsent, dy = kAbsent, gate = kAbsent, dx = kAbsent, dvalues = kAbsent, dbias = kAbsent;
    REWIRE_STEP(LinearRowsBackward)
};
struct LinearRowsInputGradient : StepOf<LinearRowsInputGradient> {
    Geometry geometry{};
    TopologyOperands topology;
    Id values = kAbsent, dy = kAbsent, dx = kAbsent;
    REWIRE_STEP(LinearRowsInputGradient)
};

// ---- Batch norm: steps_norm.cpp

// Mean and biased variance of each channel.
struct Moments : StepOf<Moments>, Channels {
    Id x = kAbsent, mean = kAbsent, variance = kAbsent;
    REWIRE_STEP(Moments)
};

// Moves running statistics towards the moments of a batch; momentum is a scalar of the run. `unbiased` is what the biased
// variance is multiplied with: length / (length - 1).
struct Track : StepOf<Track> {
    int64_t channels = 0, momentum = -1;
    double unbiased = 1;
    Id mean = kAbsent, variance = kAbsent, running_mean = kAbsent, running_variance = kAbsent;
    REWIRE_STEP(Track)
};

// z = batch norm of x, plus residual; its ReLU if the norm says so.
struct NormForward : StepOf<NormForward, true>, Channels {
    NormOperands norm;
    Id x = kAbsent, residual = kAbsent, z = kAbsent;
    REWIRE_STEP(NormForward)
};

// The gradient of z is dz, plus `more`. z is needed where a residual was added before the ReLU. dresidual receives g,
// what passes the ReLU. With factors the gradient of x is deferred: there is no dx, and dresidual is g.
struct NormBackward : StepOf<NormBackward, true>, Channels {
    NormOperands norm;
    Id x = kAbsent, z = kAbsent, dz = kAbsent, more = kAbsent, dx = kAbsent, dresidual = kAbsent;
    Id dweight = kAbsent, dbias = kAbsent, factors = kAbsent;
    REWIRE_STEP(NormBackward)
};

// dx = what g and the factors of a deferred gradient stand for; x is the batch norm's input.
struct ResolveDeferred : StepOf<ResolveDeferred, true>, Channels {
    Id g = kAbsent, x = kAbsent, factors = kAbsent, dx = kAbsent;
    REWIRE_STEP(ResolveDeferred)
};

// The sum over each channel: a bias's gradient.
struct RowSums : StepOf<RowSums>, Channels {
    Id x = kAbsent, sums = kAbsent;
    REWIRE_STEP(RowSums)
};

// ---- Layer norm: steps_layer_norm.cpp

// Over the channels of [panels][channels][columns]; without a mean to subtract it is a root mean square norm.
struct LayerNormSizes {
    int64_t panels = 0, channels = 0, columns = 0;
    double eps = 1e-5;
    bool centered = true;
    bool wide_x = false, wide_y = false;  // in a plan of bfloat16: whether x, or y as well, is a tensor of floats

    Kind x_kind() const { return wide_x ? Kind::numbers : Kind::values; }
    Kind y_kind() const { return wide_y ? Kind::numbers : Kind::values; }
};

// mean and scale, one over the standard deviation, are those of each column.
struct LayerNormForward : StepOf<LayerNormForward>, LayerNormSizes {
    Id weight = kAbsent, bias = kAbsent, x = kAbsent, y = kAbsent, mean = kAbsent, scale = kAbsent;
    REWIRE_STEP(LayerNormForward)
};
struct LayerNormBackward : StepOf<LayerNormBackward>, LayerNormSizes {
    Id weight = kAbsent, x = kAbsent, dy = kAbsent, mean = kAbsent, scale = kAbsent, dx = kAbsent, dweight = kAbsent,
       dbias = kAbsent;
    REWIRE_STEP(LayerNormBackward)
};

// The transpose of each of so many matrices.
struct TransposeEach : StepOf<TransposeEach> {
    int64_t matrices = 0, rows = 0, columns = 0;
    Id x = kAbsent, y = kAbsent;
    REWIRE_STEP(TransposeEach)
};

// ---- Group norm: steps_group_norm.cpp

struct GroupSizes {
    Images images{};
    int64_t groups = 1;
};

// See group_norm.h: moments of [panels][2 * channels][panel].
struct GroupMoments : StepOf<GroupMoments>, GroupSizes {
    double eps = 1e-5;
    Id weight = kAbsent, x = kAbsent, moments = kAbsent, inverse = kAbsent;
    REWIRE_STEP(GroupMoments)
};
// dx is the gradient through the moments, plus `more`.
struct GroupMomentsBackward : StepOf<GroupMomentsBackward>, GroupSizes {
    Id weight = kAbsent, x = kAbsent, moments = kAbsent, inverse = kAbsent, dmoments = kAbsent, more = kAbsent, dx = kAbsent,
       dweight = kAbsent;
    REWIRE_STEP(GroupMomentsBackward)
};

// ---- Pooling: steps_images.cpp

// Maximum pooling of x, or of its batch norm; `which` receives the tap of each maximum, a byte each.
struct MaxPool : StepOf<MaxPool> {
    Pool pool{};
    std::optional<NormOperands> norm;
    Id x = kAbsent, y = kAbsent, which = kAbsent;
    REWIRE_STEP(MaxPool)
};
// With a norm x is needed, and dx is the gradient of x, or g if dnorm asks for factors.
struct MaxPoolBackward : StepOf<MaxPoolBackward> {
    Pool pool{};
    std::optional<NormOperands> norm;
    Id x = kAbsent, dy = kAbsent, which = kAbsent, dx = kAbsent;
    std::optional<NormGradientOperands> dnorm;
    REWIRE_STEP(MaxPoolBackward)
};
struct AvgPool : StepOf<AvgPool> {
    Pool pool{};
    Id x = kAbsent, y = kAbsent;
    REWIRE_STEP(AvgPool)
};
struct AvgPoolBackward : StepOf<AvgPoolBackward> {
    Pool pool{};
    Id dy = kAbsent, dx = kAbsent;
    REWIRE_STEP(AvgPoolBackward)
};

// ---- Images as a whole: steps_images.cpp

// y, batch-last (N, C): the mean over all positions.
struct GlobalMean : StepOf<GlobalMean> {
    Images images{};
    Id x = kAbsent, y = kAbsent;
    REWIRE_STEP(GlobalMean)
};
struct GlobalMeanBackward : StepOf<GlobalMeanBackward> {
    Images images{};
    Id dy = kAbsent, dx = kAbsent;
    REWIRE_STEP(GlobalMeanBackward)
};

// Every so many rows and columns of x, between channels of one value.
struct Slice : StepOf<Slice> {
    Images images{};
    Thinning slicing{};
    double value = 0;
    Id x = kAbsent, y = kAbsent;
    REWIRE_STEP(Slice)
};
struct SliceBackward : StepOf<SliceBackward> {
    Images images{};
    Thinning slicing{};
    Id dy = kAbsent, dx = kAbsent;
    REWIRE_STEP(SliceBackward)
};

// Constant padding; `images` are the sizes of x.
struct Pad : StepOf<Pad> {
    Images images{};
    Padding padding{};
    double value = 0;
    Id x = kAbsent, y = kAbsent;
    REWIRE_STEP(Pad)
};
struct PadBackward : StepOf<PadBackward> {
    Images images{};
    Padding padding{};
    Id dy = kAbsent, dx = kAbsent;
    REWIRE_STEP(PadBackward)
};

// Images of another size, `images` being the sizes of x. The gradient is the same step with both sides transposed.
struct Resample : StepOf<Resample> {
    Images images{};
    Side rows, columns;
    Id x = kAbsent, y = kAbsent;
    REWIRE_STEP(Resample)
};

// [N][C][H][W]; [C][H][W][N]; [N / panel][H][C][W][panel].
enum class Layout : uint8_t { contiguous, batch_last, panels };

// y = x in another layout.
struct Relayout : StepOf<Relayout> {
    Images images{};
    Layout source = Layout::contiguous, target = Layout::contiguous;
    Id x = kAbsent, y = kAbsent;
    REWIRE_STEP(Relayout)
};

// ---- Element by element: steps_elementwise.cpp

// A program over tensors of one shape, and others that are broadcast. Slots are numbered: first what is read, then scale,
// shift and mean of each batch norm (its output is x * scale + shift), then what instructions write.
// Slots are floats in a plan of bfloat16; the operand is as well if it is wide.
struct Access {
    Id operand = kAbsent;
    std::vector<int64_t> strides;  // of the five loops
    int64_t offset = 0;            // elements before the first
    bool wide = false;
};
struct SlotAccess {
    int32_t slot = 0;
    Id operand = kAbsent;
    std::vector<int64_t> strides;
    int64_t offset = 0;
    bool wide = false;
};
// The gradient of a batch norm in the program: g and g * (x - mean) are in slots that are summed by channel. With factors
// the gradient of x is deferred: see NormGradientOperands. Else the written g, `dx`, becomes it in place.
struct NormSums {
    int32_t index = 0, g = 0, gx = 0;  // of the norm, and slots
    NormGradientOperands gradients;
    Id x = kAbsent, dx = kAbsent;
};
struct Pointwise : StepOf<Pointwise> {
    std::vector<int64_t> loops;  // five sizes: see Loops5
    int32_t channel = 0;         // which of the outer three loops goes over channels
    int64_t panel_rows = 1;      // runs that a channel has, for the gradients of batch norms: see Channels
    std::vector<Access> reads;
    std::vector<NormOperands> norms;
    std::vector<Instruction> program;
    std::vector<SlotAccess> writes, sums;
    std::vector<NormSums> norm_sums;
    REWIRE_STEP(Pointwise)

   private:
    int32_t slots() const;
};
struct Copy : StepOf<Copy> {
    int64_t length = 0;
    Id x = kAbsent, y = kAbsent;
    REWIRE_STEP(Copy)
};
struct Fill : StepOf<Fill> {
    int64_t length = 0;
    double value = 0;
    Id y = kAbsent;
    REWIRE_STEP(Fill)
};
// From the plan's type to the numbers it is computed in, or back, rounded to nearest even.
struct Convert : StepOf<Convert> {
    int64_t length = 0;
    bool widen = true;
    Id x = kAbsent, y = kAbsent;
    REWIRE_STEP(Convert)
};
// Which elements are dropped is a function of their place and the seed, a seed of the run: the gradient is the same step.
struct Dropout : StepOf<Dropout, true> {
    int64_t length = 0;
    double probability = 0;
    int64_t seed = -1;
    Id x = kAbsent, y = kAbsent;
    REWIRE_STEP(Dropout)
};

#undef REWIRE_STEP

// ---- What the families share: steps_norm.cpp

void refuse_unless(bool fine, const char* problem);

// Elements of images; throws unless their sizes fit together: steps_images.cpp
int64_t image_elements(const char* what, const Images&);

// Throws unless the channels have runs of whole elements; how many elements there are in all.
int64_t elements_of(const Channels&);
void norm_needs(Needs&, const NormOperands&, int64_t channels);
void norm_gradient_needs(Needs&, const NormGradientOperands&, int64_t channels);

template <class T>
BatchNorm<T> batch_norm_of(const Run<T>& r, const NormOperands& norm, const Channels& of) {
    return {of.channels,       of.length,       norm.training,    norm.relu,           norm.eps,
            r.number(norm.weight), r.number(norm.bias), r.number(norm.mean), r.number(norm.variance), of.panel_rows};
}

template <class T>
NormGradients<T> norm_gradients_of(const Run<T>& r, const std::optional<NormGradientOperands>& of) {
    if (!of) return {nullptr, nullptr, nullptr};
    return {r.number(of->weight), r.number(of->bias), r.number(of->factors)};
}

}  // namespace rewire::engine

#define REWIRE_INSTANTIATE_STEP(S)                               \
    template void S::execute<float>(const Run<float>&) const;    \
    template void S::execute<double>(const Run<double>&) const;  \
    template void S::execute<bfloat16>(const Run<bfloat16>&) const;
