// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <k3/core/error.hpp>
#include <k3/core/types.hpp>
#include <k3/io/bpe.hpp>
#include <k3/io/pre_split.hpp>
#include <k3/io/tokenizer_files.hpp>

namespace k3 {

/// Which ids of the reserved block `Tokenizer::encode` may produce.
enum class Specials {
  plain,   ///< none: text is only text. For everything that comes from outside.
  markup,  ///< the four control strings <|open|>, <|close|>, <|sep|>, <|end_of_msg|>
  named    ///< every named id
};

/// What `Tokenizer::decode` makes of reserved ids.
enum class SpecialText {
  keep,  ///< their names
  skip   ///< nothing for those with `special` set and for unnamed ones; the names of the others
};

namespace detail {

/// Finds the names of some special tokens in text.
class SpecialMatcher {
 public:
  struct Hit {
    size at, length;
    id token;
  };

  void add(const std::string& name, id token) {
    names_.emplace_back(name, token);
    std::stable_sort(names_.begin(), names_.end(), [](auto& a, auto& b) { return a.first.size() > b.first.size(); });
    first_[static_cast<unsigned char>(name[0])] = true;
  }

  /// The earliest name at or after `from`, the longest of those that begin there.
  std::optional<Hit> find(std::string_view text, size from) const {
    for (size at = from; at < text.size(); ++at) {
      if (!first_[static_cast<unsigned char>(text[at])]) continue;
      for (const auto& [name, token] : names_) {
        if (text.compare(at, name.size(), name) == 0) return Hit{at, name.size(), token};
      }
    }
    return std::nullopt;
  }

 private:
  std::vector<std::pair<std::string, id>> names_;  // longest first
  std::array<bool, 256> first_{};
};

}  // namespace detail

/// Kimi K3's tokenizer: byte-level BPE by ranks over the pieces of PreSplitter, and a block of 256 reserved ids right
/// after the ranks. Nothing is ever prepended or appended to a text.
///
/// Text is UTF-8. Bytes that are not are encoded all the same, each stretch of them as a piece of its own, so
/// `decode(encode(x))` is x for every x and in every mode. Immutable; may be shared between threads. The full
/// vocabulary loads in about 0.03 s and takes about 7 MB. Sources: `tiktoken.model`, `tokenizer_config.json`.
class Tokenizer {
 public:
  /// Ids from the last rank on that stand for no text: the named ones, and `<|reserved_token_ID|>`.
  static constexpr size reserved = detail::reserved_ids;

  /// From `path`/tiktoken.model and `path`/tokenizer_config.json. The first must be lines "base64 rank" with every rank
  /// from 0 to their number less 1 once, no bytes twice, and each of the 256 single bytes among them; the second must
  /// name reserved ids only, no two alike; its model_max_length is a whole number or nothing. Throws format_error with
  /// path and byte offset.
  static Tokenizer from_directory(const std::string& path) {
    const std::string model = path + "/tiktoken.model", config = path + "/tokenizer_config.json";
    RankTable ranks = detail::read_ranks(model, detail::read_small_file(model, std::uint64_t{256} << 20));
    const detail::TokenizerSettings settings =
        detail::read_tokenizer_config(config, detail::read_small_file(config, std::uint64_t{16} << 20), ranks.count());
    Tokenizer result(std::move(ranks), settings.named);
    result.max_length_ = settings.max_length;
    return result;
  }

  /// From ranks in memory. Throws invalid_argument for a named id outside the reserved block, named twice, or with an
  /// empty or taken name. Single bytes may be missing here; text that has them cannot be encoded.
  Tokenizer(RankTable ranks, const std::vector<SpecialToken>& named)
      : ranks_(std::move(ranks)),
        splitter_(std::make_shared<const PreSplitter>()),
        names_(reserved),
        skipped_(reserved, true) {
    for (const SpecialToken& special : named) name(special);
    for (size i = 0; i < reserved; ++i) {
      if (names_[i].empty()) names_[i] = "<|reserved_token_" + std::to_string(ranks_.count() + i) + "|>";
      const bool fresh = ids_.emplace(names_[i], static_cast<id>(ranks_.count() + i)).second;
      detail::require(
          fresh, "Tokenizer", "special name", [&] { return detail::printable(names_[i]); }, "256 different names");
    }
    for (const SpecialToken& special : named) named_.add(special.name, special.token);
    for (const char* control : control_strings) {
      if (const auto token = special_id(control))
        markup_.add(control, *token);
      else
        complete_markup_ = false;
    }
  }

  /// From byte strings, rank by rank. Throws invalid_argument for an empty or repeated one, and as above.
  Tokenizer(const std::vector<std::string>& tokens, const std::vector<SpecialToken>& named)
      : Tokenizer(table_of(tokens), named) {}

  /// Never moved from: moving one copies it, so that an immutable tokenizer stays what it is.
  Tokenizer(const Tokenizer&) = default;
  Tokenizer& operator=(const Tokenizer&) = default;

