#include "storage/layout.h"

#include <ctime>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Shape = std::vector<uint64_t>;

ParameterSpec Spec(std::string name, Shape shape, std::string module = "m") {
  ParameterSpec spec;
  spec.name = std::move(name);
  spec.shape = std::move(shape);
  spec.module = std::move(module);
  return spec;
}

std::vector<ParameterSpec> OneModule(const std::vector<Shape>& shapes) {
  std::vector<ParameterSpec> specs;
  for (const Shape& shape : shapes) specs.push_back(Spec(absl::StrCat("p", specs.size()), shape));
  return specs;
}

Layout Make(std::vector<ParameterSpec> specs, uint32_t workers) {
  absl::StatusOr<Layout> layout = Layout::Create(std::move(specs), workers);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

void ExpectRefused(std::vector<ParameterSpec> specs, uint32_t workers, const char* text) {
  const absl::StatusOr<Layout> layout = Layout::Create(std::move(specs), workers);
  EXPECT_EQ(layout.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(layout.status().message()), HasSubstr(text));
}

TEST(LayoutTest, SmallParametersOfAModuleShareAUnit) {
  const Layout layout = Make(OneModule({{16}, {4}, {0, 4}}), 1);
  ASSERT_EQ(layout.units().size(), 1u);
  const Unit& unit = layout.units()[0];
  EXPECT_EQ(unit.grains, 1u);
  EXPECT_EQ(unit.data_elements, 20u);
  EXPECT_THAT(unit.parameters, ElementsAre(0, 1, 2));
  EXPECT_EQ(layout.place(0).offset, 0u);
  EXPECT_EQ(layout.place(1).offset, 16u);
  EXPECT_EQ(layout.place(2).offset, 32u);
  EXPECT_EQ(layout.place(2).elements, 0u);
  EXPECT_EQ(layout.slice(0, 0), (GrainRange{0, 1}));
}

TEST(LayoutTest, AnEmptyParameterBetweenOthersTakesNoSpace) {
  const Layout layout = Make(OneModule({{8}, {0}, {24}}), 2);
  ASSERT_EQ(layout.units().size(), 1u);
  EXPECT_EQ(layout.place(1).offset, 16u);
  EXPECT_EQ(layout.place(2).offset, 16u);
  EXPECT_EQ(layout.data_elements(), 32u);
  EXPECT_EQ(layout.slice(0, 0).size() + layout.slice(0, 1).size(), 1u);
}

TEST(LayoutTest, MoreWorkersThanGrains) {
  const Layout layout = Make(OneModule({{3}}), 8);
  for (uint32_t worker = 0; worker < 7; ++worker) EXPECT_EQ(layout.slice(0, worker).size(), 0u);
  EXPECT_EQ(layout.slice(0, 7), (GrainRange{0, 1}));
  EXPECT_EQ(layout.owner(0, 0), 7u);
}

TEST(LayoutTest, AUnitOfEmptyParametersHasNoGrains) {
  const Layout layout = Make(OneModule({{0}, {3, 0, uint64_t{1} << 40}}), 3);
  ASSERT_EQ(layout.units().size(), 1u);
  EXPECT_EQ(layout.units()[0].grains, 0u);
  EXPECT_EQ(layout.window_bytes(), 0u);
  for (uint32_t worker = 0; worker < 3; ++worker) EXPECT_EQ(layout.slice(0, worker).size(), 0u);
}

TEST(LayoutTest, AScalarHasOneElement) {
  const Layout layout = Make(OneModule({{}}), 1);
  EXPECT_EQ(layout.place(0).elements, 1u);
  EXPECT_EQ(layout.units()[0].elements(), kGrainElements);
}

TEST(LayoutTest, TypesAndTrainabilityAreKeptApart) {
  std::vector<ParameterSpec> specs = OneModule({{4}, {4}, {4}, {4}});
  specs[1].dtype = DType::kBfloat16;
  specs[2].trainable = false;
  specs[3].dtype = DType::kBfloat16;
  const Layout layout = Make(std::move(specs), 1);
  ASSERT_EQ(layout.units().size(), 3u);
  EXPECT_THAT(layout.units()[0].parameters, ElementsAre(0));
  EXPECT_THAT(layout.units()[1].parameters, ElementsAre(1, 3));
  EXPECT_THAT(layout.units()[2].parameters, ElementsAre(2));
  EXPECT_EQ(layout.trainable_elements(), 12u);
  EXPECT_EQ(layout.data_elements(), 16u);
  EXPECT_EQ(layout.window_bytes(), 3 * kWindowAlignment);
}

TEST(LayoutTest, ConsecutiveSmallModulesCoalesceAroundLargeOnes) {
  const uint64_t large = kCoalesceElements;
  const Layout layout = Make({Spec("a", {large - 1}, "a"), Spec("b", {1}, "b"), Spec("c", {1}, "c"),
                              Spec("d", {large}, "d"), Spec("e", {2}, "e"), Spec("f", {2}, "f")},
                             1);
  // a and b reach the bound together, so that c starts anew; d is large and stands alone.
  ASSERT_EQ(layout.units().size(), 4u);
  EXPECT_THAT(layout.units()[0].parameters, ElementsAre(0, 1));
  EXPECT_THAT(layout.units()[1].parameters, ElementsAre(2));
  EXPECT_THAT(layout.units()[2].parameters, ElementsAre(3));
  EXPECT_THAT(layout.units()[3].parameters, ElementsAre(4, 5));
}

TEST(LayoutTest, AModuleWithVeryManyParametersIsCut) {
  std::vector<ParameterSpec> specs;
  for (uint32_t i = 0; i < 2 * kMaxUnitParameters + 1; ++i) {
    specs.push_back(Spec(absl::StrCat("p", i), {1}));
  }
  const Layout layout = Make(std::move(specs), 1);
  ASSERT_EQ(layout.units().size(), 3u);
  EXPECT_EQ(layout.units()[0].parameters.size(), kMaxUnitParameters);
  EXPECT_EQ(layout.units()[2].parameters.size(), 1u);
}

TEST(LayoutTest, PersistenceComparesDataElements) {
  const Layout layout = Make(OneModule({{100}}), 1);
  EXPECT_TRUE(layout.persistent(0, 100));
  EXPECT_FALSE(layout.persistent(0, 99));
}

TEST(LayoutTest, RefusesWhatIsWrongByName) {
  ExpectRefused({}, 1, "no parameters");
  ExpectRefused(OneModule({{1}}), 0, "0 workers");
  ExpectRefused(OneModule({{1}}), kMaxWorkers + 1, "workers");
  ExpectRefused({Spec("", {1})}, 1, "parameter 0");
  ExpectRefused({Spec(std::string(kMaxNameBytes + 1, 'x'), {1})}, 1, "bytes");
  ExpectRefused({Spec("ok", {1}), Spec("\xFF", {1})}, 1, "parameter 1");
  ExpectRefused({Spec("__metadata__", {1})}, 1, "reserved");
  ExpectRefused({Spec("w", {1}), Spec("w", {1})}, 1, "\"w\": the name is used twice");
  ParameterSpec tied = Spec("v", {1});
  tied.aliases = {"w"};
  ExpectRefused({Spec("w", {1}), tied}, 1, "alias \"w\" is used twice");
  ExpectRefused({Spec("w", {uint64_t{1} << 32, uint64_t{1} << 32})}, 1, "\"w\"");
  ExpectRefused({Spec("w", {kMaxElements + 1})}, 1, "\"w\"");
  ExpectRefused({Spec("w", {kMaxElements}), Spec("v", {1})}, 1, "\"v\"");
  ExpectRefused({Spec("w", Shape(kMaxDimensions + 1, 1))}, 1, "dimensions");
  ParameterSpec typeless = Spec("w", {1});
  typeless.dtype = static_cast<DType>(3);
  ExpectRefused({typeless}, 1, "data type");
}

TEST(LayoutTest, TheFingerprintSeesAllButTheWorkers) {
  const uint64_t print = Make(OneModule({{5}, {7}}), 1).fingerprint();
  EXPECT_EQ(print, Make(OneModule({{5}, {7}}), 6).fingerprint());
  EXPECT_NE(print, Make(OneModule({{7}, {5}}), 1).fingerprint());
  EXPECT_NE(print, Make(OneModule({{5}, {7, 1}}), 1).fingerprint());
  std::vector<ParameterSpec> changed = OneModule({{5}, {7}});
  changed[1].group = 1;
  EXPECT_NE(print, Make(changed, 1).fingerprint());
  changed = OneModule({{5}, {7}});
  changed[0].name = "q0";
  EXPECT_NE(print, Make(changed, 1).fingerprint());
  changed = OneModule({{5}, {7}});
  changed[0].aliases = {"tied"};
  EXPECT_NE(print, Make(changed, 1).fingerprint());
  changed = OneModule({{5}, {7}});
  for (ParameterSpec& spec : changed) spec.dtype = DType::kFloat16;
  EXPECT_NE(print, Make(changed, 1).fingerprint());
}

// The value is stored in checkpoints: a change of the format must be deliberate.
TEST(LayoutTest, TheFingerprintIsStable) {
  EXPECT_EQ(Make(OneModule({{16}, {4}, {0, 4}}), 1).fingerprint(), 9055648510422353864ull);
}

TEST(LayoutTest, AHundredThousandTensorsAreLaidOutFast) {
  std::vector<ParameterSpec> specs;
  for (int i = 0; i < 100000; ++i) {
    specs.push_back(
        Spec(absl::StrCat("model.layers.", i, ".weight"), {10}, absl::StrCat("model.layers.", i)));
  }
  // Processor time, which other programs do not lengthen.
  const std::clock_t start = std::clock();
  const Layout layout = Make(std::move(specs), 4);
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  EXPECT_EQ(layout.data_elements(), 1000000u);
  for (const Unit& unit : layout.units()) EXPECT_LE(unit.parameters.size(), kMaxUnitParameters);
#ifdef NDEBUG
  EXPECT_LT(seconds, 0.1);
#else
  EXPECT_LT(seconds, 2.0);
#endif
  RecordProperty("seconds", std::to_string(seconds));
}

std::vector<ParameterSpec> RandomSpecs(std::mt19937& random) {
  std::vector<ParameterSpec> specs;
  const uint32_t count = 1 + random() % 40;
  for (uint32_t i = 0; i < count; ++i) {
    Shape shape;
    for (uint32_t d = random() % 4; d > 0; --d) shape.push_back(random() % 30);
    if (random() % 8 == 0) shape = {kCoalesceElements + random() % 3 - 1};
    ParameterSpec spec = Spec(absl::StrCat("p", i), shape, absl::StrCat("m", random() % 10));
    spec.dtype = static_cast<DType>(random() % 3);
    spec.trainable = random() % 3 != 0;
    specs.push_back(std::move(spec));
  }
  return specs;
}

void ExpectPlacesAreDisjoint(const Layout& layout) {
  std::vector<int> seen(layout.parameters().size());
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    const Unit& unit = layout.units()[u];
    uint64_t end = 0;
    uint64_t data = 0;
    for (uint32_t p : unit.parameters) {
      const ParameterPlace& place = layout.place(p);
      EXPECT_EQ(place.unit, u);
      EXPECT_EQ(place.offset % kParameterAlignment, 0u);
      EXPECT_GE(place.offset, end);
      EXPECT_EQ(layout.parameters()[p].dtype, unit.dtype);
      EXPECT_EQ(layout.parameters()[p].trainable, unit.trainable);
      end = place.offset + place.elements;
      data += place.elements;
      ++seen[p];
    }
    EXPECT_LE(end, unit.elements());
    EXPECT_LT(unit.elements(), end + kGrainElements);
    EXPECT_EQ(data, unit.data_elements);
    EXPECT_EQ(unit.window_offset % kWindowAlignment, 0u);
    const bool last = u + 1 == layout.units().size();
    EXPECT_LE(unit.window_offset + unit.bytes(),
              last ? layout.window_bytes() : layout.units()[u + 1].window_offset);
  }
  for (int times : seen) EXPECT_EQ(times, 1);
}

