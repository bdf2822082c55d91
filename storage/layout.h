// Layout: where every element of a job's parameters lies.
//
// A pure value computed from the manifest and the number of workers, the same on every process that
// computes it; processes compare `fingerprint()` before they share memory. Immutable after Create,
// so any thread may read it.
//
//   parameters -> units -> grains -> slices (one a worker) -> chunks
//
// A unit holds the parameters of one module that have one data type and one trainability;
// consecutive small modules coalesce. Inside a unit every parameter starts at a multiple of
// kParameterAlignment elements; the unit is padded to whole grains. Units, parameter places and
// window offsets do not depend on the number of workers, the stage or any bucket size: nothing that
// is addressed by grain changes when they do. Format page: docs/layout.md.
#ifndef ZEROSHARD_STORAGE_LAYOUT_H_
#define ZEROSHARD_STORAGE_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/dtype.h"

namespace zeroshard {

inline constexpr uint64_t kGrainElements = 256;
// Elements; 64 bytes in fp32.
inline constexpr uint64_t kParameterAlignment = 16;
// Modules below this many elements coalesce with their successors.
inline constexpr uint64_t kCoalesceElements = 16 * 1024;
// Bound of the presence bitmap that travels with a scatter.
inline constexpr uint32_t kMaxUnitParameters = 1024;
// Units start at multiples of this many bytes in the parameter window.
inline constexpr uint64_t kWindowAlignment = 4096;
// Upper bound of one unit and of a whole manifest, in elements.
inline constexpr uint64_t kMaxElements = uint64_t{1} << 48;
inline constexpr uint32_t kMaxWorkers = 4096;
inline constexpr uint32_t kMaxParameters = 4u << 20;
inline constexpr size_t kMaxNameBytes = 1024;
inline constexpr size_t kMaxDimensions = 64;

struct ParameterSpec {
  std::string name;
  std::vector<std::string> aliases = {};
  std::vector<uint64_t> shape = {};  // {} is a scalar; a 0 makes an empty parameter
  DType dtype = DType::kFloat32;
  bool trainable = true;
  uint32_t group = 0;
  std::string module = {};
};

// Where one parameter lies.
struct ParameterPlace {
  uint32_t unit = 0;
  uint64_t offset = 0;    // first element within the unit
  uint64_t elements = 0;  // without padding
};

struct GrainRange {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t size() const { return end - begin; }
  uint64_t first_element() const { return begin * kGrainElements; }
  uint64_t elements() const { return size() * kGrainElements; }
  friend bool operator==(const GrainRange&, const GrainRange&) = default;
};

struct Unit {
  DType dtype = DType::kFloat32;
  bool trainable = true;
  std::vector<uint32_t> parameters;  // indices into Layout::parameters(), in order of offset
  uint64_t data_elements = 0;        // elements of the parameters, without any padding
  uint64_t grains = 0;               // padded length in grains; 0 for a unit of empty parameters
  uint64_t window_offset = 0;        // byte offset of the unit in the parameter window

  uint64_t elements() const { return grains * kGrainElements; }
  uint64_t bytes() const { return elements() * SizeOf(dtype); }
};

class Layout {
 public:
  // Errors (InvalidArgument, naming the parameter): an empty or over-long name, a name used twice,
  // a shape whose product overflows kMaxElements, an unknown data type, a number of workers outside
  // [1, kMaxWorkers]. An empty manifest is refused.
  static absl::StatusOr<Layout> Create(std::vector<ParameterSpec> parameters, uint32_t workers);

  uint32_t workers() const { return workers_; }
  std::span<const ParameterSpec> parameters() const { return parameters_; }
  std::span<const Unit> units() const { return units_; }
  const ParameterPlace& place(uint32_t parameter) const { return places_[parameter]; }

  // The run of grains of `unit` that `worker` owns; runs of successive workers are contiguous and
  // differ by at most one grain. May be empty. `worker` < workers().
  GrainRange slice(uint32_t unit, uint32_t worker) const;
  // The worker that owns a grain; `grain` < units()[unit].grains.
  uint32_t owner(uint32_t unit, uint64_t grain) const;

  // Bytes of a parameter window that holds all units at their offsets.
  uint64_t window_bytes() const { return window_bytes_; }
  // Sum of data_elements over all / over trainable units.
  uint64_t data_elements() const { return data_elements_; }
  uint64_t trainable_elements() const { return trainable_elements_; }

  // Whether `unit` stays resident at stage 3 (at or under the threshold, in elements).
  bool persistent(uint32_t unit, uint64_t threshold) const {
    return units_[unit].data_elements <= threshold;
  }

  // xxh3 over all that the layout is made of but the number of workers.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  Layout() = default;

  // Steps of Create: fills places_[].elements and the sums; fills the rest of places_ and units_.
  absl::Status CheckParameters();
  void PlaceUnits();

  uint32_t workers_ = 0;
  std::vector<ParameterSpec> parameters_;
  std::vector<ParameterPlace> places_;
  std::vector<Unit> units_;
  uint64_t window_bytes_ = 0;
  uint64_t data_elements_ = 0;
  uint64_t trainable_elements_ = 0;
  uint64_t fingerprint_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_LAYOUT_H_
