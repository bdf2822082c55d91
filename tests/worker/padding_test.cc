#include "worker/padding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "storage/layout_proto.h"
#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

Layout MakeLayout(const std::vector<uint64_t>& sizes) {
  auto layout = LayoutFromProto(MakeManifest(sizes, model::v1::DTYPE_FLOAT32), /*workers=*/1);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

// Which elements of a unit no parameter owns.
std::vector<bool> PaddingOf(const Layout& layout, uint32_t unit) {
  std::vector<bool> padding(layout.units()[unit].elements(), true);
  for (const uint32_t parameter : layout.units()[unit].parameters) {
    const ParameterPlace& place = layout.place(parameter);
    std::fill_n(padding.begin() + static_cast<ptrdiff_t>(place.offset), place.elements, false);
  }
  return padding;
}

template <typename Storage>
void ExpectOnlyPaddingIsCleared(const Layout& layout, DType dtype) {
  const Padding padding(layout);
  for (uint32_t unit = 0; unit < layout.units().size(); ++unit) {
    const std::vector<bool> expected = PaddingOf(layout, unit);
    const uint64_t elements = layout.units()[unit].elements();
    for (const auto& [begin, end] : std::vector<std::pair<uint64_t, uint64_t>>{
             {0, elements}, {256, elements}, {0, elements / 512 * 256}, {16, 32}, {0, 0}}) {
      std::vector<Storage> values(elements, Storage{1});
      padding.Clear(unit, reinterpret_cast<std::byte*>(values.data()), dtype, begin, end);
      for (uint64_t i = 0; i < elements; ++i) {
        const bool cleared = expected[i] && begin <= i && i < end;
        ASSERT_EQ(values[i], cleared ? Storage{0} : Storage{1})
            << "unit " << unit << ", element " << i << " of [" << begin << ", " << end << ")";
      }
    }
  }
}

TEST(PaddingTest, ClearsWhatIsNoParameters) {
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint64_t> sizes;
    for (int i = 0; i < 60; ++i) sizes.push_back(random() % (round < 10 ? 40 : 2000));
    sizes.push_back(17);
    const Layout layout = MakeLayout(sizes);
    ExpectOnlyPaddingIsCleared<float>(layout, DType::kFloat32);
    ExpectOnlyPaddingIsCleared<uint16_t>(layout, DType::kBfloat16);
  }
}

TEST(PaddingTest, RowsAreCountedInUnitsOfSmallParametersOnly) {
  const Layout small = MakeLayout({10, 16, 33});
  const Padding padding(small);
  ASSERT_NE(padding.used(0), nullptr);
  const std::vector<uint8_t> used(padding.used(0), padding.used(0) + 16);
  EXPECT_EQ(used, (std::vector<uint8_t>{10, 16, 16, 16, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(Padding(MakeLayout(std::vector<uint64_t>(128, 16))).used(0), nullptr);
  EXPECT_EQ(Padding(MakeLayout({100'003})).used(0), nullptr);
}

}  // namespace
}  // namespace zeroshard
