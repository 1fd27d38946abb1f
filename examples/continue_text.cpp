// SPDX-License-Identifier: Apache-2.0
// Opens a checkpoint and continues a text: the program of the README. Usage: continue_text [MODEL_DIR]
// example-begin continue_text
#include <iostream>

#include <k3/io/checkpoint.hpp>
#include <k3/io/tokenizer.hpp>
#include <k3/model/greedy_decode.hpp>

int main(int argc, char** argv) try {
  const std::string folder = argc > 1 ? argv[1] : "examples/data/austen", prompt = "Mr. Darcy";
  const auto model = k3::from_pretrained(folder);
  const auto tokenizer = k3::Tokenizer::from_directory(folder);
  const k3::GreedyOptions options{.max_new = 36, .eos = model.config.eos_token_ids};
  const auto result = k3::greedy_decode(k3::host{}, model, tokenizer.encode(prompt), options);
  std::cout << prompt << tokenizer.decode(result.tokens) << "\n";
} catch (const k3::error& problem) {
  std::cerr << problem.what() << "\n";
  return 1;
}
// example-end continue_text
