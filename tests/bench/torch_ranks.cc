#include "tests/bench/torch_ranks.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard::bench {
namespace {

constexpr char kPeers[] = "tests/bench/peers";
constexpr char kScript[] = "tests/bench/reduce_torch.py";

}  // namespace

absl::StatusOr<std::string> TorchRanks::Python() {
  if (access(kPeers, X_OK) == 0) {
    FILE* pipe = popen(absl::StrCat(kPeers, " --python 2>/dev/null").c_str(), "r");
    if (pipe == nullptr) return ErrnoError(errno, "popen", kPeers);
    char line[4096] = {};
    const bool printed = fgets(line, sizeof(line), pipe) != nullptr;
    if (pclose(pipe) == 0 && printed) {
      std::string path = line;
      while (!path.empty() && path.back() == '\n') path.pop_back();
      return path;
    }
  }
  return absl::NotFoundError("no environment of the peers: run tests/bench/peers");
}

absl::StatusOr<std::unique_ptr<TorchRanks>> TorchRanks::Start(const std::string& python,
                                                              uint32_t ranks, uint64_t elements) {
  std::unique_ptr<TorchRanks> torch(new TorchRanks());
  int to[2], from[2];
  if (pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0) {
    return ErrnoError(errno, "pipe2", kScript);
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
  std::vector<std::string> words = {python, kScript, absl::StrCat("--ranks=", ranks),
                                    absl::StrCat("--elements=", elements)};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const int error =
      posix_spawn(&torch->pid_, python.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(to[0]);
  close(from[1]);
  torch->input_ = fdopen(to[1], "w");
  torch->output_ = fdopen(from[0], "r");
  if (error != 0) {
    torch->pid_ = -1;
    return ErrnoError(error, "posix_spawn", python);
  }
  std::istringstream reply(torch->ReadLine());
  std::string word;
  if (!(reply >> word) || word != "ready") {
    return absl::UnavailableError("PyTorch's ranks did not start; their message is above");
  }
  std::getline(reply >> std::ws, torch->way_);
  return torch;
}

TorchRanks::~TorchRanks() {
  // The end of its input ends it.
  if (input_ != nullptr) fclose(input_);
  if (output_ != nullptr) fclose(output_);
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
}

std::string TorchRanks::ReadLine() {
  std::string line;
  for (int c; (c = fgetc(output_)) != EOF && c != '\n';) line.push_back(static_cast<char>(c));
  return line;
}

std::vector<double> TorchRanks::Run(int count) {
  std::vector<double> seconds;
  if (fprintf(input_, "run %d\n", count) < 0 || fflush(input_) != 0) return seconds;
  std::istringstream reply(ReadLine());
  for (double value; reply >> value;) seconds.push_back(value);
  return seconds;
}

}  // namespace zeroshard::bench
