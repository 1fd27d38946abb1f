// SPDX-License-Identifier: Apache-2.0

#include "printer.hpp"

#include <unistd.h>

#include "../command_line.hpp"

namespace {

const char* part_name(k3::ChatPart part) {
  constexpr const char* names[] = {"think", "response", "argument", "other", "tag"};
  return names[static_cast<std::size_t>(part)];
}

/// What a terminal may be given: text that moves no cursor and sets no colour.
std::string harmless(const std::string& text) {
  std::string result;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte >= 0x20 && byte != 0x7F) || c == '\n' || c == '\t')
      result += c;
    else
      result += "\xEF\xBF\xBD";
  }
  // U+0080 to U+009F are control characters too: C2 80 to C2 9F.
  for (std::size_t at = 0; (at = result.find('\xC2', at)) != std::string::npos; ++at)
    if (at + 1 < result.size() && static_cast<unsigned char>(result[at + 1]) < 0xA0)
      result.replace(at, 2, "\xEF\xBF\xBD");
  return result;
}

void print_piece(const char* part, const std::string& text) {
  print_json_line("\"part\":\"" + std::string(part) + "\",\"text\":" + nlohmann::json(text).dump());
}

}  // namespace

OutputForm output_form(bool json) {
  if (json) return OutputForm::json;
  return isatty(STDOUT_FILENO) ? OutputForm::terminal : OutputForm::plain;
}

void print_json_line(const std::string& members) {
  std::cout << "{" << members << "}" << std::endl;
  require_output();
}

void ReplyPrinter::show(const std::vector<k3::ChatPiece>& pieces) {
  for (const k3::ChatPiece& piece : pieces) {
    if (form_ == OutputForm::json)
      print_piece(part_name(piece.part), piece.text);
    else
      show(piece.part, piece.text);
  }
}

void ReplyPrinter::show(k3::ChatPart part, const std::string& text) {
  // Of the markup only what a call is made of is of interest.
  const bool call =
      part == k3::ChatPart::tag &&
      (text.find("call") != text.npos || text.find("argument") != text.npos || text.find("tools") != text.npos);
  if (part == k3::ChatPart::tag && !call) return;
  if (call) part = k3::ChatPart::argument;
  if (part != part_) enter(part);
  std::cout << (form_ == OutputForm::terminal ? harmless(text) : text) << std::flush;
  line_start_ = text.back() == '\n';
  require_output();
}

void ReplyPrinter::enter(k3::ChatPart part) {
  const auto line = [&](const char* text) {
    std::cout << (line_start_ ? "" : "\n") << text;
    line_start_ = true;
  };
  if (form_ == OutputForm::terminal) {
    if (part_ == k3::ChatPart::think) std::cout << "\033[22m";
    if (part_ != k3::ChatPart::tag) line("");
    if (part == k3::ChatPart::think) std::cout << "\033[2m";
  } else {
    if (part_ == k3::ChatPart::think) line("</think>\n");
    if (part == k3::ChatPart::think) line("<think>\n");
    if (part_ != k3::ChatPart::tag && part != k3::ChatPart::think) line("");
  }
  part_ = part;
}

ReplyPrinter::~ReplyPrinter() {
  if (form_ != OutputForm::terminal || part_ == k3::ChatPart::tag) return;
  std::cout << (part_ == k3::ChatPart::think ? "\033[22m" : "") << (line_start_ ? "" : "\n") << std::flush;
}

void ReplyPrinter::finish() {
  if (form_ == OutputForm::json) return;
  if (part_ != k3::ChatPart::tag) enter(k3::ChatPart::tag);
  if (!line_start_) std::cout << "\n";
  std::cout << std::flush;
  line_start_ = true;
  require_output();
}

void TextPrinter::show(k3::id token) {
  if (!tokenizer_) {
    if (form_ == OutputForm::json)
      print_json_line("\"token\":" + std::to_string(token));
    else
      std::cout << (first_ ? "" : " ") << token << std::flush;
  } else if (std::find(eos_.begin(), eos_.end(), token) == eos_.end()) {
    show(stream_.push(token_text(*tokenizer_, token)));
  }
  first_ = false;
  require_output();
}

void TextPrinter::show(const std::string& text) {
  if (text.empty()) return;
  if (form_ == OutputForm::json)
    print_piece("text", text);
  else
    std::cout << (form_ == OutputForm::terminal ? harmless(text) : text) << std::flush;
}

void TextPrinter::finish() {
  show(stream_.flush());
  if (form_ != OutputForm::json) std::cout << std::endl;
  require_output();
}
