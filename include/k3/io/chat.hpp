// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The chat format of Kimi K3: conversations to ids (chat_format.hpp), a model's output to thinking, response and tool
/// calls as it comes (chat_parser.hpp), conversations from JSON (chat_json.hpp).
///
///     const std::vector<k3::id> prompt = k3::encode_chat(tokenizer, {{k3::ChatRole::user, "Hi"}});
///     k3::ChatParser parser(tokenizer, true);
///     for (const k3::ChatPiece& piece : parser.push(token)) show(piece.part, piece.text);

#include <k3/io/chat_format.hpp>
#include <k3/io/chat_json.hpp>
#include <k3/io/chat_parser.hpp>
