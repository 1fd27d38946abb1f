// SPDX-License-Identifier: Apache-2.0
// Every operation of the host with each pair of its arguments in one memory: the same memory gives the same bits where
// the documentation allows it; anything else that shares a byte is refused by name and nothing changes.
#include "ops/every_operation.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// The arguments of one call, each in the middle of a zone of its own, so that one can be moved onto another.
class Arena {
 public:
  explicit Arena(const Operation& operation) : operation_(operation), memory_(zone * operation.arguments.size() + 64) {
    auto first = reinterpret_cast<std::uintptr_t>(memory_.data());
    const size skip = (64 - first % 64) % 64;
    for (size i = 0; i < operation.arguments.size(); ++i) at_.push_back(memory_.data() + skip + zone * i + zone / 2);
    for (size i = 0; i < at_.size(); ++i) fill(i);
  }

  /// Puts argument i at `place`, with its value.
  void move(size i, unsigned char* place) {
    at_[i] = place;
    fill(i);
  }
  void call() const { operation_.call(at_); }
  unsigned char* at(size i) const { return at_[i]; }
  const Bytes& everything() const { return memory_; }
  Bytes value(size i) const { return {at_[i], at_[i] + operation_.arguments[i].value.size()}; }

 private:
  void fill(size i) { std::memcpy(at_[i], operation_.arguments[i].value.data(), operation_.arguments[i].value.size()); }

  static constexpr size zone = 4096;
  const Operation& operation_;
  Bytes memory_;
  Memory at_;
};

/// What an operation writes where nothing overlaps.
std::vector<Bytes> written_apart(const Operation& operation) {
  Arena arena(operation);
  arena.call();
  std::vector<Bytes> result;
  for (size i = 0; i < operation.arguments.size(); ++i) result.push_back(arena.value(i));
  return result;
}

/// Moves `other` to `shift` bytes behind the start of `target` and calls: the results must be `expected`, or the call
/// must be refused and change nothing.
void check_moved(const Operation& operation, size target, size other, std::ptrdiff_t shift, bool allowed,
                 const std::vector<Bytes>& expected) {
  const Argument &to = operation.arguments[target], &from = operation.arguments[other];
  INFO(operation.name << ": " << from.name << " at " << shift << " bytes from the start of " << to.name);
  Arena arena(operation);
  arena.move(other, arena.at(target) + shift);
  const Bytes before = arena.everything();
  try {
    arena.call();
    CHECK(allowed);
    for (size i = 0; allowed && i < operation.arguments.size(); ++i)
      if (operation.arguments[i].written) CHECK(arena.value(i) == expected[i]);
  } catch (const invalid_argument& refused) {
    INFO(refused.what());
    CHECK_FALSE(allowed);
    CHECK(refused.operation() == operation.name);
    const std::string names[] = {to.name, from.name};
    const size says = refused.argument() == to.name ? 0 : 1;
    CHECK(refused.argument() == names[says]);
    CHECK(refused.found() == "overlapping " + names[1 - says]);
    CHECK(arena.everything() == before);
  }
}

void check_operation(const Operation& operation) {
  const std::vector<Bytes> expected = written_apart(operation);
  for (size target = 0; target < operation.arguments.size(); ++target) {
    const Argument& to = operation.arguments[target];
    if (!to.written) continue;
    CHECK((expected[target] != to.value || to.name == "status"));  // written only where a row fails
    for (size other = 0; other < operation.arguments.size(); ++other) {
      if (other == target) continue;
      const Argument& from = operation.arguments[other];
      const auto whole = static_cast<std::ptrdiff_t>(from.value.size()),
                 element = static_cast<std::ptrdiff_t>(from.element),
                 length = static_cast<std::ptrdiff_t>(to.value.size());
      check_moved(operation, target, other, 0, to.may_be.count(from.name) > 0, expected);
      check_moved(operation, target, other, element, false, expected);
      check_moved(operation, target, other, element - whole, false, expected);
      check_moved(operation, target, other, -whole, true, expected);
      check_moved(operation, target, other, (length + 3) / 4 * 4, true, expected);
    }
  }
}

}  // namespace

TEST_CASE("overlap: every operation with each pair of its arguments in one memory", "[overlap]") {
  size operations = 0;
  for (const auto& table :
       {row_operations(), product_operations(), moe_operations(), kda_operations(), mla_operations()})
    for (const Operation& operation : table) {
      check_operation(operation);
      ++operations;
    }
  CHECK(operations == 28);
}

TEST_CASE("overlap: rows of what is written that share memory are refused, whatever the operation", "[overlap]") {
  size outputs = 0;
  for (const auto& table :
       {row_operations(), product_operations(), moe_operations(), kda_operations(), mla_operations()})
    for (const Operation& operation : table)
      for (size i = 0; i < operation.arguments.size(); ++i) {
        if (!operation.arguments[i].written) continue;
        const Arena arena(operation);
        const Bytes before = arena.everything();
        INFO(operation.name << ": " << operation.arguments[i].name);
        squeezed = arena.at(i);
        squeezable = false;
        try {
          arena.call();
          CHECK_FALSE(squeezable);
        } catch (const invalid_argument& refused) {
          INFO(refused.what());
          ++outputs;
          CHECK(refused.operation() == operation.name);
          CHECK(refused.argument() == operation.arguments[i].name);
          const bool names_it = refused.found() == "overlapping itself" || refused.found() == "strided inside a slot";
          CHECK(names_it);
          CHECK(arena.everything() == before);
        }
        squeezed = nullptr;
      }
  CHECK(outputs == 34);
}

TEST_CASE("overlap: columns of one buffer, other strides, other types", "[overlap]") {
  std::vector<float> buffer = converted<float>(random_normal(64, 1)), weight(4, 1.0f);
  const std::vector<float> before = buffer;
  const auto columns = [&](size first) { return view(buffer, 4, 16).slice(1, first, 4); };
  const auto refused = [&](const auto& x, const auto& y) {
    CHECK_THROWS_AS(rms_norm(exec, x, view(weight), 1e-5f, y), invalid_argument);
    check(same_bits(buffer, before));
  };
  for (const size first : {size{1}, size{2}, size{3}, size{5}, size{6}, size{7}}) refused(columns(4), columns(first));
  refused(columns(0), view(buffer.data(), 4, 4));                           // the same start, rows closer together
  refused(columns(0), view(reinterpret_cast<bf16*>(buffer.data()), 4, 4));  // narrower elements
  refused(view(reinterpret_cast<const bf16*>(buffer.data()), 4, 4), columns(0));
  rms_norm(exec, columns(4), view(weight), 1e-5f, columns(0));
  rms_norm(exec, columns(4), view(weight), 1e-5f, columns(8));
  CHECK(std::memcmp(&columns(4)(0, 0), &before[4], 16) == 0);
  rms_norm(exec, columns(4), view(weight), 1e-5f, columns(4));
  for (size row = 0; row < 4; ++row) {
    CHECK(std::memcmp(&columns(4)(row, 0), &columns(0)(row, 0), 16) == 0);
    CHECK(std::memcmp(&columns(4)(row, 0), &columns(8)(row, 0), 16) == 0);
  }
}
