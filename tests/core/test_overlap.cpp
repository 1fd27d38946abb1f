// SPDX-License-Identifier: Apache-2.0
#include <random>
#include <set>

#include <k3/core/overlap.hpp>

#include "support/catch.hpp"

using namespace k3;

TEST_CASE("footprints share a byte exactly where sets of bytes do", "[core]") {
  std::mt19937 engine(5);
  const auto draw = [&](unsigned below) { return engine() % below; };
  size shared = 0, apart = 0, careful = 0;
  for (int round = 0; round < 20000; ++round) {
    detail::Footprint f[2];
    std::set<std::uintptr_t> set[2];
    const size stride = 1 + draw(12);
    for (int i = 0; i < 2; ++i) {
      f[i] = {1000 + draw(60), draw(5), 1 + draw(static_cast<unsigned>(stride)),
              draw(4) ? stride : stride + 1 + draw(3)};
      if (f[i].rows == 1 && draw(2)) f[i].stride = 0;
      for (size row = 0; row < f[i].rows; ++row)
        for (size byte = 0; byte < f[i].width; ++byte) set[i].insert(f[i].first + row * f[i].stride + byte);
    }
    bool really = false;
    for (const auto byte : set[0]) really = really || set[1].count(byte) > 0;
    const bool says = detail::shares_bytes(f[0], f[1]);
    REQUIRE(says == detail::shares_bytes(f[1], f[0]));
    if (really) REQUIRE(says);
    // Exact for rows that lie equally far apart; otherwise ranges that meet count as sharing.
    if (says && !really) {
      REQUIRE((f[0].stride != f[1].stride && f[0].rows > 1 && f[1].rows > 1));
      ++careful;
    }
    ++(really ? shared : apart);
  }
  CAPTURE(shared, apart, careful);
  CHECK((shared > 1000 && apart > 1000));
}

TEST_CASE("views whose elements share memory are refused, nested ones are not", "[core]") {
  std::mt19937 engine(6);
  const auto draw = [&](unsigned below) { return engine() % below; };
  size shared = 0, apart = 0, careful = 0;
  for (int round = 0; round < 20000; ++round) {
    View<float, 3> v{nullptr, {draw(4), 1 + draw(3), 1 + draw(4)}, {draw(20), draw(12), 1}};
    std::multiset<size> offsets;
    for (size i = 0; i < v.extents[0]; ++i)
      for (size j = 0; j < v.extents[1]; ++j)
        for (size k = 0; k < v.extents[2]; ++k) offsets.insert(i * v.strides[0] + j * v.strides[1] + k);
    const bool really = std::set<size>(offsets.begin(), offsets.end()).size() < offsets.size();
    bool says = false;
    try {
      detail::require_distinct("test", "out", v);
    } catch (const invalid_argument& e) {
      says = true;
      REQUIRE(e.found() == "overlapping itself");
    }
    CAPTURE(v.extents[0], v.extents[1], v.extents[2], v.strides[0], v.strides[1]);
    if (really) REQUIRE(says);
    // Interleaved layouts, where a stride is smaller than what a smaller stride spans, count as sharing.
    careful += says && !really;
    ++(really ? shared : apart);
  }
  CAPTURE(shared, apart, careful);
  CHECK((shared > 1000 && apart > 1000 && careful < 1000));
}

TEST_CASE("views beyond all memory are refused: wrapped strides, products that wrap", "[core]") {
  std::vector<float> memory(8), none;
  const size half = size{1} << 63;
  const auto found = [](const auto& v, auto... extent) -> std::string {
    try {
      detail::require_shape("test", "x", v, extent...);
    } catch (const invalid_argument& e) {
      return e.found();
    }
    return "";
  };
  const std::string beyond = "strided or extended beyond all memory";
  CHECK(found(View<float, 2>{memory.data() + 4, {3, 2}, {~size{0} - 1, 1}}, 3, 2) == beyond);  // a stride of -2
  CHECK(found(View<float, 2>{memory.data(), {2, 2}, {half, 1}}, 2, 2) == beyond);
  CHECK(found(View<float, 2>{memory.data(), {half, 2}, {0, 1}}, half, 2) == beyond);
  CHECK(found(View<float, 2>{nullptr, {half, 2}, {2, 1}}, half, 2) == beyond);
  CHECK(found(View<float, 2>{memory.data(), {1, 2}, {half, 1}}, 1, 2) == "");  // a stride that nothing takes
  CHECK(found(View<float, 2>{nullptr, {half, 0}, {half, 1}}, half, 0) == "");
  CHECK(found(View<float, 2>{memory.data(), {4, 2}, {0, 1}}, 4, 2) == "");  // one row, read four times
  CHECK(found(View<float, 2>{nullptr, {1, 2}, {2, 1}}, 1, 2) == "null");
  CHECK_THROWS_AS(view(none, half, 2), invalid_argument);
  CHECK_THROWS_AS(view(memory, 4, half, 2), invalid_argument);
  CHECK_THROWS_AS(view(memory, 3, 3), invalid_argument);
  CHECK(view(memory, 2, 4).contiguous());
}

TEST_CASE("a weight of run-time type without memory is refused", "[core]") {
  const std::vector<float> values(6);
  const std::vector<std::uint8_t> codes(32), scales(2);
  AnyMatrix<> weight(view(values, 2, 3));
  const size shape[] = {2, 3}, wide[] = {2, 32};
  CHECK_NOTHROW(detail::require_shape("test", "weight", weight, shape));
  weight.data = nullptr;
  CHECK_THROWS_AS(detail::require_shape("test", "weight", weight, shape), invalid_argument);
  AnyMatrix<> packed(Mxfp4Matrix<>{view(codes, 2, 16), view(scales, 2, 1)});
  CHECK_NOTHROW(detail::require_shape("test", "weight", packed, wide));
  packed.scale = nullptr;
  CHECK_THROWS_AS(detail::require_shape("test", "weight", packed, wide), invalid_argument);
}
