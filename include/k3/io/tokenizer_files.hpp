// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

#include <k3/core/error.hpp>
#include <k3/core/types.hpp>
#include <k3/io/bpe.hpp>
#include <k3/io/mapped_file.hpp>
#include <k3/io/tensor_table.hpp>

namespace k3 {

/// A named id of the reserved block: an entry of `added_tokens_decoder` in tokenizer_config.json.
struct SpecialToken {
  id token;
  std::string name;     ///< `content`: the text it decodes to
  bool special = true;  ///< false where the text belongs to the answer, as for the markup of a message
};

namespace detail {

inline constexpr size reserved_ids = 256;

/// A file as a string. Throws format_error unless it is a regular file that can be read and has at most `limit` bytes.
inline std::string read_small_file(const std::string& path, std::uint64_t limit) {
  const MappedFile file(path);
  if (file.bytes() > limit) throw format_error(path, "", "is larger than " + std::to_string(limit) + " bytes", limit);
  return file.text();
}

/// A number written without sign, spaces or leading zeros.
inline std::optional<std::uint32_t> parse_count(std::string_view digits) {
  std::uint32_t value = 0;
  const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool whole = code == std::errc() && end == digits.data() + digits.size();
  if (!whole || (digits.size() > 1 && digits[0] == '0')) return std::nullopt;
  return value;
}

/// Appends what `text` encodes to `out`; false for a wrong character, length or padding, or bits that no encoder sets.
inline bool decode_base64(std::string_view text, std::string& out) {
  static constexpr std::array<signed char, 256> values = [] {
    constexpr std::string_view alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::array<signed char, 256> table{};
    table.fill(-1);
    for (size i = 0; i < alphabet.size(); ++i)
      table[static_cast<unsigned char>(alphabet[i])] = static_cast<signed char>(i);
    return table;
  }();
  if (text.empty() || text.size() % 4 != 0) return false;
  const size padding = text.back() != '=' ? 0 : text[text.size() - 2] != '=' ? 1 : 2;
  unsigned bits = 0, held = 0;
  for (const char c : text.substr(0, text.size() - padding)) {
    const int value = values[static_cast<unsigned char>(c)];
    if (value < 0) return false;
    bits = (bits << 6 | static_cast<unsigned>(value)) & 0xFFFu;
    held += 6;
    if (held >= 8) out += static_cast<char>(bits >> (held -= 8) & 0xFFu);
  }
  return (bits & ((1u << held) - 1)) == 0;
}

/// The ranks of a tiktoken.model file.
inline RankTable read_ranks(const std::string& path, std::string_view text) {
  struct Entry {
    size line = ~size{0}, begin = 0, length = 0;  // offset in the file, bytes in `store`
  };
  const size lines =
      static_cast<size>(std::count(text.begin(), text.end(), '\n')) + (!text.empty() && text.back() != '\n');
  if (lines > RankTable::max_tokens) throw format_error(path, "", "more than 2^24 lines", 0);
  std::vector<Entry> entries(lines);
  std::string store;
  for (size at = 0; at < text.size();) {
    const std::string_view line = text.substr(at, text.find('\n', at) - at);
    const size space = line.find(' ');
    if (space == line.npos) throw format_error(path, "", "a line that is not \"base64 rank\"", at);
    Entry entry{at, store.size(), 0};
    if (!decode_base64(line.substr(0, space), store)) throw format_error(path, "", "bad base64", at);
    entry.length = store.size() - entry.begin;
    const auto rank = parse_count(line.substr(space + 1));
    if (!rank) throw format_error(path, "", "bad rank", at + space + 1);
    const std::string which = "rank " + std::to_string(*rank);
    if (*rank >= lines)
      throw format_error(path, "", which + " in a file of " + std::to_string(lines) + " lines", at + space + 1);
    if (entries[*rank].line != ~size{0}) throw format_error(path, "", which + " twice", at + space + 1);
    entries[*rank] = entry;
    at += line.size() + 1;
  }
  RankTable table;
  for (const Entry& entry : entries) {
    const size before = table.count();
    const auto rank = table.add(std::string_view(store).substr(entry.begin, entry.length));
    if (rank != before) {
      throw format_error(path, "", "the same bytes as rank " + std::to_string(rank), entry.line);
    }
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char single = static_cast<char>(byte);
    if (table.find({&single, 1}) != RankTable::none) continue;
    throw format_error(path, "", "no token for the single byte " + std::to_string(byte), text.size());
  }
  return table;
}

/// Reads characters and counts them: the parser itself tells positions for syntax errors only.
struct CountedText {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at;
  size* read;