  /// Ranks and reserved ids together: 163,840 for Kimi K3.
  size vocab_size() const noexcept { return ranks_.count() + reserved; }
  /// Ids that stand for bytes: 163,584 for Kimi K3; the reserved block begins here.
  size rank_count() const noexcept { return ranks_.count(); }
  /// The tokens that a text of this vocabulary's model may have, where its files say so; nothing here depends on it.
  /// Source: `model_max_length` of tokenizer_config.json.
  std::optional<size> model_max_length() const noexcept { return max_length_; }
  /// True for an id of the reserved block.
  bool is_reserved(id token) const noexcept {
    return token >= 0 && static_cast<size>(token) >= rank_count() && static_cast<size>(token) < vocab_size();
  }

  /// The reserved id of this name, `[EOS]` for instance; unnamed ids have the name `<|reserved_token_ID|>`.
  std::optional<id> special_id(std::string_view name) const {
    const auto found = ids_.find(std::string(name));
    return found == ids_.end() ? std::nullopt : std::optional<id>(found->second);
  }

  /// The bytes an id decodes to, valid as long as the tokenizer. They may end inside a character: see Utf8Stream.
  /// Throws invalid_argument for an id outside the vocabulary.
  std::string_view token_bytes(id token) const {
    detail::require(token >= 0 && static_cast<size>(token) < vocab_size(), "Tokenizer::token_bytes", "token", token,
                    "0 to " + std::to_string(vocab_size() - 1));
    if (is_reserved(token)) return names_[static_cast<size>(token) - rank_count()];
    return ranks_.bytes(static_cast<std::uint32_t>(token));
  }

  /// The ids of `text`. Names that the mode resolves are found first, from the left, the longest where several begin;
  /// what lies between is encoded on its own, so that no merge reaches across a special id. Throws invalid_argument in
  /// markup mode if the vocabulary lacks a control string, and for a byte that is no token.
  ///
  /// Cost: linear in the text (n log n within a piece); nothing is cached. English prose, 163,584 ranks, one thread: 20
  /// to 40 MB/s.
  std::vector<id> encode(std::string_view text, Specials mode = Specials::plain) const {
    detail::require(mode != Specials::markup || complete_markup_, "Tokenizer::encode", "mode", "markup",
                    "a vocabulary that names all four control strings");
    std::vector<id> out;
    out.reserve(text.size() / 3);
    BpeMerger merger;
    const auto encode_piece = [&](std::string_view piece) { merger.encode(ranks_, piece, out); };
    size from = 0;
    if (mode != Specials::plain) {
      const detail::SpecialMatcher& matcher = mode == Specials::markup ? markup_ : named_;
      while (const auto hit = matcher.find(text, from)) {
        splitter_->split(text.substr(from, hit->at - from), encode_piece);
        out.push_back(hit->token);
        from = hit->at + hit->length;
      }
    }
    splitter_->split(text.substr(from), encode_piece);
    return out;
  }

  /// The bytes of all `tokens` in a row, usually but not necessarily UTF-8 (`to_text` mends it). Throws
  /// invalid_argument for an id outside the vocabulary.
  std::string decode(std::span<const id> tokens, SpecialText specials = SpecialText::keep) const {
    std::string out;
    for (const id token : tokens) {
      const std::string_view bytes = token_bytes(token);
      const bool leave_out =
          specials == SpecialText::skip && is_reserved(token) && skipped_[static_cast<size>(token) - rank_count()];
      if (!leave_out) out += bytes;
    }
    return out;
  }

 private:
  static constexpr std::array<const char*, 4> control_strings = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"};

  static RankTable table_of(const std::vector<std::string>& tokens) {
    RankTable table;
    for (size i = 0; i < tokens.size(); ++i) {
      detail::require(table.add(tokens[i]) == i, "Tokenizer", "tokens", "the same bytes twice at " + std::to_string(i),
                      "different byte strings");
    }
    return table;
  }

  void name(const SpecialToken& special) {
    detail::require(is_reserved(special.token), "Tokenizer", "special id", special.token,
                    "one of the 256 from " + std::to_string(rank_count()));
    const size slot = static_cast<size>(special.token) - rank_count();
    detail::require(!special.name.empty() && names_[slot].empty(), "Tokenizer", "special name",
                    '"' + detail::printable(special.name) + '"',
                    "one name, not empty, for id " + std::to_string(special.token));
    names_[slot] = special.name;
    skipped_[slot] = special.special;
  }

  RankTable ranks_;
  std::shared_ptr<const PreSplitter> splitter_;
  std::vector<std::string> names_;           // [reserved]
  std::vector<bool> skipped_;                // [reserved]
  std::unordered_map<std::string, id> ids_;  // of all 256 names
  detail::SpecialMatcher markup_, named_;
  bool complete_markup_ = true;
  std::optional<size> max_length_;
};

}  // namespace k3
