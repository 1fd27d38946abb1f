// SPDX-License-Identifier: Apache-2.0
// tiktoken.model; behind a first byte '{', tokenizer_config.json.

#include <k3/io/tokenizer.hpp>
#include <k3/io/tokenizer_writer.hpp>

#include "fuzz.hpp"

void run_one(std::string_view input) {
  try {
    if (!input.empty() && input[0] == '{') {
      const auto [specials, max_length] = k3::detail::read_tokenizer_config("tokenizer_config.json", input, 256);
      require_property(!max_length || (*max_length > 0 && *max_length < (1u << 31)), "a limit can be one");
      const k3::Tokenizer tokenizer(k3::made_up_vocabulary(256), specials);
      for (const k3::SpecialToken& special : specials)
        require_property(tokenizer.special_id(special.name) == special.token, "a name has its id");
      return;
    }
    const k3::RankTable ranks = k3::detail::read_ranks("tiktoken.model", input);
    std::vector<std::string> tokens;
    for (std::uint32_t rank = 0; rank < ranks.count(); ++rank) tokens.emplace_back(ranks.bytes(rank));
    for (std::uint32_t rank = 0; rank < ranks.count(); ++rank)
      require_property(ranks.find(tokens[rank]) == rank, "bytes have their rank");
    const k3::RankTable again = k3::detail::read_ranks("again", k3::tiktoken_text(tokens));
    require_property(again.count() == ranks.count(), "the vocabulary survives the writer");
  } catch (const k3::format_error&) {
  } catch (const k3::invalid_argument& problem) {
    // A name of tokenizer_config.json that another id has by default.
    require_property(problem.operation() == "Tokenizer", "vocabularies are refused by Tokenizer alone");
  }
}