  reference operator*() const { return *at; }
  CountedText& operator++() { return ++at, ++*read, *this; }
  friend bool operator==(const CountedText& a, const CountedText& b) { return a.at == b.at; }
  friend bool operator!=(const CountedText& a, const CountedText& b) { return a.at != b.at; }
};

/// Text from a file as an error may show it: in quotation marks, without control characters, at most 200 bytes.
inline std::string quoted(const std::string& text) {
  return printable(nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
}

/// Parses JSON; `see_key(level, key, offset)` is told each key, level 1 for those of the outermost object. Throws
/// format_error for bad syntax, a key twice in the same object, and nesting deeper than 64.
template <class SeeKey>
nlohmann::json parse_json(const std::string& path, std::string_view text, SeeKey&& see_key) {
  using json = nlohmann::json;
  size read = 0;
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (depth > 64) throw format_error(path, "", "nested too deeply", read);
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key) {
      const std::string key = value.get<std::string>();
      if (!keys.back().insert(key).second) throw format_error(path, quoted(key), "key twice in one object", read);
      see_key(depth, key, read);
    }
    return true;
  };
  refuse_nul(path, "", text);
  const CountedText begin{text.data(), &read}, end{text.data() + text.size(), &read};
  try {
    return json::parse(begin, end, watch);
  } catch (const json::exception& bad) {
    throw format_error(path, "", printable(bad.what()), read);
  }
}

/// What is read of a tokenizer_config.json file.
struct TokenizerSettings {
  std::vector<SpecialToken> named;
  std::optional<size> max_length;
};

/// `model_max_length`: a whole number from 1 on. Absent, null and numbers from 2^31 on, such as the 1e30 that some
/// writers put there, are no limit.
inline std::optional<size> read_max_length(const std::string& path, const nlohmann::json& config, size offset) {
  const char* const name = "model_max_length";
  if (!config.contains(name) || config[name].is_null()) return std::nullopt;
  const nlohmann::json& value = config[name];
  const double number = value.is_number() ? value.get<double>() : 0;
  const bool whole = value.is_number_integer() || number >= 2147483648.0;
  if (!whole || number < 1) throw format_error(path, name, "is neither a whole number from 1 on nor null", offset);
  if (number >= 2147483648.0) return std::nullopt;
  return value.get<size>();
}

/// The named ids of a tokenizer_config.json file, and its limit.
inline TokenizerSettings read_tokenizer_config(const std::string& path, std::string_view text, size rank_count) {
  const std::string table = "added_tokens_decoder", unnamed = "<|reserved_token_";
  std::string section;
  std::unordered_map<std::string, size> offsets;  // behind the keys of the table
  size max_length = 0;                            // behind that key
  const auto see_key = [&](int level, const std::string& key, size offset) {
    if (level == 1) section = key;
    if (level == 1 && key == "model_max_length") max_length = offset;
    if (level == 2 && section == table) offsets[key] = offset;
  };
  const nlohmann::json config = parse_json(path, text, see_key);
  if (!config.is_object() || !config.contains(table) || !config[table].is_object()) {
    throw format_error(path, table, "is no object of this file", 0);
  }
  TokenizerSettings result;
  std::set<std::string> names;
  for (const auto& item : config[table].items()) {
    const std::string& key = item.key();
    const nlohmann::json& entry = item.value();
    const auto check = [&](bool good, const std::string& what) {
      if (!good) throw format_error(path, table + "." + quoted(key), what, offsets[key]);
    };
    const auto token = parse_count(key);
    check(token && *token >= rank_count && *token < rank_count + reserved_ids,
          "is not one of the 256 ids from " + std::to_string(rank_count));
    check(entry.is_object() && entry.contains("content") && entry["content"].is_string(), "has no text as content");
    check(!entry.contains("special") || entry["special"].is_boolean(), "special is neither true nor false");
    const std::string name = entry["content"].get<std::string>();
    check(!name.empty() && name.size() <= 1024, "content is not 1 to 1024 bytes");
    check(names.insert(name).second, "content " + quoted(name) + " twice");
    check(name.compare(0, unnamed.size(), unnamed) != 0 || name == unnamed + key + "|>",
          "content is the name of another id");
    result.named.push_back({static_cast<id>(*token), name, entry.value("special", true)});
  }
  result.max_length = read_max_length(path, config, max_length);
  return result;
}

}  // namespace detail
}  // namespace k3