void ExpectEveryGrainHasOneOwner(const Layout& layout) {
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    const uint64_t grains = layout.units()[u].grains;
    uint64_t next = 0;
    for (uint32_t worker = 0; worker < layout.workers(); ++worker) {
      const GrainRange slice = layout.slice(u, worker);
      EXPECT_EQ(slice.begin, next);
      EXPECT_GE(slice.size(), grains / layout.workers());
      EXPECT_LE(slice.size(), grains / layout.workers() + 1);
      for (uint64_t g = slice.begin; g < slice.end; ++g) EXPECT_EQ(layout.owner(u, g), worker);
      next = slice.end;
    }
    EXPECT_EQ(next, grains);
  }
}

TEST(LayoutTest, EveryElementIsOwnedOnceAndUnitsDoNotDependOnWorkers) {
  std::mt19937 random(7);
  for (int round = 0; round < 100; ++round) {
    const std::vector<ParameterSpec> specs = RandomSpecs(random);
    const Layout one = Make(specs, 1);
    ExpectPlacesAreDisjoint(one);
    for (uint32_t workers = 1; workers <= 9; ++workers) {
      const Layout layout = Make(specs, workers);
      EXPECT_EQ(layout.fingerprint(), one.fingerprint());
      ASSERT_EQ(layout.units().size(), one.units().size());
      for (uint32_t u = 0; u < one.units().size(); ++u) {
        EXPECT_EQ(layout.units()[u].parameters, one.units()[u].parameters);
        EXPECT_EQ(layout.units()[u].grains, one.units()[u].grains);
        EXPECT_EQ(layout.units()[u].window_offset, one.units()[u].window_offset);
      }
      ExpectEveryGrainHasOneOwner(layout);
    }
  }
}

}  // namespace
}  // namespace zeroshard
