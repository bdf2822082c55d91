// A trainer in C++: fits y = w.x + b by stochastic gradient descent, with the parameters and their
// updates in the daemon. Each rank is a process that sees its own data.
//
//   linear_regression --ranks 2 --stage 3 --steps 200
//
// Exits with 0 when the parameters came close to those that made the data.
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client/session.h"

namespace zeroshard {
namespace {

constexpr uint32_t kFeatures = 1000;
constexpr uint32_t kBatch = 256;

struct Flags {
  std::string socket;
  std::string job = "linear-regression";
  uint32_t ranks = 1;
  uint32_t stage = 3;
  uint64_t steps = 200;
};

// The parameters that the data is made with.
float TrueWeight(uint32_t i) { return std::sin(static_cast<float>(i)); }
constexpr float kTrueBias = 0.5F;

class Trainer {
 public:
  Trainer(Session* session, uint32_t rank) : session_(session), random_(1000 + rank) {}

  // All ranks may put the same values; here the first one does.
  absl::Status Initialize() {
    if (session_->rank() != 0) return absl::OkStatus();
    ZS_ASSIGN_OR_RETURN(const uint64_t slot, session_->AcquireSlot(unit().bytes()));
    std::fill_n(Gradient(slot), unit().elements(), 0.0F);
    ZS_ASSIGN_OR_RETURN(
        const RequestId id,
        session_->Put(
            {.unit = 0, .elements = unit().elements(), .window_offset = slot, .last = true}));
    return session_->Wait(id);
  }

  // One step on fresh data; returns the mean squared error before it.
  absl::StatusOr<double> Step() {
    const uint32_t units[] = {0};
    ZS_ASSIGN_OR_RETURN(const RequestId gather, session_->Gather(units));
    ZS_RETURN_IF_ERROR(session_->Wait(gather));
    ZS_ASSIGN_OR_RETURN(const uint64_t slot, session_->AcquireSlot(unit().bytes()));
    const double loss = ForwardAndBackward(Parameters(), Gradient(slot));
    ZS_RETURN_IF_ERROR(session_->Release(units).status());
    ZS_RETURN_IF_ERROR(session_->Scatter({.unit = 0, .window_offset = slot}).status());
    ZS_RETURN_IF_ERROR(session_->MicroEnd(0).status());
    ZS_ASSIGN_OR_RETURN(const RequestId step, session_->Step({.micro_steps = 1}));
    ZS_RETURN_IF_ERROR(session_->Wait(step));
    return loss;
  }

 private:
  const Unit& unit() const { return session_->layout().units()[0]; }
  uint64_t weight() const { return session_->layout().place(0).offset; }
  uint64_t bias() const { return session_->layout().place(1).offset; }
  const float* Parameters() const {
    return reinterpret_cast<const float*>(session_->parameter_window().data() +
                                          unit().window_offset);
  }
  float* Gradient(uint64_t slot) const {
    return reinterpret_cast<float*>(session_->gradient_window().data() + slot);
  }

  double ForwardAndBackward(const float* parameters, float* gradient) {
    std::fill_n(gradient, unit().elements(), 0.0F);
    std::normal_distribution<float> normal;
    std::vector<float> x(kFeatures);
    double loss = 0.0;
    for (uint32_t sample = 0; sample < kBatch; ++sample) {
      float error = parameters[bias()] - kTrueBias;
      for (uint32_t i = 0; i < kFeatures; ++i) {
        x[i] = normal(random_);
        error += (parameters[weight() + i] - TrueWeight(i)) * x[i];
      }
      loss += error * error / kBatch;
      for (uint32_t i = 0; i < kFeatures; ++i) gradient[weight() + i] += 2 * error * x[i] / kBatch;
      gradient[bias()] += 2 * error / kBatch;
    }
    return loss;
  }

  Session* const session_;
  std::mt19937 random_;
};

// One rank, from attach to detach; returns its last loss.
absl::StatusOr<double> Train(const Flags& flags, uint32_t rank) {
  AttachOptions options{
      .socket = flags.socket,
      .job = flags.job,
      .rank = rank,
      .world_size = flags.ranks,
      .parameters = {{.name = "weight", .aliases = {}, .shape = {kFeatures}, .module = ""},
                     {.name = "bias", .aliases = {}, .shape = {}, .module = ""}},
      .groups = {{.lr = 0.05}},
      .ds_config =
          absl::StrCat(R"({"train_micro_batch_size_per_gpu": )", kBatch,
                       R"(, "gradient_clipping": 0, "optimizer": {"type": "SGD", "params": )",
                       R"({"lr": 0.05}}, "zero_optimization": {"stage": )", flags.stage, "}}")};
  ZS_ASSIGN_OR_RETURN(auto session, Session::Attach(std::move(options)));
  Trainer trainer(session.get(), rank);
  if (!session->state().initialized) ZS_RETURN_IF_ERROR(trainer.Initialize());
  double loss = 0.0;
  for (uint64_t step = session->state().step; step < flags.steps; ++step) {
    ZS_ASSIGN_OR_RETURN(loss, trainer.Step());
    if (rank == 0 && (step + 1) % 20 == 0) {
      std::cout << "step " << step + 1 << " loss " << loss << std::endl;
    }
  }
  ZS_RETURN_IF_ERROR(session->Detach());
  return loss;
}

int RunRank(const Flags& flags, uint32_t rank) {
  const absl::StatusOr<double> loss = Train(flags, rank);
  if (!loss.ok()) {
    std::cerr << "rank " << rank << ": " << loss.status() << std::endl;
    return 1;
  }
  if (*loss > 1.0) {
    std::cerr << "rank " << rank << ": the loss is still " << *loss << std::endl;
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) {
  zeroshard::Flags flags;
  CLI::App app("Linear regression with parameters in a ZeroShard daemon.");
  app.add_option("--socket", flags.socket, "the daemon's socket; default: $ZEROSHARD_SOCKET");
  app.add_option("--job", flags.job, "name of the job");
  app.add_option("--ranks", flags.ranks, "trainer processes")->check(CLI::Range(1, 64));
  app.add_option("--stage", flags.stage, "ZeRO stage")->check(CLI::Range(0, 3));
  app.add_option("--steps", flags.steps, "optimizer steps");
  CLI11_PARSE(app, argc, argv);

  // Children are made before any session exists: a forked child has none.
  std::vector<pid_t> children;
  for (uint32_t rank = 1; rank < flags.ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) return zeroshard::RunRank(flags, rank);
    children.push_back(child);
  }
  int result = zeroshard::RunRank(flags, 0);
  for (const pid_t child : children) {
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) result = 3;
  }
  return result;
}
