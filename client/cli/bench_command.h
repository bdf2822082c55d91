// `zeroshard bench nvme PATH`: the one command that asks no daemon.
#ifndef ZEROSHARD_CLIENT_CLI_BENCH_COMMAND_H_
#define ZEROSHARD_CLIENT_CLI_BENCH_COMMAND_H_

#include <CLI/CLI.hpp>
#include <functional>

namespace zeroshard {

// Adds it to the program. When it is given, `chosen` becomes the function that runs it and returns
// the exit code.
void AddBenchCommand(CLI::App& app, std::function<int()>& chosen);

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_CLI_BENCH_COMMAND_H_
