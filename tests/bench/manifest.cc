// Many small parameters against one large one: 100,000 tensors of 10 elements, and a tensor of a
// million, each a job of one worker with one lane.
//
// A step is all that the worker does between the last gradient and the commit: every scatter (the
// gradients lie in the window already), the norm, the update and the completions; it begins with
// cold caches, as after a backward pass. Both jobs get the same numbers, and afterwards they must
// hold the same parameters, bit for bit. 16 elements of memory for each tensor of 10 make a ratio
// of 1.6.
#include <time.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/dtype.h"
#include "tests/bench/paired.h"
#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

constexpr uint64_t kTensorElements = 10;

// Leaves nothing of a job in the caches.
class ColdCaches {
 public:
  void Make() {
    for (size_t i = 0; i < lines_.size(); i += 64) ++lines_[i];
  }

 private:
  std::vector<uint8_t> lines_ = std::vector<uint8_t>(size_t{96} << 20);
};

double ThreadMilliseconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

LocalJobOptions Options(const std::vector<uint64_t>& sizes, model::v1::DType dtype) {
  LocalJobOptions options;
  options.manifest = MakeManifest(sizes, dtype);
  options.config = MakeConfig(2, 1, dtype);
  options.config.set_reduce_bucket_elements(1 << 22);  // the window holds all gradients
  if (dtype == model::v1::DTYPE_BFLOAT16) {
    options.config.set_master_form(model::v1::MASTER_FORM_SPLIT);
  }
  return options;
}

// A job that holds `values` in parameters of the given sizes, one after the other.
class Side {
 public:
  Side(const std::vector<uint64_t>& sizes, model::v1::DType dtype, const std::vector<float>& values,
       const std::vector<float>& gradients)
      : sizes_(sizes), job_(Options(sizes, dtype)) {
    job_.Hello(0, /*reconnect=*/false);
    job_.Run();
    job_.PutParameters(Cut(values));
    FillGradients(gradients);
  }

  // Milliseconds of a step, the median of some: processor time, as all runs on this thread and a
  // longer step would be interrupted more often than a short one.
  double Step(ColdCaches& caches, int steps) {
    std::vector<double> times;
    for (int i = 0; i < steps; ++i) {
      Scatter();
      const uint64_t id = job_.Step(0, 1, 1e-3);
      caches.Make();
      const double start = ThreadMilliseconds();
      job_.Run();
      times.push_back(ThreadMilliseconds() - start);
      ZS_CHECK(job_.Done(0, id), "the step is not complete");
    }
    return bench::Median(std::move(times));
  }

  uint64_t updates() const { return job_.result(0).updates; }

  std::vector<float> Values() const {
    std::vector<float> values;
    for (uint32_t p = 0; p < sizes_.size(); ++p) {
      const std::vector<float> one = job_.Parameter(p);
      values.insert(values.end(), one.begin(), one.end());
    }
    return values;
  }

 private:
  std::vector<std::vector<float>> Cut(const std::vector<float>& values) const {
    std::vector<std::vector<float>> parts;
    auto at = values.begin();
    for (const uint64_t size : sizes_) {
      parts.emplace_back(at, at + static_cast<ptrdiff_t>(size));
      at += static_cast<ptrdiff_t>(size);
    }
    return parts;
  }

  // Every unit's gradients behind those of the unit before it.
  void FillGradients(const std::vector<float>& gradients) {
    const Layout& layout = job_.layout();
    const std::vector<std::vector<float>> parts = Cut(gradients);
    uint64_t offset = 0;
    for (const Unit& unit : layout.units()) {
      std::vector<float> flat(unit.elements(), 0.0f);
      for (const uint32_t parameter : unit.parameters) {
        std::copy(parts[parameter].begin(), parts[parameter].end(),
                  flat.begin() + static_cast<ptrdiff_t>(layout.place(parameter).offset));
      }
      ConvertElements(flat.data(), DType::kFloat32, job_.gradient_window(0) + offset, unit.dtype,
                      flat.size());
      offset += unit.bytes();
    }
  }

  void Scatter() {
    uint64_t offset = 0;
    for (uint32_t u = 0; u < job_.layout().units().size(); ++u) {
      trainer::v1::SessionRequest request;
      request.mutable_scatter()->set_unit(u);
      request.mutable_scatter()->set_window_offset(offset);
      job_.Send(0, request);
      offset += job_.layout().units()[u].bytes();
    }
    trainer::v1::SessionRequest end;
    end.mutable_micro_end()->set_micro_step(0);
    job_.Send(0, end);
  }

  const std::vector<uint64_t> sizes_;
  LocalJob job_;
};

void Measure(bench::Bench& bench, const std::string& name, model::v1::DType dtype) {
  const uint64_t tensors = bench.Size<uint64_t>(100'000, 5'000);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(tensors * kTensorElements);
  std::vector<float> gradients(values.size());
  for (float& value : values) value = normal(random);
  for (float& value : gradients) value = normal(random);
  Side many(std::vector<uint64_t>(tensors, kTensorElements), dtype, values, gradients);
  Side flat({values.size()}, dtype, values, gradients);
  ColdCaches caches;
  const int steps = bench.Size(6, 1);
  bench.Compare(
      {{absl::StrCat("step of ", tensors, " small tensors, ", name), "one tensor", "ms",
        bench::AtMost(2.0)}},
      [&] { return std::vector<double>{many.Step(caches, steps)}; },
      [&] { return std::vector<double>{flat.Step(caches, steps)}; });
  while (many.updates() < flat.updates()) many.Step(caches, 1);
  while (flat.updates() < many.updates()) flat.Step(caches, 1);
  const std::vector<float> found = many.Values();
  const std::vector<float> wanted = flat.Values();
  bench.Require(found != values && found.size() == wanted.size() &&
                    std::memcmp(found.data(), wanted.data(), found.size() * sizeof(float)) == 0,
                name + ": the two jobs hold different parameters");
}

int Main(int argc, char** argv) {
  bench::Bench bench("manifest", argc, argv);
  Measure(bench, "fp32", model::v1::DTYPE_FLOAT32);
  Measure(bench, "bf16 with split masters", model::v1::DTYPE_BFLOAT16);
  return bench.Finish();
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) { return zeroshard::Main(argc, argv); }
