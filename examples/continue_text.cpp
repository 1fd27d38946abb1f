// SPDX-License-Identifier: Apache-2.0
// Opens a checkpoint and continues a text: the program of the README, for the root of the project.
// example-begin continue_text
#include <iostream>

#include <k3/io/checkpoint.hpp>
#include <k3/io/tokenizer.hpp>
#include <k3/model/greedy_decode.hpp>

int main() {
  auto model = k3::from_pretrained("examples/data/austen");
  auto tokenizer = k3::Tokenizer::from_directory("examples/data/austen");
  auto result = k3::greedy_decode(k3::host{}, model, tokenizer.encode("Mr. Darcy"), {36, model.config.eos_token_ids});
  std::cout << "Mr. Darcy" << tokenizer.decode(result.tokens) << "\n";
}
// example-end continue_text
