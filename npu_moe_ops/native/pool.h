// Work on the threads of a pool.
#pragma once

#include <type_traits>

#include "ffn.h"

namespace npu_moe {
namespace {

template <class Function>
void in_parallel(const Pool& pool, int threads, Function&& function) {
    if (threads == 1) return function();
    pool.run(threads, [](void* context) { (*static_cast<std::remove_reference_t<Function>*>(context))(); }, &function);
}

}  // namespace
}  // namespace npu_moe
