#include <algorithm>

#include "steps.h"

namespace rewire::engine {

int64_t image_elements(const char* what, const Images& of) {
    refuse_unless(of.in_panels || of.panels == 1, "batch-last images are one panel of the whole batch");
    return product(what, {of.panels, of.channels, of.height, of.width, of.panel});
}

namespace {

constexpr int64_t kLargestPadding = int64_t(1) << 40;

int64_t elements_of(const Images& x, const Thinning& by) {
    image_elements("x", x);
    product("the slice", {by.down, by.across});
    refuse_unless(by.before >= 0 && by.after >= 0 && by.before <= kLargestPadding && by.after <= kLargestPadding,
                  "channels before and after must not be negative or beyond 2^40");
    refuse_unless(by.down <= kLargestPadding && by.across <= kLargestPadding, "the steps of a slice must not be beyond 2^40");
    return image_elements("y", by.of(x));
}

int64_t elements_of(const Images& x, const Padding& by) {
    image_elements("x", x);
    for (const int64_t amount : {by.channels_before, by.channels_after, by.top, by.bottom, by.left, by.right})
        refuse_unless(amount >= 0 && amount <= kLargestPadding, "padding must not be negative or beyond 2^40");
    return image_elements("y", by.of(x));
}

// Throws unless the entries of each pixel of a side are there, and are pixels of the input.
void check(const Side& side, int64_t size) {
    refuse_unless(side.ptr.size() > 1 && side.ptr.front() == 0 && std::is_sorted(side.ptr.begin(), side.ptr.end()),
                  "the pointers of a side begin with 0 and do not fall");
    refuse_unless(side.from.size() == size_t(side.ptr.back()) && side.weight.size() == side.from.size(),
                  "a side has as many entries and weights as its pointers say");
    const auto inside = [size](int32_t pixel) { return pixel >= 0 && pixel < size; };
    refuse_unless(std::all_of(side.from.begin(), side.from.end(), inside), "an entry is outside of the image");
}

struct Sizes {
    int64_t input, output;  // elements
};

bool in_panels(const Pool& p) { return p.in.panel != 0; }

// Whether there are as many windows as fit, or one more that begins inside and goes over the end.
bool follows(int64_t out, int64_t size, int64_t window, int64_t stride, int64_t padding) {
    const int64_t room = size + 2 * padding - window;
    return out == room / stride + 1 || (out == room / stride + 2 && room % stride && (out - 1) * stride < size + padding);
}

// Throws unless the sizes of a pooling fit together; a window has at most so many taps.
Sizes checked(const Pool& p, int64_t taps) {
    product("the window", {p.kh, p.kw, p.sh, p.sw});
    const Sizes sizes{product("x", {p.panels, p.batch, p.channels, p.height, p.width}),
                      product("y", {p.panels, p.batch, p.channels, p.out_height, p.out_width})};
    refuse_unless(int64_t(p.kh) * p.kw <= taps, "the window is too large");
    refuse_unless(p.ph >= 0 && p.pw >= 0 && 2 * int64_t(p.ph) <= p.kh && 2 * int64_t(p.pw) <= p.kw,
                  "padding must not be negative or more than half of the window");
    refuse_unless(p.height + 2 * p.ph >= p.kh && p.width + 2 * p.pw >= p.kw &&
                      follows(p.out_height, p.height, p.kh, p.sh, p.ph) &&
                      follows(p.out_width, p.width, p.kw, p.sw, p.pw),
                  "the size of the output does not follow from input, window, stride and padding");
    refuse_unless(in_panels(p) || p.panels == 1, "batch-last images are one panel of the whole batch");
    return sizes;
}

constexpr int64_t kByte = 255;      // taps of a maximum pooling: which one it was is kept in a byte
constexpr int64_t kWindow = 1024;   // of the kernels

Channels channels_of(const Pool& p) {
    return {p.channels, p.panels * p.batch * p.height * p.width, in_panels(p) ? p.panels * p.height : 1};
}

}  // namespace

void MaxPool::needs(Needs& n) const {
    const Sizes sizes = checked(pool, kByte);
    if (norm) norm_needs(n, *norm, pool.channels);
    n.reads("x", x, sizes.input);
    n.writes("y", y, sizes.output);
    n.may_write("which", which, sizes.output, Kind::bytes);
}

template <class T>
void MaxPool::execute(const Run<T>& r) const {
    BatchNorm<T> before{};
    if (norm) before = batch_norm_of(r, *norm, channels_of(pool));
    max_pool<T>(r.table, pool, norm ? &before : nullptr, r.at(x), r.at(y), r.bytes(which), r.threads);
}

void MaxPoolBackward::needs(Needs& n) const {
    const Sizes sizes = checked(pool, kByte);
    refuse_unless(norm.has_value() == dnorm.has_value(), "norm and dnorm belong together");
    if (norm) {
        norm_needs(n, *norm, pool.channels);
        n.reads("x", x, sizes.input);
        norm_gradient_needs(n, *dnorm, pool.channels);
    }
    n.reads("dy", dy, sizes.output);
    n.reads("which", which, sizes.output, Kind::bytes);
    n.writes("dx", dx, sizes.input);
}

template <class T>
void MaxPoolBackward::execute(const Run<T>& r) const {
    BatchNorm<T> before{};
    if (norm) before = batch_norm_of(r, *norm, channels_of(pool));
    max_pool_gradient<T>(r.table, pool, norm ? &before : nullptr, norm ? r.at(x) : nullptr, r.at(dy), r.bytes(which),
                         r.at(dx), norm_gradients_of(r, dnorm), r.threads);
}

void AvgPool::needs(Needs& n) const {
    const Sizes sizes = checked(pool, kWindow);
    n.reads("x", x, sizes.input);
    n.writes("y", y, sizes.output);
}

template <class T>
void AvgPool::execute(const Run<T>& r) const {
    mean_pool<T>(r.table, pool, r.at(x), r.at(y), r.threads);
}

void AvgPoolBackward::needs(Needs& n) const {
    const Sizes sizes = checked(pool, kWindow);
    n.reads("dy", dy, sizes.output);
    n.writes("dx", dx, sizes.input);
}

template <class T>
void AvgPoolBackward::execute(const Run<T>& r) const {
    mean_pool_gradient<T>(r.table, pool, r.at(dy), r.at(dx), r.threads);
}

void GlobalMean::needs(Needs& n) const {
    n.reads("x", x, image_elements("x", images));
    n.writes("y", y, product("y", {images.batch(), images.channels}));
}

template <class T>
void GlobalMean::execute(const Run<T>& r) const {
    mean<T>(images, r.at(x), r.at(y), r.threads);
}

void GlobalMeanBackward::needs(Needs& n) const {
    const int64_t all = image_elements("dx", images);
    n.reads("dy", dy, product("dy", {images.batch(), images.channels}));
    n.writes("dx", dx, all);
}

template <class T>
void GlobalMeanBackward::execute(const Run<T>& r) const {
    mean_gradient<T>(images, r.at(dy), r.at(dx), r.threads);
}

void Slice::needs(Needs& n) const {
    const int64_t output = elements_of(images, slicing);
    n.reads("x", x, image_elements("x", images));
    n.writes("y", y, output);
}

template <class T>
void Slice::execute(const Run<T>& r) const {
    thin<T>(r.table, images, slicing, r.at(x), T(value), r.at(y), r.threads);
}

void SliceBackward::needs(Needs& n) const {
    n.reads("dy", dy, elements_of(images, slicing));
    n.writes("dx", dx, image_elements("dx", images));
}

template <class T>
void SliceBackward::execute(const Run<T>& r) const {
    thin_gradient<T>(r.table, images, slicing, r.at(dy), r.at(dx), r.threads);
}

void Pad::needs(Needs& n) const {
    const int64_t output = elements_of(images, padding);
    n.reads("x", x, image_elements("x", images));
    n.writes("y", y, output);
}

template <class T>
void Pad::execute(const Run<T>& r) const {
    pad<T>(images, padding, r.at(x), T(value), r.at(y), r.threads);
}

void PadBackward::needs(Needs& n) const {
    n.reads("dy", dy, elements_of(images, padding));
    n.writes("dx", dx, image_elements("dx", images));
}

template <class T>
void PadBackward::execute(const Run<T>& r) const {
    pad_gradient<T>(images, padding, r.at(dy), r.at(dx), r.threads);
}

void Resample::needs(Needs& n) const {
    const int64_t input = image_elements("x", images);
    check(rows, images.height);
    check(columns, images.width);
    n.reads("x", x, input);
    n.writes("y", y, product("y", {images.panels, images.channels, rows.size(), columns.size(), images.panel}));
}

template <class T>
void Resample::execute(const Run<T>& r) const {
    resample<T>(r.table, images, rows, columns, r.at(x), r.at(y), r.threads);
}

void Relayout::needs(Needs& n) const {
    const int64_t all = image_elements("the tensor", images);
    refuse_unless(source != target, "source and target are the same layout: use Copy");
    refuse_unless(images.in_panels || (source != Layout::panels && target != Layout::panels),
                  "the sizes of images in panels must say so");
    n.reads("x", x, all);
    n.writes("y", y, all);
}

template <class T>
void Relayout::execute(const Run<T>& r) const {
    const bool into = target == Layout::panels;
    if (source == Layout::batch_last && into) return panels<T>(r.table, images, true, r.at(x), r.at(y), r.threads);
    if (source == Layout::panels && target == Layout::batch_last)
        return panels<T>(r.table, images, false, r.at(x), r.at(y), r.threads);
    if (source == Layout::panels || into)
        return contiguous_panels<T>(r.table, images, into, r.at(x), r.at(y), r.threads);
    const int64_t batch = images.batch(), image = images.channels * images.height * images.width;
    const bool last = target == Layout::batch_last;
    transpose<T>(r.table, r.at(x), last ? batch : image, last ? image : batch, r.at(y), r.threads);
}

REWIRE_INSTANTIATE_STEP(MaxPool)
REWIRE_INSTANTIATE_STEP(MaxPoolBackward)
REWIRE_INSTANTIATE_STEP(AvgPool)
REWIRE_INSTANTIATE_STEP(AvgPoolBackward)
REWIRE_INSTANTIATE_STEP(GlobalMean)
REWIRE_INSTANTIATE_STEP(GlobalMeanBackward)
REWIRE_INSTANTIATE_STEP(Slice)
REWIRE_INSTANTIATE_STEP(SliceBackward)
REWIRE_INSTANTIATE_STEP(Pad)
REWIRE_INSTANTIATE_STEP(PadBackward)
REWIRE_INSTANTIATE_STEP(Resample)
REWIRE_INSTANTIATE_STEP(Relayout)

}  // namespace rewire::engine
