// Paired measurements: how fast is A against B, on a machine whose speed wanders?
//
// A and B run in one process tree in blocks of A B B A; a block's ratio is (A1 + A2) / (B1 + B2),
// so that a slow drift cancels. The figure is the median ratio of all blocks, with a bootstrap 95 %
// interval. Every figure is one line of JSON on stdout:
//
//   {"bench":"rpc","figure":"request p50","vs":"stream echo p50","unit":"us","a":91.2,"b":98.0,
//    "ratio":0.93,"ci":[0.92,0.94],"target":"<= 1.12","pass":true,"blocks":12}
//
// With --smoke everything runs once, small, and targets are not judged ("pass" is null). Not
// synchronised.
#ifndef ZEROSHARD_TESTS_BENCH_PAIRED_H_
#define ZEROSHARD_TESTS_BENCH_PAIRED_H_

#include <algorithm>
#include <cstdio>
#include <functional>
#include <iostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace zeroshard::bench {

// The value below which `share` of the samples lie. Needs samples.
inline double Percentile(std::vector<double> samples, double share) {
  const size_t index = std::min(samples.size() - 1,
                                static_cast<size_t>(share * static_cast<double>(samples.size())));
  std::nth_element(samples.begin(), samples.begin() + static_cast<ptrdiff_t>(index), samples.end());
  return samples[index];
}

inline double Median(std::vector<double> samples) { return Percentile(std::move(samples), 0.5); }

// The 95 % interval of the median, from 2000 resamples with a fixed seed.
inline std::pair<double, double> BootstrapInterval(const std::vector<double>& samples) {
  std::mt19937 random(1);
  std::vector<double> medians;
  for (int round = 0; round < 2000; ++round) {
    std::vector<double> resample;
    for (size_t i = 0; i < samples.size(); ++i)
      resample.push_back(samples[random() % samples.size()]);
    medians.push_back(Median(std::move(resample)));
  }
  return {Percentile(medians, 0.025), Percentile(medians, 0.975)};
}

struct Target {
  enum class Kind { kAtMost, kAtLeast, kNone };
  Kind kind = Kind::kNone;
  double ratio = 0.0;
};
inline Target AtMost(double ratio) { return {Target::Kind::kAtMost, ratio}; }
inline Target AtLeast(double ratio) { return {Target::Kind::kAtLeast, ratio}; }

// What one line of output says.
struct Figure {
  std::string name;  // of A's value
  std::string vs;    // of B's value
  std::string unit;
  Target target{};
};

class Bench {
 public:
  // One run of a side: a value for every figure, in the same order.
  using Side = std::function<std::vector<double>()>;

  // Takes --smoke and --blocks=N out of the command line.
  Bench(std::string name, int argc, char** argv) : name_(std::move(name)) {
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      if (argument == "--smoke") smoke_ = true;
      if (argument.rfind("--blocks=", 0) == 0) blocks_ = std::stoi(argument.substr(9));
    }
    if (smoke_) blocks_ = 1;
  }

  bool smoke() const { return smoke_; }
  // `full`, or `small` with --smoke.
  template <typename T>
  T Size(T full, T small) const {
    return smoke_ ? small : full;
  }

  // Measures and prints all figures. Both sides run once before, unmeasured.
  void Compare(const std::vector<Figure>& figures, const Side& a, const Side& b) {
    a();
    b();
    std::vector<std::vector<double>> ratios(figures.size()), values_a(ratios), values_b(ratios);
    for (int block = 0; block < blocks_; ++block) {
      const std::vector<double> a1 = a(), b1 = b(), b2 = b(), a2 = a();
      for (size_t i = 0; i < figures.size(); ++i) {
        ratios[i].push_back((a1[i] + a2[i]) / (b1[i] + b2[i]));
        values_a[i].insert(values_a[i].end(), {a1[i], a2[i]});
        values_b[i].insert(values_b[i].end(), {b1[i], b2[i]});
      }
    }
    for (size_t i = 0; i < figures.size(); ++i) {
      Report(figures[i], ratios[i], Median(values_a[i]), Median(values_b[i]));
    }
  }

  // A value that has no peer, judged against a limit in its own unit.
  void Absolute(const Figure& figure, double value) {
    Print(figure, {{"value", value}}, Judge(figure.target, value));
  }

  // A check that a speed rests on; a failed one fails the run even with --smoke.
  void Require(bool holds, const std::string& what) {
    if (holds) return;
    std::cerr << name_ << ": " << what << std::endl;
    broken_ = true;
  }

  // The exit status of main().
  int Finish() const { return broken_ || (missed_ && !smoke_) ? 1 : 0; }

 private:
  static bool Judge(const Target& target, double ratio) {
    switch (target.kind) {
      case Target::Kind::kAtMost:
        return ratio <= target.ratio;
      case Target::Kind::kAtLeast:
        return ratio >= target.ratio;
      case Target::Kind::kNone:
        break;
    }
    return true;
  }

  void Report(const Figure& figure, const std::vector<double>& ratios, double a, double b) {
    const double ratio = Median(ratios);
    const auto [low, high] = BootstrapInterval(ratios);
    Print(figure,
          {{"vs", figure.vs},
           {"a", a},
           {"b", b},
           {"ratio", ratio},
           {"ci", {low, high}},
           {"blocks", ratios.size()}},
          Judge(figure.target, ratio));
  }

  void Print(const Figure& figure, nlohmann::ordered_json values, bool pass) {
    nlohmann::ordered_json line = {
        {"bench", name_}, {"figure", figure.name}, {"unit", figure.unit}};
    line.update(values);
    if (figure.target.kind != Target::Kind::kNone) {
      line["target"] = absl::StrCat(figure.target.kind == Target::Kind::kAtMost ? "<= " : ">= ",
                                    figure.target.ratio);
      line["pass"] = smoke_ ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(pass);
      missed_ = missed_ || !pass;
    }
    std::cout << line.dump() << std::endl;
  }

  const std::string name_;
  bool smoke_ = false;
  int blocks_ = 12;
  bool missed_ = false;
  bool broken_ = false;
};

}  // namespace zeroshard::bench

#endif  // ZEROSHARD_TESTS_BENCH_PAIRED_H_
