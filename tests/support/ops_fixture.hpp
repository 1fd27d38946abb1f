// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "support/data.hpp"

namespace k3::test {

/// A tensor of tests/data/ops, its elements (F64, F32, I32 or U8) widened to double.
struct OpsTensor {
  std::vector<std::size_t> shape;
  std::vector<double> values;
};

/// One case of one operation: its inputs, its outputs and the tolerance |got - want| <= atol + rtol |want|.
struct OpsCase {
  std::string op, name;
  nlohmann::json params;
  double rtol = 0, atol = 0;

  /// An input or output by its name in ops.json. Throws std::out_of_range where the case has none of that name.
  OpsTensor tensor(const std::string& tensor_name) const;
  bool has(const std::string& tensor_name) const { return keys.contains(tensor_name); }

  nlohmann::json keys;  ///< name -> tensor key in ops.safetensors
};

namespace detail {

/// ops.json and ops.safetensors as read from disk.
struct OpsFile {
  nlohmann::json cases, header;
  std::vector<char> bytes;  ///< what follows the header

  OpsFile() {
    std::ifstream json(data_path("ops/ops.json"));
    std::ifstream tensors(data_path("ops/ops.safetensors"), std::ios::binary);
    if (!json || !tensors) throw std::runtime_error("cannot open " + data_path("ops/ops.{json,safetensors}"));
    cases = nlohmann::json::parse(json)["cases"];
    std::uint64_t length = 0;
    tensors.read(reinterpret_cast<char*>(&length), sizeof length);
    std::string text(static_cast<std::size_t>(length), ' ');
    tensors.read(text.data(), static_cast<std::streamsize>(length));
    header = nlohmann::json::parse(text);
    bytes.assign(std::istreambuf_iterator<char>(tensors), std::istreambuf_iterator<char>());
  }
};

inline const OpsFile& ops_file() {
  static const OpsFile file;
  return file;
}

template <class T>
std::vector<double> widened(const char* from, std::size_t bytes) {
  std::vector<double> values(bytes / sizeof(T));
  for (std::size_t i = 0; i < values.size(); ++i) {
    T value;
    __builtin_memcpy(&value, from + i * sizeof(T), sizeof(T));
    values[i] = static_cast<double>(value);
  }
  return values;
}

}  // namespace detail

inline OpsTensor OpsCase::tensor(const std::string& tensor_name) const {
  if (!has(tensor_name)) throw std::out_of_range(op + "/" + name + " has no tensor " + tensor_name);
  const detail::OpsFile& file = detail::ops_file();
  const nlohmann::json& entry = file.header.at(keys.at(tensor_name).get<std::string>());
  const auto first = entry.at("data_offsets").at(0).get<std::size_t>();
  const auto last = entry.at("data_offsets").at(1).get<std::size_t>();
  if (first > last || last > file.bytes.size()) throw std::out_of_range("ops.safetensors is too short");
  const std::string type = entry.at("dtype").get<std::string>();
  const char* data = file.bytes.data() + first;
  OpsTensor result{entry.at("shape").get<std::vector<std::size_t>>(), {}};
  if (type == "F64")
    result.values = detail::widened<double>(data, last - first);
  else if (type == "F32")
    result.values = detail::widened<float>(data, last - first);
  else if (type == "I32")
    result.values = detail::widened<std::int32_t>(data, last - first);
  else if (type == "U8")
    result.values = detail::widened<std::uint8_t>(data, last - first);
  else
    throw std::runtime_error("ops.safetensors: unknown type " + type);
  return result;
}

/// All cases of an operation, in the file's order. Throws where there is none: a test over no case would always pass.
inline std::vector<OpsCase> ops_cases(const std::string& op) {
  std::vector<OpsCase> result;
  for (const nlohmann::json& entry : detail::ops_file().cases) {
    if (entry.at("op") != op) continue;
    OpsCase one{op,
                entry.at("name").get<std::string>(),
                entry.at("params"),
                entry.at("tolerance").at("rtol").get<double>(),
                entry.at("tolerance").at("atol").get<double>(),
                nlohmann::json::object()};
    for (const char* side : {"inputs", "outputs"})
      for (const auto& [tensor_name, tensor] : entry.at(side).items()) one.keys[tensor_name] = tensor.at("tensor");
    result.push_back(one);
  }
  if (result.empty()) throw std::runtime_error("ops.json has no case of " + op);
  return result;
}

}  // namespace k3::test
