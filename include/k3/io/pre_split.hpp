// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <oniguruma.h>

#include <k3/core/error.hpp>
#include <k3/core/types.hpp>
#include <k3/io/utf8_stream.hpp>

namespace k3 {
namespace detail {

/// The rules in the order in which they are tried; at every position one of them matches at least one character.
inline const std::string& split_pattern() {
  static const std::string pattern = [] {
    const std::string prefix = R"([^\r\n\p{L}\p{N}]?)";
    const std::string upper = R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]])";
    const std::string lower = R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]])";
    // Written out instead of (?i:...): U+017F, long s, is the one letter outside ASCII that folds to one of these.
    const std::string contraction = "(?:'(?:[sS\xC5\xBFtTmMdD]|[rR][eE]|[vV][eE]|[lL][lL]))?";
    const std::string rules[] = {
        R"(\p{Han}+)",                                     // a run of Han
        prefix + upper + "*" + lower + "+" + contraction,  // a word that ends in lower case
        prefix + upper + "+" + lower + "*" + contraction,  // a word in upper case
        R"(\p{N}{1,3})",                                   // up to three digits
        R"( ?[^\p{White_Space}\p{L}\p{N}]+[\r\n]*)",       // punctuation
        R"(\p{White_Space}*[\r\n]+)",                      // white space up to its last line end
        R"(\p{White_Space}+(?!\P{White_Space}))",          // white space, less the last before a word
        R"(\p{White_Space}+)"                              // white space
    };
    std::string joined;
    for (const std::string& rule : rules) joined += (joined.empty() ? "" : "|") + rule;
    return joined;
  }();
  return pattern;
}

[[noreturn]] inline void throw_onig(const char* doing, int code) {
  OnigUChar text[ONIG_MAX_ERROR_MESSAGE_LEN] = {};
  const int length = onig_error_code_to_str(text, code);
  throw error(std::string("PreSplitter: ") + doing + ": " +
              std::string(reinterpret_cast<const char*>(text), static_cast<size>(length < 0 ? 0 : length)));
}

/// White space for the length guard: Unicode White_Space and the four separators U+001C to U+001F.
inline bool guard_space(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
         c == 0x202F || c == 0x205F || c == 0x3000;
}

}  // namespace detail

/// Cuts text into the pieces that byte-pair merging never crosses. At each position the first of these rules that
/// matches: a run of Han; a word ending in lower case; a word in upper case (either with one leading character that is
/// no letter, digit or line end, and an English contraction: 's 't 're 've 'm 'll 'd in any case); one to three digits;
/// punctuation with an optional space before and line ends after; white space up to its last line end; white space less
/// its last character before a word; white space.
///
/// Guards come first: text is cut every 400,000 characters, and a run of white space or of anything else after 25,000.
/// Bytes that are not UTF-8 are pieces of their own, so that no byte is lost. Linear time: a match looks at 50,001
/// characters at most. Objects are immutable and may be shared between threads. Character classes are those of
/// Oniguruma's Unicode version.
class PreSplitter {
 public:
  static constexpr size max_characters = 400'000;  ///< between two cuts
  static constexpr size max_run = 25'000;          ///< characters of one class, white space or not, without a cut

  /// Compiles the rules. Throws k3::error with Oniguruma's message.
  PreSplitter() : regex_(compile()) {}

  /// Calls `visit(std::string_view)` with each piece of `text` in order; together they are `text`. Throws k3::error
  /// where Oniguruma fails (out of memory).
  template <class Visit>
  void split(std::string_view text, Visit&& visit) const {
    while (!text.empty()) {
      const size valid = detail::valid_prefix(text);
      guard(text.substr(0, valid), [&](std::string_view part) { match(part, visit); });
      text.remove_prefix(valid);
      size broken = 0;
      while (broken < text.size() && broken < max_run) {
        const detail::Utf8Step step = detail::utf8_step(text.substr(broken));
        if (step.kind == detail::Utf8Kind::valid) break;
        broken += step.length;
      }
      if (broken > 0) visit(text.substr(0, broken));
      text.remove_prefix(broken);
    }
  }

 private:
  struct FreeRegex {
    void operator()(regex_t* regex) const noexcept { onig_free(regex); }
  };
  struct FreeParam {
    void operator()(OnigMatchParam* param) const noexcept { onig_free_match_param(param); }
  };
  using Regex = std::unique_ptr<regex_t, FreeRegex>;

  static const OnigUChar* units(const char* text) { return reinterpret_cast<const OnigUChar*>(text); }

  static Regex compile() {
    // Initialised by whoever comes first; the language makes the others wait.
    static const int ready = [] {
      OnigEncoding encodings[] = {ONIG_ENCODING_UTF8};
      return onig_initialize(encodings, 1);
    }();
    if (ready != ONIG_NORMAL) detail::throw_onig("initialisation", ready);
    const std::string& pattern = detail::split_pattern();
    regex_t* regex = nullptr;
    const int code = onig_new(&regex, units(pattern.data()), units(pattern.data() + pattern.size()), ONIG_OPTION_NONE,
                              ONIG_ENCODING_UTF8, ONIG_SYNTAX_ONIGURUMA, nullptr);
    if (code != ONIG_NORMAL) detail::throw_onig("compiling the rules", code);
    return Regex(regex);
  }

  /// Visits the parts of well-formed `text` between the guards' cuts.
  template <class Visit>
  static void guard(std::string_view text, Visit&& visit) {
    if (text.size() <= max_run) {
      if (!text.empty()) visit(text);
      return;
    }
    size begin = 0, characters = 0, run = 0;  // since the last cut; of one class
    bool space = false;
    for (size at = 0; at < text.size();) {
      const detail::Utf8Step step = detail::utf8_step(text.substr(at));
      const bool is_space = detail::guard_space(step.code);
      const bool full = characters == max_characters;
      run = is_space != space ? 1 : run + 1;
      space = is_space;
      if (full) characters = 0;
      if (full || run > max_run) {
        visit(text.substr(begin, at - begin));
        begin = at;
        run = 1;
      }
      ++characters;
      at += step.length;
    }
    visit(text.substr(begin));
  }

  /// Visits the pieces of `text` by the rules.
  template <class Visit>
  void match(std::string_view text, Visit&& visit) const {
    const std::unique_ptr<OnigMatchParam, FreeParam> param(onig_new_match_param());
    if (!param) detail::throw_onig("matching", ONIGERR_MEMORY);
    onig_initialize_match_param(param.get());
    // The process-wide limits are the application's; a match here is linear, and its text bounded by the guards.
    onig_set_retry_limit_in_match_of_match_param(param.get(), ~0ul);
    onig_set_retry_limit_in_search_of_match_param(param.get(), 0);  // 0: none
    onig_set_match_stack_limit_size_of_match_param(param.get(), 0);
    const OnigUChar* const begin = units(text.data());
    const OnigUChar* const end = begin + text.size();
    for (size at = 0; at < text.size();) {
      const int length =
          onig_match_with_param(regex_.get(), begin, end, begin + at, nullptr, ONIG_OPTION_NONE, param.get());
      if (length <= 0) detail::throw_onig("matching", length < 0 ? length : ONIG_MISMATCH);
      visit(text.substr(at, static_cast<size>(length)));
      at += static_cast<size>(length);
    }
  }

  Regex regex_;
};

}  // namespace k3
