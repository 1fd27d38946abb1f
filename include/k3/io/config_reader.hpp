// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <k3/core/error.hpp>
#include <k3/io/mapped_file.hpp>
#include <k3/io/tensor_table.hpp>

namespace k3 {

namespace detail {

/// Whether a value is a whole number from 0 on. Parsed ones are unsigned; a tree made in a program may say it
/// otherwise.
inline bool is_whole(const nlohmann::json& value) {
  return value.is_number_unsigned() || (value.is_number_integer() && value.get<std::int64_t>() >= 0);
}

/// A JSON object of a config file with typed access; errors name file, key and value. A null counts as absent unless a
/// member says otherwise. Keeps a reference to `object`.
class ConfigReader {
 public:
  ConfigReader(const nlohmann::json& object, std::string path) : object_(object), path_(std::move(path)) {
    if (!object_.is_object())
      throw format_error(path_, "", "is " + shortened(object_) + ", expected an object of settings");
  }
  /// The object under `key` of another one.
  ConfigReader(const ConfigReader& outer, const char* key)
      : object_(outer.at(key)), path_(outer.path() + ": " + printable(key)) {
    if (!object_.is_object()) outer.refuse(key, "an object of settings");
  }

  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const {
    const auto found = object_.find(key);
    throw format_error(path_, printable(key),
                       "is " + (found == object_.end() ? "absent" : shortened(*found)) + ", expected " + expected);
  }
  bool has(const char* key) const { return contains(key) && !object_.at(key).is_null(); }
  bool contains(const char* key) const {
    read_->insert(key);
    return object_.contains(key);
  }
  const nlohmann::json& at(const char* key) const {
    if (!has(key)) refuse(key, "a value");
    return object_.at(key);
  }
  const nlohmann::json& object() const { return object_; }
  const std::string& path() const { return path_; }

  size count(const char* key) const {
    if (!has(key) || !object_.at(key).is_number_integer()) refuse(key, "a whole number");
    const nlohmann::json& value = object_.at(key);
    if (!is_whole(value)) refuse(key, "a number that is not negative");
    const auto result = value.get<std::uint64_t>();
    if (result >= (std::uint64_t{1} << 31)) refuse(key, "a number below 2^31");
    return static_cast<size>(result);
  }
  size positive(const char* key) const {
    const size value = count(key);
    if (value == 0) refuse(key, "at least 1");
    return value;
  }
  size count_or(const char* key, size fallback) const { return has(key) ? count(key) : fallback; }

  float number(const char* key) const {
    if (!has(key) || !object_.at(key).is_number()) refuse(key, "a number");
    const double value = object_.at(key).get<double>();
    if (!std::isfinite(value) || std::abs(value) > 1e30) refuse(key, "a number of at most 1e30");
    return static_cast<float>(value);
  }
  float number_or(const char* key, float fallback) const { return has(key) ? number(key) : fallback; }

  bool flag(const char* key) const {
    if (!has(key) || !object_.at(key).is_boolean()) refuse(key, "true or false");
    return object_.at(key).get<bool>();
  }
  bool flag_or(const char* key, bool fallback) const { return has(key) ? flag(key) : fallback; }

  std::string text_or(const char* key, const std::string& fallback) const {
    if (!has(key)) return fallback;
    if (!object_.at(key).is_string()) refuse(key, "a string");
    return object_.at(key).get<std::string>();
  }

  /// The keys that nobody has asked for.
  std::vector<std::string> unread() const {
    std::vector<std::string> keys;
    for (const auto& item : object_.items())
      if (!read_->contains(item.key())) keys.push_back(item.key());
    return keys;
  }

  /// Refuses any other value than `expected`; absent is fine.
  void only_text(const char* key, const std::string& expected) const {
    if (text_or(key, expected) != expected) refuse(key, expected);
  }
  void only_count(const char* key, size expected, const std::string& why = "") const {
    if (count_or(key, expected) != expected) refuse(key, std::to_string(expected) + why);
  }
  void only_flag(const char* key, bool expected, const std::string& why = "") const {
    if (flag_or(key, expected) != expected) refuse(key, (expected ? "true" : "false") + why);
  }
  void only_number(const char* key, float expected, const std::string& why = "") const {
    if (number_or(key, expected) != expected) refuse(key, std::to_string(expected) + why);
  }
  void only_absent(const char* key, const std::string& why = "") const {
    if (has(key)) refuse(key, "null or nothing" + why);
  }

 private:
  static std::string shortened(const nlohmann::json& value) {
    return printable(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), 100);
  }

  const nlohmann::json& object_;
  std::string path_;
  std::shared_ptr<std::set<std::string>> read_ = std::make_shared<std::set<std::string>>();  // shared by copies
};

/// Token ids under `key`, a number or a list of them; none where it is absent.
inline std::vector<id> token_ids(const ConfigReader& config, const char* key) {
  std::vector<id> result;
  if (!config.has(key)) return result;
  const auto add = [&](const nlohmann::json& item) {
    if (!is_whole(item) || item.get<std::uint64_t>() >= (std::uint64_t{1} << 31))
      config.refuse(key, "a token id or a list of them");
    result.push_back(static_cast<id>(item.get<std::uint64_t>()));
  };
  const nlohmann::json& value = config.at(key);
  if (value.is_array())
    for (const nlohmann::json& item : value) add(item);
  else
    add(value);
  return result;
}

/// Watches a JSON tree grow: refuses keys that come twice in an object (the tree itself would keep the last one
/// silently) and nesting of more than 64 levels.
class JsonGuard {
 public:
  explicit JsonGuard(const std::string& path) : path_(path) {}

  bool operator()(int depth, nlohmann::json::parse_event_t event, const nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (depth > 64) throw format_error(path_, "", "is nested more than 64 levels deep");
    if (event == Event::object_start) keys_.emplace_back();
    if (event == Event::object_end) keys_.pop_back();
    if (event != Event::key) return true;
    const std::string& key = value.get_ref<const std::string&>();
    if (!keys_.back().insert(key).second) throw format_error(path_, printable(key), "comes twice in the same object");
    return true;
  }

 private:
  const std::string& path_;
  std::vector<std::set<std::string>> keys_;
};

}  // namespace detail

/// The tree of JSON text. Throws format_error, naming `path` and the byte where parsing stopped, for what is not one
/// valid JSON value, nested more than 64 levels deep, or has a key twice in an object.
inline nlohmann::json json_from_text(std::string_view text, const std::string& path) {
  if (text.empty()) throw format_error(path, "", "is empty, expected JSON", 0);
  detail::refuse_nul(path, "", text);
  try {
    detail::JsonGuard guard(path);
    return nlohmann::json::parse(text, [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
      return guard(depth, event, value);
    });
  } catch (const nlohmann::json::parse_error& problem) {
    throw format_error(path, "", "is not valid JSON: " + detail::printable(problem.what()),
                       detail::larger<size>(problem.byte, 1) - 1);
  } catch (const nlohmann::json::exception& problem) {  // numbers that no type holds
    throw format_error(path, "", "is not valid JSON: " + detail::printable(problem.what()));
  }
}

/// The tree of a whole JSON file of at most `limit` bytes. Throws format_error for what is not a regular file or
/// longer, and as json_from_text.
inline nlohmann::json read_json_file(const std::string& path, size limit = size{1} << 24) {
  const MappedFile file(path);
  if (file.bytes() > limit)
    throw format_error(
        path, "", "has " + std::to_string(file.bytes()) + " bytes, more than the limit of " + std::to_string(limit));
  return json_from_text(file.text(), path);
}

}  // namespace k3
