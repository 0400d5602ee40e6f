// Normalisation over groups of channels of each sample: the moments that it takes. The rest is done element by element.
#pragma once

#include <cstdint>

#include "images.h"

namespace rewire {

struct Groups {
    Images images;
    int64_t groups;
    double eps;

    int64_t channels() const { return images.channels / groups; }  // of one group
    int64_t count() const { return channels() * images.height * images.width; }
};

// Of each sample the mean by channel, which is that of its group, and behind these the factor by channel: the inverse of the
// group's standard deviation times the channel's weight. In memory [panels][2 * channels][panel]. `inverse`, unless null: that
// of the standard deviations, [panels][groups][panel]. The weight may be null.
template <class T>
void group_moments(const Table<T>&, const Groups&, const T* x, const Number<T>* weight, Number<T>* moments,
                   Number<T>* inverse, int threads);

// The gradients of x, plus `more` unless that is null, and of the weight, either of which may be null.
template <class T>
struct GroupMomentsGradient {
    const T* x;
    const Number<T> *weight, *moments, *inverse, *dmoments;
    const T* more;
    T* dx;
    Number<T>* dweight;
};
template <class T>
void group_moments_gradient(const Table<T>&, const Groups&, const GroupMomentsGradient<T>&, int threads);

}  // namespace rewire
