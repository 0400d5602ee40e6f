#include <type_traits>

#include "steps.h"

namespace rewire::engine {

void Copy::needs(Needs& n) const {
    product("the tensor", {length});
    n.reads("x", x, length);
    n.writes("y", y, length);
}

template <class T>
void Copy::execute(const Run<T>& r) const {
    copy<T>(r.at(x), length, r.at(y), r.threads);
}

void Fill::needs(Needs& n) const {
    product("the tensor", {length});
    n.writes("y", y, length);
}

template <class T>
void Fill::execute(const Run<T>& r) const {
    fill<T>(T(value), length, r.at(y), r.threads);
}

void Convert::needs(Needs& n) const {
    product("the tensor", {length});
    n.reads("x", x, length, widen ? Kind::values : Kind::numbers);
    n.writes("y", y, length, widen ? Kind::numbers : Kind::values);
}

template <class T>
void Convert::execute(const Run<T>& r) const {
    if constexpr (std::is_same_v<T, bfloat16>)
        widen ? rewire::widen(r.at(x), length, r.number(y), r.threads) : narrow(r.number(x), length, r.at(y), r.threads);
    else
        copy<T>(r.at(x), length, r.at(y), r.threads);
}

void Dropout::needs(Needs& n) const {
    product("the tensor", {length});
    refuse_unless(probability >= 0 && probability < 1, "probability must be in [0, 1)");
    n.seed("seed", seed);
    n.reads("x", x, length);
    n.writes("y", y, length);
}

template <class T>
void Dropout::execute(const Run<T>& r) const {
    drop_out<T>(r.table, r.at(x), length, probability, 1 / (1 - probability), r.seeds[size_t(seed)], r.at(y), r.threads);
}

REWIRE_INSTANTIATE_STEP(Copy)
REWIRE_INSTANTIATE_STEP(Fill)
REWIRE_INSTANTIATE_STEP(Convert)
REWIRE_INSTANTIATE_STEP(Dropout)

}  // namespace rewire::engine
