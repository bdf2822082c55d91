// Ranks that are processes: the library they find, collectives, and a rank that is killed.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace zeroshard {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
using testing::StartsWith;
using Words = std::vector<std::string>;

constexpr char kProgram[] = "tests/transport/nccl/nccl_rank";
constexpr char kNccl[] = "tests/fakes/nccl";
constexpr char kCuda[] = "tests/fakes/cuda";

class Process {
 public:
  Process(const Words& arguments, std::map<std::string, std::string> environment) {
    environment.emplace("LD_LIBRARY_PATH", std::string(kNccl) + ":" + kCuda);
    environment.emplace("ZEROSHARD_FAKE_CUDA", "devices=4");
    Words words = {kProgram};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    Words variables;
    for (const auto& [name, value] : environment) variables.push_back(name + "=" + value);
    std::vector<char*> envp;
    for (std::string& variable : variables) envp.push_back(variable.data());
    envp.push_back(nullptr);
    int ends[2] = {-1, -1};
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    EXPECT_EQ(::posix_spawn(&pid_, kProgram, &actions, nullptr, argv.data(), envp.data()), 0);
    posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    output_ = ::fdopen(ends[0], "r");
  }
  ~Process() {
    if (pid_ > 0) {
      Kill();
      Wait();
    }
    std::fclose(output_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // Empty at the end of the output.
  std::string ReadLine() {
    char line[1024] = {};
    if (std::fgets(line, sizeof(line), output_) == nullptr) return "";
    std::string text = line;
    if (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  }
  void Kill() { ::kill(pid_, SIGKILL); }
  int Wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  FILE* output_ = nullptr;
};

TEST(NcclProcess, TheLoadedLibraryIsTaken) {
  Process opened({"library"}, {});
  EXPECT_THAT(opened.ReadLine(), HasSubstr("opened by the data plane"));
  const std::map<std::string, std::string> empty = {{"LD_LIBRARY_PATH", kCuda}};
  const std::string torch = std::string(kNccl) + "/libtorch_cuda.so";
  Process inside({"library", "local", torch}, empty);
  EXPECT_THAT(inside.ReadLine(), HasSubstr("NCCL 2.28.9, PyTorch's own"));
  Process linked({"library", "global", torch}, empty);
  EXPECT_THAT(linked.ReadLine(), HasSubstr("NCCL 2.28.9, linked into this process"));
  Process loaded({"library", "local", std::string(kNccl) + "/libnccl.so.2"}, empty);
  EXPECT_THAT(loaded.ReadLine(), HasSubstr("loaded before by this process"));
  const std::string folder = testing::TempDir() + "/no_nccl";
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/libnccl.so.2") << "no library";
  Process none({"library"}, {{"LD_LIBRARY_PATH", folder}});
  EXPECT_THAT(none.ReadLine(), HasSubstr("no NCCL: this process has loaded no libnccl.so.2"));
  EXPECT_EQ(none.Wait(), 1);
  // The machine's own, where it has one: all symbols are there.
  Process own({"library"}, empty);
  EXPECT_THAT(own.ReadLine(), AnyOf(StartsWith("NCCL 2."), HasSubstr("no NCCL")));
  Process old({"library"}, {{"ZEROSHARD_FAKE_NCCL", "version=21201"}});
  EXPECT_THAT(old.ReadLine(), HasSubstr("NCCL 2.12.1, opened by the data plane"));
}

TEST(NcclProcess, CollectivesBetweenProcesses) {
  Process maker({"id"}, {});
  const std::string id = maker.ReadLine();
  std::vector<std::unique_ptr<Process>> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.push_back(std::make_unique<Process>(Words{"run", std::to_string(rank), "4", id},
                                              std::map<std::string, std::string>{}));
  }
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank->ReadLine(), "done");
    EXPECT_EQ(rank->Wait(), 0);
  }
}

TEST(NcclProcess, AWorldOfOneRankFromCreationToAbort) {
  Process alone({"alone"}, {});
  EXPECT_THAT(alone.ReadLine(), HasSubstr("NCCL 2.28.9"));
  EXPECT_EQ(alone.ReadLine(), "done");
  EXPECT_EQ(alone.Wait(), 0);
}

// How a survivor's wait ends when rank 2 of 3 is killed.
Words SurvivorsOf(const std::string& settings) {
  Process maker({"id"}, {});
  const std::string id = maker.ReadLine();
  const std::map<std::string, std::string> environment = {{"ZEROSHARD_FAKE_NCCL", settings}};
  Process victim({"run", "2", "3", id, "victim"}, environment);
  Process first({"run", "0", "3", id, "survivor"}, environment);
  Process second({"run", "1", "3", id, "survivor"}, environment);
  EXPECT_EQ(victim.ReadLine(), "ready");
  EXPECT_EQ(first.ReadLine(), "waiting");
  EXPECT_EQ(second.ReadLine(), "waiting");
  victim.Kill();
  EXPECT_EQ(victim.Wait(), -SIGKILL);
  const Words ends = {first.ReadLine(), second.ReadLine()};
  EXPECT_EQ(first.Wait(), 0);
  EXPECT_EQ(second.Wait(), 0);
  return ends;
}

TEST(NcclProcess, AKilledRankIsAnErrorWhereNcclSeesIt) {
  for (const std::string& end : SurvivorsOf("dead-peer=error")) EXPECT_EQ(end, "UNAVAILABLE");
}

TEST(NcclProcess, AKilledRankIsADeadlineWhereNcclDoesNotSeeIt) {
  for (const std::string& end : SurvivorsOf("dead-peer=hang")) EXPECT_EQ(end, "DEADLINE_EXCEEDED");
}

}  // namespace
}  // namespace zeroshard
