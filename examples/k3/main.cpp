// SPDX-License-Identifier: Apache-2.0
// k3: looks into a checkpoint, generates, chats, and makes checkpoints of random weights.

#include "tool.hpp"

int main(int argc, char** argv) {
  CLI::App app{"Kimi K3 checkpoints"};
  app.require_subcommand(1);
  app.footer(
      "Results go to standard output, everything else to standard error.\nExit status: 0; 2 for a mistake in the "
      "call; 130 after Ctrl-C; 1 for anything else.");
  const std::pair<const char*, Command> commands[] = {{"inspect", describe_inspect(app)},
                                                      {"generate", describe_generate(app)},
                                                      {"chat", describe_chat(app)},
                                                      {"make-checkpoint", describe_make_checkpoint(app)}};
  return run_program(app, argc, argv, "k3", [&] {
    try {
      for (const auto& [name, command] : commands)
        if (app.got_subcommand(name)) return command();
    } catch (const Interrupted&) {
      return interrupted_status;
    } catch (const std::exception&) {
      // A write that waited for its reader fails at Ctrl-C.
      if (!interrupted() || std::cout) throw;
      return interrupted_status;
    }
    return 2;
  });
}
