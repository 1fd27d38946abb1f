// SPDX-License-Identifier: Apache-2.0
// A program that uses k3-io: the tokens of a text, by the tokenizer of a checkpoint's folder.
#include <cstdio>
#include <exception>
#include <string>

#include <k3/io/tokenizer.hpp>

int main(int argc, char** argv) try {
  if (argc != 3) {
    std::fprintf(stderr, "usage: tokens MODEL_DIR TEXT\n");
    return 2;
  }
  const k3::Tokenizer tokenizer = k3::Tokenizer::from_directory(argv[1]);
  const std::string text = argv[2];
  const auto tokens = tokenizer.encode(text);
  for (const k3::id token : tokens) std::printf("%d ", token);
  std::printf("\n");
  return tokenizer.decode(tokens) == text ? 0 : 1;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
