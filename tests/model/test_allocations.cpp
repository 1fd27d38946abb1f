// SPDX-License-Identifier: Apache-2.0
// The decode path allocates nothing: every operator new of the program is counted.

#include <atomic>
#include <cstdlib>
#include <new>

#include "support/fixture.hpp"

namespace {
std::atomic<std::size_t> allocations{0};
void* counted(std::size_t count) {
  ++allocations;
  if (void* memory = std::malloc(count ? count : 1)) return memory;
  throw std::bad_alloc();
}
void* counted(std::size_t count, std::align_val_t alignment) {
  ++allocations;
  const std::size_t a = static_cast<std::size_t>(alignment);
  if (void* memory = std::aligned_alloc(a, (count + a - 1) / a * a)) return memory;
  throw std::bad_alloc();
}
}  // namespace

void* operator new(std::size_t count) { return counted(count); }
void* operator new[](std::size_t count) { return counted(count); }
void* operator new(std::size_t count, const std::nothrow_t&) noexcept { return counted(count); }
void* operator new[](std::size_t count, const std::nothrow_t&) noexcept { return counted(count); }
void* operator new(std::size_t count, std::align_val_t alignment) { return counted(count, alignment); }
void* operator new[](std::size_t count, std::align_val_t alignment) { return counted(count, alignment); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

using namespace k3;
using namespace k3::test;

TEMPLATE_TEST_CASE("no allocation per token once every expert has been used", "", Fp32, Fp64, Bf16) {
  for (const char* name : fixture_names) {
    const Fixture& f = fixture(name);
    Decoder<TestType> decoder(host{1}, f.model, 4, 1);
    HybridCache<TestType> cache = decoder.make_cache(1, 64);
    const std::vector<id> ids = f.ids(2);
    prefill(decoder, cache, 0, view(ids));
    const id slot = 0;
    const size row = 0;
    // The first single-token pass may fill per-thread scratch; the ones after it are counted.
    std::size_t counted_tokens = 0, before = 0;
    for (size i = 0; i < 10; ++i) {
      if (i == 1) before = allocations;
      const id token = decoder.argmax(0);
      const size position = cache.position(0);
      decoder.forward(cache, {view(&token, 1), view(&slot, 1), view(&position, 1), view(&row, 1)});
      counted_tokens += i >= 1;
    }
    const std::size_t made = allocations - before;
    INFO(name << " " << TestType::name << ": " << made << " allocations in " << counted_tokens << " tokens");
    CHECK(made == 0);
  }
}
