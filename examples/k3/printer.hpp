// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <k3/io/chat.hpp>
#include <k3/io/utf8_stream.hpp>

/// How text goes to standard output.
enum class OutputForm {
  terminal,  ///< thinking dimmed; control characters shown as U+FFFD
  plain,     ///< thinking between the lines <think> and </think>
  json       ///< a line per piece: {"part": ..., "text": ...}
};

/// JSON where asked for, otherwise what standard output is.
OutputForm output_form(bool json);

/// A model's reply on standard output, piece by piece.
class ReplyPrinter {
 public:
  explicit ReplyPrinter(OutputForm form) : form_(form) {}
  ReplyPrinter(const ReplyPrinter&) = delete;
  ReplyPrinter& operator=(const ReplyPrinter&) = delete;
  /// Where an error ended the reply, the terminal is not left dimmed.
  ~ReplyPrinter();

  void show(const std::vector<k3::ChatPiece>& pieces);
  /// Ends the reply: resets the terminal, begins a new line.
  void finish();

 private:
  void show(k3::ChatPart part, const std::string& text);
  void enter(k3::ChatPart part);

  OutputForm form_;
  k3::ChatPart part_ = k3::ChatPart::tag;  // of what was shown last
  bool line_start_ = true;
};

/// Text that is not a reply: the continuation of a prompt.
class TextPrinter {
 public:
  TextPrinter(OutputForm form, const std::optional<k3::Tokenizer>& tokenizer, const std::vector<k3::id>& eos)
      : form_(form), tokenizer_(tokenizer), eos_(eos) {}

  void show(k3::id token);
  void finish();

 private:
  void show(const std::string& text);

  OutputForm form_;
  const std::optional<k3::Tokenizer>& tokenizer_;
  const std::vector<k3::id>& eos_;
  k3::Utf8Stream stream_;
  bool first_ = true;
};

/// The next token of a reply; an id that the tokenizer does not have stands for no text.
inline std::vector<k3::ChatPiece> push_token(k3::ChatParser& parser, const k3::Tokenizer& tokenizer, k3::id token) {
  if (static_cast<std::size_t>(token) < tokenizer.vocab_size()) return parser.push(token);
  return {{k3::ChatPart::other, "\xEF\xBF\xBD"}};
}

/// A line of JSON.
void print_json_line(const std::string& members);
