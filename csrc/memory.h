// Memory for large results, kept when a tensor dies and handed to the next of about its size. A fresh 8 MB
// tensor costs its page faults first, often more than what is then computed into it; a training step
// asks for the same sizes over and over.
#pragma once

#include <cstddef>

namespace rewire {

void* take_memory(std::size_t bytes);
void give_memory(void* data, std::size_t bytes) noexcept;

// Gives all that is kept back to the system; returns how many bytes.
std::size_t empty_cache();

}  // namespace rewire
