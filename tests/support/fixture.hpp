// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/io/checkpoint.hpp>
#include <k3/model/greedy_decode.hpp>

#include "support/compare.hpp"
#include "support/data.hpp"

namespace k3::test {

/// The names of the checkpoints in tests/data.
inline constexpr const char* fixture_names[] = {"k3-tiny-5l", "k3-tiny-13l", "kimi-linear-5l"};

/// A checkpoint of tests/data with its reference values.
struct Fixture {
  std::string name;
  K3CpuModel model;
  nlohmann::json expected;
  std::shared_ptr<const Safetensors> inner;  ///< values inside the forward pass of the third prompt

  explicit Fixture(const std::string& fixture_name)
      : name(fixture_name),
        model(from_pretrained(data_path(name))),
        expected(read_json_file(data_path(name) + "/expected.json")),
        inner(std::make_shared<const Safetensors>(open_safetensors(data_path(name) + "/expected.safetensors"))) {}

  std::vector<id> ids(size prompt) const { return expected["prompts"][prompt]["ids"]; }
  std::vector<id> generated(size prompt) const { return expected["prompts"][prompt]["generated"]; }
  std::vector<double> logits(size prompt, size row) const { return expected["prompts"][prompt]["logits"][row]; }

  bool has(const std::string& tensor) const { return inner->find(tensor) != nullptr; }
  /// The elements of an expected tensor, row-major.
  std::vector<double> values(const std::string& tensor) const {
    const TensorInfo& info = inner->at(tensor);
    std::vector<double> result(info.elements());
    for (size i = 0; i < result.size(); ++i) {
      if (info.dtype == DType::f32) {
        float value;
        __builtin_memcpy(&value, inner->data(info) + i * sizeof value, sizeof value);
        result[i] = static_cast<double>(value);
      } else {
        std::int32_t value;
        __builtin_memcpy(&value, inner->data(info) + i * sizeof value, sizeof value);
        result[i] = value;
      }
    }
    return result;
  }
};

/// Fixtures are read once per test program. (The name is a value: GCC 13 takes a reference for one to a temporary.)
inline const Fixture& fixture(std::string_view name) {
  static std::vector<std::unique_ptr<Fixture>> opened;
  for (const auto& one : opened)
    if (one->name == name) return *one;
  opened.push_back(std::make_unique<Fixture>(std::string(name)));
  return *opened.back();
}

/// The elements of a view, row-major, as double.
template <class V>
std::vector<double> elements(const V& v) {
  std::vector<double> result;
  if constexpr (V::rank == 1) {
    for (size i = 0; i < v.extent(0); ++i) result.push_back(static_cast<double>(v(i)));
  } else {
    for (size i = 0; i < v.extent(0); ++i)
      for (const double value : elements(v[i])) result.push_back(value);
  }
  return result;
}

/// The tolerances that go with the reference values: of the largest magnitude of the row or tensor.
template <class P>
constexpr double reference_tolerance() {
  return std::is_same_v<P, Fp64> ? 1e-6 : 2e-4;
}

}  // namespace k3::test
