// SPDX-License-Identifier: Apache-2.0
// Text for the tokenizer, valid UTF-8 or not.

#include <k3/io/tokenizer.hpp>
#include <k3/io/tokenizer_writer.hpp>
#include <k3/io/utf8_stream.hpp>

#include "fuzz.hpp"

void run_one(std::string_view input) {
  static const k3::Tokenizer tokenizer(k3::made_up_vocabulary(4096), k3::kimi_k3_specials(4096));
  for (const k3::Specials mode : {k3::Specials::plain, k3::Specials::markup, k3::Specials::named}) {
    const std::vector<k3::id> ids = tokenizer.encode(input, mode);
    require_property(tokenizer.decode(ids) == input, "decode(encode(x)) is x");
    k3::Utf8Stream stream;
    std::string text;
    for (const k3::id token : ids) {
      if (mode == k3::Specials::plain) require_property(!tokenizer.is_reserved(token), "plain text has no reserved id");
      const std::string part = stream.push(tokenizer.token_bytes(token));
      require_property(k3::detail::valid_prefix(part) == part.size(), "streamed text is UTF-8");
      text += part;
    }
    require_property(text + stream.flush() == k3::to_text(input), "streamed text does not depend on the tokens");
  }
}
