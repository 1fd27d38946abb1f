// SPDX-License-Identifier: Apache-2.0
// Opens a checkpoint and continues a text: the program of the README. Usage: continue_text [MODEL_DIR]
// example-begin continue_text
#include <iostream>

#include <k3/io/checkpoint.hpp>
#include <k3/io/tokenizer.hpp>
#include <k3/model/greedy_decode.hpp>

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "examples/data/austen", prompt = "Mr. Darcy";
  const auto model = k3::from_pretrained(folder);
  const auto tokenizer = k3::Tokenizer::from_directory(folder);
  const auto result = k3::greedy_decode(k3::host{}, model, tokenizer.encode(prompt), {.max_new = 36});
  std::cout << prompt << tokenizer.decode(result.tokens) << "\n";
  return result.tokens.size() == 36 ? 0 : 1;
}
// example-end continue_text
