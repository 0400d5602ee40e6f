#include "steps.h"

namespace rewire::engine {
namespace {

int64_t checked(const GroupSizes& of) {
    const int64_t all = image_elements("x", of.images);
    refuse_unless(of.groups >= 1 && of.images.channels % of.groups == 0, "groups have the same number of channels");
    return all;
}

// Of what there is for each sample and so many channels.
int64_t by_sample(const GroupSizes& of, int64_t channels) {
    return product("what is by sample", {of.images.batch(), channels});
}

}  // namespace

void GroupMoments::needs(Needs& n) const {
    const int64_t all = checked(*this);
    n.may_read_numbers("weight", weight, images.channels);
    n.reads("x", x, all);
    n.writes_numbers("moments", moments, by_sample(*this, 2 * images.channels));
    n.may_write_numbers("inverse", inverse, by_sample(*this, groups));
}

template <class T>
void GroupMoments::execute(const Run<T>& r) const {
    group_moments<T>(r.table, {images, groups, eps}, r.at(x), r.number(weight), r.number(moments), r.number(inverse),
                     r.threads);
}

void GroupMomentsBackward::needs(Needs& n) const {
    const int64_t all = checked(*this), means = by_sample(*this, 2 * images.channels);
    n.may_read_numbers("weight", weight, images.channels);
    n.reads("x", x, all);
    n.reads_numbers("moments", moments, means);
    n.reads_numbers("inverse", inverse, by_sample(*this, groups));
    n.reads_numbers("dmoments", dmoments, means);
    n.may_read("more", more, all);
    n.may_write("dx", dx, all);
    n.may_write_numbers("dweight", dweight, images.channels);
}

template <class T>
void GroupMomentsBackward::execute(const Run<T>& r) const {
    group_moments_gradient<T>(r.table, {images, groups, 0},
                              {r.at(x), r.number(weight), r.number(moments), r.number(inverse), r.number(dmoments),
                               r.at(more), r.at(dx), r.number(dweight)},
                              r.threads);
}

REWIRE_INSTANTIATE_STEP(GroupMoments)
REWIRE_INSTANTIATE_STEP(GroupMomentsBackward)

}  // namespace rewire::engine
